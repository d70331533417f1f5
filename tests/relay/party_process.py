"""A party of two engines over NIXL, in a process of its own, that takes orders line by line.

    prefill      {"offer": name, "tokens": n, "slots": […]}   →  {"offered": name, "offer": …}
                                                            or  {"refused": name, "why": …}
                 {"first_token": name}
                 {"cancel": name}
    prefill/N    {"compute": offer}                           →  {"computed": name, "layer": n}, …
                                                            or  {"dropped": name}
    decode       {"claim": name, "tokens": n, "slots": […]}   →  {"refused": name, "why": …} if so
                 {"cancel": name}
    decode/N     {"check": name, "tokens": n, "slots": […]}   →  {"checked": name, "right": true}
    schedulers                        {"ended": name, "delivered": true, "right": true, "why": ""}
    all          {"died": n}          a rank of this scheduler, or the scheduler of this rank
                 {"tell": n}                 →  {"told": n, "under_way": n, "landing_bytes": n}

A prefill rank computes one layer of one prompt at a time, and sends between them. A party ends when
its standard input does.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import msgspec

import penstock
from lab.bench.handoff_rank import Commands, print_json
from lab.fixtures.handoff_pair import LAYERS, Pool, Shape, layouts_of
from penstock.errors import UnavailableError
from penstock.handoff.handoff import EngineHandoff, HandoffRank
from penstock.transport.machine_keys import MachineKeys

TIMEOUT_S = 20.0
"""Of a handoff: both sides end it by then, whatever has become of the other."""
SETTINGS = penstock.HandoffSettings(
    times=penstock.HandoffTimes(resend_s=0.05, resend_cap_s=0.5, ping_s=0.2, suspect_s=2.0),
    bounds=penstock.HandoffBounds(berth_bytes=32_768, berth_count=4),
)
PROGRAM = "from tests.relay.party_process import main; main()"
WAIT_S = 1.0

Order: TypeAlias = dict[str, Any]


class PartyOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a party is told when it starts."""

    name: str
    shape: Shape
    prefill: str
    decode: str
    """Where the schedulers listen."""
    ranks: tuple[str, ...]
    """Where the prefill ranks listen."""
    keys: str = ""
    """The file of the machine's keys, if the parties are on several machines."""

    def pair(self) -> penstock.HandoffPair:
        """The two engines, as this party knows them."""
        layouts = layouts_of(self.shape)

        def of(engine: str) -> tuple[penstock.Layout, ...]:
            return tuple(each for name, each in layouts.items() if name.startswith(f"{engine}/"))

        prefill = penstock.HandoffEngine(
            name="prefill",
            address=self.prefill,
            rank_addresses=self.ranks,
            layouts=of("prefill"),
        )
        decode = penstock.HandoffEngine(name="decode", address=self.decode, layouts=of("decode"))
        return penstock.HandoffPair(
            prefill=prefill,
            decode=decode,
            model="toy",
            weights="v1",
            transport="auto" if self.keys else "nixl",
            secret=MachineKeys.read(Path(self.keys)) if self.keys else b"",
        )


def prompt_of(name: str, tokens: int) -> list[int]:
    return [crc32(name.encode()), *range(1, tokens)]


def first_token_of(name: str) -> int:
    return crc32(name.encode()) >> 1


class Party(ABC):
    """What the four kinds of parties have in common."""

    handoff: penstock.Handoff
    idle = True
    """Whether there is nothing to compute."""

    def take(self, order: Order) -> None:
        if "died" in order:
            if isinstance(self.handoff, EngineHandoff):
                self.handoff.rank_died(order["died"])
            elif isinstance(self.handoff, HandoffRank):
                self.handoff.engine_died()
        elif "tell" in order:
            found = self.handoff.statistics()
            print_json(
                told=order["tell"], under_way=found.under_way, landing_bytes=found.landing_bytes
            )
        else:
            self.obey(order)

    @abstractmethod
    def obey(self, order: Order) -> None:
        """Does what only this kind of party does."""

    def work(self) -> None:  # noqa: B027 - only prefill ranks compute
        """Computes a little, if it has to."""


