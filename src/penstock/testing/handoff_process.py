"""A rank of a toy engine in a process of its own, which an engine commands by lines of JSON.

    prefill rank:  {"compute": name, "tokens": n, "slots": […]}  →  {"computed": name}
    decode rank:   {"check": name, "first": n, "tokens": n, "slots": […]}
                                                        →  {"checked": name, "right": true}
    either:        {"tell": n}                          →  {"told": n, "retired_bytes": n, …}

It computes one layer of one prompt at a time, and sends between them. It ends when its standard
input does, so that it does not outlive its engine.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.handoff.settings import HandoffSettings  # noqa: TC001 - msgspec reads it
from penstock.runtime.handoff.decode_rank import DecodeRankDriver
from penstock.runtime.handoff.lines import zmq_lines
from penstock.runtime.handoff.prefill_rank import PrefillRankDriver
from penstock.runtime.handoff.reading import ArrayReader
from penstock.runtime.handoff.taking import ArrayTaker
from penstock.testing.handoff_pair import LAYERS, Pool, Shape, directory_of, keys_of, layouts_of
from penstock.transport.shared_memory import SharedTarget
from penstock.transport.shared_writer import connect_shared
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "from penstock.testing.handoff_process import main; main()"
WAIT_S = 1.0


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank process is told when it starts."""

    name: str
    shape: Shape
    prefix: str
    """Of the addresses at which parties listen."""
    settings: HandoffSettings


def addresses(prefix: str) -> Callable[[str], str]:
    """Where each party listens."""
    return lambda name: f"ipc://{prefix}-{name.replace('/', '-')}"


class Commands:
    """Lines of JSON on standard input, without waiting for them."""

    def __init__(self) -> None:
        self.descriptor = sys.stdin.fileno()
        self.ended = False
        self._rest = b""
        os.set_blocking(self.descriptor, False)

    def take(self) -> list[dict[str, Any]]:
        """What has come."""
        try:
            found = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return []
        self.ended = not found
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]


def tell(**words: object) -> None:
    """Prints a line of JSON."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class PrefillProcess:
    """A prefill rank that computes what it is told to."""

    def __init__(self, orders: RankOrders) -> None:
        directory = directory_of(orders.shape, addresses(orders.prefix))
        self.pool = Pool(layouts_of(orders.shape)[orders.name])
        self.driver = PrefillRankDriver(
            directory,
            orders.name,
            zmq_lines(directory, orders.name),
            reader=ArrayReader(self.pool.tier, Algorithm.XXH3),
            connect=connect_shared,
            incarnation=secrets.randbits(63) + 1,
            settings=orders.settings,
        )
        self._queue: deque[tuple[str, int, list[int], int]] = deque()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._queue

    def obey(self, order: dict[str, Any]) -> None:
        """Begins with what it was told."""
        if "compute" in order:
            name, tokens, slots = order["compute"], order["tokens"], order["slots"]
            keys = keys_of(name, tokens, self.pool.layout.block_tokens)
            self.driver.admit(name, token_count=tokens, slots=slots, keys=keys)
            self._queue.append((name, tokens, slots, 0))
        else:
            tell(told=order["tell"], prompts=len(self.driver.machine.prompts))

    def work(self) -> None:
        """Computes one layer of the oldest prompt."""
        if not self._queue:
            return
        name, tokens, slots, layer = self._queue.popleft()
        self.pool.compute(name, slots, range(tokens), range(layer, layer + 1))
        self.driver.progress(name, layer=layer, tokens=tokens)
        if layer + 1 < LAYERS:
            self._queue.appendleft((name, tokens, slots, layer + 1))
        else:
            tell(computed=name)


class DecodeProcess:
    """A decode rank that looks whether what it got is right."""

    idle = True

    def __init__(self, orders: RankOrders) -> None:
        directory = directory_of(orders.shape, addresses(orders.prefix))
        self.pool = Pool(layouts_of(orders.shape)[orders.name])
        self.target = SharedTarget(huge_pages=False)
        self.driver = DecodeRankDriver(
            directory,
            orders.name,
            zmq_lines(directory, orders.name),
            taker=ArrayTaker(self.pool.tier, Algorithm.XXH3),
            target=self.target,
            incarnation=secrets.randbits(63) + 1,
            settings=orders.settings,
        )

    def obey(self, order: dict[str, Any]) -> None:
        """Answers what it was asked."""
        if "check" in order:
            name, tokens = order["check"], range(order["first"], order["tokens"])
            tell(checked=name, right=self.pool.holds(name, order["slots"], tokens))
        else:
            counts = self.driver.machine.counts
            tell(
                told=order["tell"],
                open_bytes=self.target.open_bytes,
                retired_bytes=self.target.retired_bytes,
                collections=len(self.driver.machine.collections),
                retired=counts.get("areas retired", 0),
                freed=counts.get("areas freed", 0),
            )

    def work(self) -> None:
        """There is nothing to compute."""


def main() -> None:
    """Runs a rank until its standard input ends."""
    orders = msgspec.json.decode(sys.argv[1], type=RankOrders)
    is_source = orders.name.startswith("prefill/")
    rank = PrefillProcess(orders) if is_source else DecodeProcess(orders)
    commands = Commands()
    tell(ready=orders.name)
    while not commands.ended:
        for order in commands.take():
            rank.obey(order)
        rank.work()
        rank.driver.step()
        if rank.idle:
            rank.driver.wait(time.monotonic() + WAIT_S, [commands.descriptor])
    rank.driver.close()
