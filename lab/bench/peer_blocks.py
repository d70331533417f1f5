"""A prefix from the host memory of another engine, beside Redis and a plain copy over TCP.

All are on loopback, and bring the same bytes into an arena: 128 MiB, which is a thousand tokens of
an 8B model. CPU time is that of both ends: it says on a busy machine, too, which one takes less.

| side         | what it does                                                        |
|--------------|---------------------------------------------------------------------|
| `tcp`        | a socket that is read into memory: no names, no sums, not encrypted |
| `peers`      | a load from a tier of peers: out of their memory, mapped, verified  |
| `peers tcp`  | the same from another machine: over TCP, encrypted                  |
| `peers nixl` | from another machine: by NIXL over TCP, not encrypted               |
| `peers unix` | from another container: over a Unix socket, not encrypted           |
| `redis`      | a load from a tier in a Redis, verified                             |
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.measure import collector_paused, summarize
from lab.bench.peer_blocks_child import SPACE, keys_of, make_arena, make_tier
from lab.bench.store_servers import StoreServers
from lab.bench.vllm_child import free_port
from penstock.config.shared_stores import RedisSettings
from penstock.errors import UnavailableError
from penstock.relay.process import require_nixl
from penstock.store.base import LoadJob
from penstock.store.probe import TierProbe
from penstock.store.process.messages import StoreTierConfig
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.bench.report import BenchReport
    from penstock.store.base import EndedJob, MappedArena
    from penstock.store.peers.tier import PeerTier

ROUNDS = 7
TOTAL_BYTES = 128 << 20
SIZES = {"256 KiB": 256 << 10, "2 MiB": 2 << 20}
WAIT_S = 120.0
KEPT_MIN = 0.1
"""Of the rate of a plain copy, which verifies and encrypts nothing."""
PEERS = {"peers": "zeromq", "peers tcp": "zeromq", "peers nixl": "nixl", "peers unix": "zeromq"}
"""And what carries their blocks."""
SIDES = ("tcp", *PEERS, "redis")


def run_peer_blocks(
    report: BenchReport, *, rounds: int, total_bytes: int = TOTAL_BYTES, folder: Path | None = None
) -> None:
    """Loads a prefix from each side in turn, and adds rows and ratios.

    Raises:
        UnavailableError: blocks do not come, or redis-server is not installed.
        ConfigError: NIXL is not installed.
    """
    require_nixl("peers nixl")
    for size, block_bytes in SIZES.items():
        with ExitStack() as stack:
            made = stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder
            count = total_bytes // block_bytes
            sides = _sides(Path(made), block_bytes, count, stack)
            rates: dict[str, list[float]] = {side: [] for side in SIDES}
            costs: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(-1, rounds):  # The first one makes pages and connections.
                report.progress(f"{size}: round {number + 1} of {rounds}")
                for side in SIDES if number % 2 else SIDES[::-1]:
                    with collector_paused():
                        began, cpu_s = time.perf_counter(), _cpu_s()
                        sides[side]()
                        took_s, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_s
                    if number >= 0:
                        rates[side].append(count * block_bytes / took_s / 1e9)
                        costs[side].append(cpu_s / (count * block_bytes / 1e9))
        for metric, unit, values in (("rate", "GB/s", rates), ("CPU time", "s/GB", costs)):
            for side, found in values.items():
                report.add_row(
                    bench="peer-blocks",
                    side=side,
                    params={"block": size},
                    metric=metric,
                    unit=unit,
                    summary=summarize(found),
                )
        for side in SIDES[1:]:
            ratios = [mine / plain for mine, plain in zip(rates[side], rates["tcp"], strict=True)]
            name = f"{size}, {side}: rate of a plain copy kept"
            report.add_ratio(name, summarize(ratios).median, at_least=KEPT_MIN)


def _cpu_s() -> float:
    """CPU time of this process and those below it: who lends, the relays and the Redis."""
    total_ns, processes = 0, [str(os.getpid())]
    for process in processes:
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(FileNotFoundError):  # A thread that has just looked up names.
                total_ns += int((task / "schedstat").read_text().split()[0])
                processes += (task / "children").read_text().split()
    return total_ns / 1e9


def _sides(
    folder: Path, block_bytes: int, count: int, stack: ExitStack
) -> dict[str, Callable[[], None]]:
    pairs = [
        tuple(f"unix:{folder}/{number}" for number in range(2)),
        *(tuple(f"127.0.0.1:{free_port()}" for _ in range(2)) for _ in range(2)),
        tuple(f"unix:{folder}/{number}" for number in range(2, 4)),
    ]
    ways = zip(PEERS.values(), pairs, strict=True)
    places = [word for transport, (here, there) in ways for word in (there, here, transport)]
    command = [sys.executable, "-m", "lab.bench.peer_blocks_child", str(block_bytes), str(count)]
    child = stack.enter_context(
        subprocess.Popen(
            [*command, *places], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
        )
    )
    stack.callback(child.kill)
    assert child.stdout is not None
    plain = stack.enter_context(
        socket.create_connection(("127.0.0.1", int(child.stdout.readline())))
    )
    target = memoryview(bytearray(count * block_bytes))
    sides: dict[str, Callable[[], None]] = {"tcp": lambda: _copy(plain, target)}
    for (side, transport), (here, there) in zip(PEERS.items(), pairs, strict=True):
        tier = make_tier(here, there, transport, maps=True)
        loads = _Loads(tier, make_arena(block_bytes, count))
        stack.callback(loads.close)
        loads.wait_for_listing()
        sides[side] = loads.load
    servers = stack.enter_context(StoreServers(folder, Path(sys.executable)))
    settings = RedisSettings(url=f"redis://127.0.0.1:{servers.start_redis()}", timeout_s=WAIT_S)
    config = StoreTierConfig(name="redis", kind="redis", options=_options(settings))
    probe = stack.enter_context(TierProbe(config, block_bytes, count))
    probe.save_new()
    sides["redis"] = lambda: _require(probe.load_saved())
    return sides


def _options(settings: RedisSettings) -> dict[str, str | int | float | bool]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _require(took_s: float) -> None:
    if not math.isfinite(took_s):
        raise UnavailableError("the blocks did not come")


def _copy(plain: socket.socket, target: memoryview) -> None:
    plain.sendall(b"?")
    got = 0
    while got < len(target):
        got += plain.recv_into(target[got:])


def _until(tier: PeerTier, done: Callable[[], bool], what: str) -> None:
    """Waits for news of a tier.

    Raises:
        UnavailableError: nothing came in time.
    """
    deadline = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() >= deadline:
            raise UnavailableError(f"{what} did not come within {WAIT_S:g} s")
        tier.take_generations()
        wait_any((), (tier.descriptor,), deadline=deadline)


class _Loads:
    """Loads of all blocks into an arena."""

    def __init__(self, tier: PeerTier, arena: MappedArena) -> None:
        self._tier, self._arena = tier, arena
        self._keys = keys_of(arena.host.slot_count)
        self._ticket = 0
        tier.attach(SPACE.name, [arena])
        _until(tier, lambda: tier.generation(SPACE.name) is not None, "the generation")

    def wait_for_listing(self) -> None:
        _until(self._tier, lambda: self._tier.state().blocks == len(self._keys), "the listing")

    def close(self) -> None:
        self._tier.close(deadline=time.monotonic() + WAIT_S)

    def load(self) -> None:
        self._ticket += 1
        slots = range(len(self._keys))
        self._tier.load(LoadJob(self._ticket, self._arena, SPACE, self._keys, slots, self._ticket))
        ended: list[EndedJob] = []

        def has_ended() -> bool:
            ended.extend(self._tier.collect())
            return bool(ended)

        _until(self._tier, has_ended, "the end of a load")
        if ended[0].failure or ended[0].faults:
            raise UnavailableError(f"{len(ended[0].faults)} blocks did not come")