class PrefillParty(Party):
    """The scheduler of the prefill engine."""

    def __init__(self, orders: PartyOrders) -> None:
        self.handoff: penstock.PrefillHandoff = penstock.open_prefill(
            orders.pair(), settings=SETTINGS
        )

    def obey(self, order: Order) -> None:
        match order:
            case {"offer": name, "tokens": tokens, "slots": slots}:
                try:
                    offer = self.handoff.offer(
                        name, prompt_of(name, tokens), slots=slots, timeout_s=TIMEOUT_S
                    )
                except UnavailableError as error:
                    print_json(refused=name, why=str(error))
                else:
                    print_json(offered=name, offer=msgspec.to_builtins(offer))
            case {"first_token": name}:
                self.handoff.first_token(name, first_token_of(name))
            case {"cancel": name}:
                self.handoff.cancel(name)


class PrefillRankParty(Party):
    """A rank of it."""

    def __init__(self, orders: PartyOrders) -> None:
        self.pool = Pool(layouts_of(orders.shape)[orders.name])
        self.handoff: penstock.PrefillHandoffRank = penstock.open_prefill(
            orders.pair(), **memory_of(self.pool), rank=number_of(orders.name), settings=SETTINGS
        )
        self._queue: deque[tuple[penstock.HandoffOffer, int]] = deque()

    @property
    def idle(self) -> bool:
        return not self._queue

    def obey(self, order: Order) -> None:
        offer = msgspec.convert(order["compute"], penstock.HandoffOffer)
        try:
            self.handoff.admit(offer)
        except ValueError:  # Of a scheduler that has died since, and this rank knows it.
            print_json(dropped=offer.handoff)
        else:
            self._queue.append((offer, 0))

    def work(self) -> None:
        if not self._queue:
            return
        offer, layer = self._queue.popleft()
        tokens = range(offer.token_count)
        self.pool.compute(offer.handoff, offer.slots, tokens, range(layer, layer + 1))
        self.handoff.computed({offer.handoff: len(tokens)}, layer=layer)
        if layer + 1 < LAYERS:
            self._queue.append((offer, layer + 1))
        print_json(computed=offer.handoff, layer=layer)


class DecodeParty(Party):
    """The scheduler of the decode engine."""

    def __init__(self, orders: PartyOrders) -> None:
        self.handoff: penstock.DecodeHandoff = penstock.open_decode(
            orders.pair(), settings=SETTINGS
        )

    def obey(self, order: Order) -> None:
        match order:
            case {"claim": name, "tokens": tokens, "slots": slots}:
                try:
                    self.handoff.claim(
                        name, prompt_of(name, tokens), slots=slots, timeout_s=TIMEOUT_S
                    )
                except UnavailableError as error:
                    print_json(refused=name, why=str(error))
            case {"cancel": name}:
                self.handoff.cancel(name)


class DecodeRankParty(Party):
    """A rank of it, which compares what it got."""

    def __init__(self, orders: PartyOrders) -> None:
        self.pool = Pool(layouts_of(orders.shape)[orders.name])
        self.handoff: penstock.DecodeHandoffRank = penstock.open_decode(
            orders.pair(), **memory_of(self.pool), rank=number_of(orders.name), settings=SETTINGS
        )

    def obey(self, order: Order) -> None:
        name, tokens, slots = order["check"], range(order["tokens"]), order["slots"]
        print_json(checked=name, right=self.pool.holds(name, slots, tokens))


PARTIES: dict[tuple[str, bool], type[Party]] = {
    ("prefill", False): PrefillParty,
    ("prefill", True): PrefillRankParty,
    ("decode", False): DecodeParty,
    ("decode", True): DecodeRankParty,
}
"""By engine, and whether it is a rank."""


def memory_of(pool: Pool) -> dict[str, Any]:
    buffers = pool.tier.blocks(()).buffers
    return {"kv": [buffers[at] for at in range(len(buffers))], "layout": pool.layout}


def number_of(rank: str) -> int:
    return int(rank.split("/")[1])


def report(party: Party, result: penstock.HandoffResult) -> None:
    """How a handoff ended; the first token of one that was delivered to decode is compared."""
    right = not isinstance(party, DecodeParty) or result.tokens == (first_token_of(result.handoff),)
    print_json(ended=result.handoff, delivered=result.delivered, right=right, why=result.why)


def main() -> None:
    """Runs a party until its standard input ends."""
    orders = msgspec.json.decode(sys.argv[1], type=PartyOrders)
    engine, is_rank, _ = orders.name.partition("/")
    party = PARTIES[engine, bool(is_rank)](orders)
    commands = Commands()
    print_json(ready=orders.name)
    with party.handoff as handoff:
        while not commands.ended:
            for order in commands.take():
                party.take(order)
            party.work()
            for result in handoff.step():
                report(party, result)
            if party.idle:
                handoff.wait(time.monotonic() + WAIT_S, descriptors=[commands.descriptor])
