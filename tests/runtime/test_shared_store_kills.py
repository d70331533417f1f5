"""Engines at work while the store that they share, or a part of it, is killed or stands still.

Two engines on two machines are asked the same prompts, more than their memory holds. Each block
that an engine finds is compared with what it would have computed. Faults come while questions,
loads and writes are under way.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack, suppress
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.runtime.sharing_engine import SharingEngine, of_redis
from tests.runtime.stored_engine import all_but_the_last_block, process_of, processes_of, prompt
from tests.store.mooncake_master import MooncakeMaster, MooncakeSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Protocol

    from tests.store.redis_server import RedisServer

    class Server(Protocol):
        """A process that the store needs."""

        def start(self) -> None: ...
        def kill(self) -> None: ...
        def stop(self) -> None: ...
        def proceed(self) -> None: ...


LIMITS = "ask_ms = 500\ntimeout_s = 1\n"
PROMPTS = 12
"""Three times what the memory of an engine holds."""
SOON_S = 600.0
"""Longer than a store that was stopped takes to be asked again, on a busy computer."""


class Fleet:
    """Two engines that share a store, and what they are asked."""

    def __init__(self, engines: list[SharingEngine], seed: int) -> None:
        self.engines = engines
        self.random = Random(seed)
        self.fresh = PROMPTS

    def ask(self, fault: Callable[[], None] = lambda: None) -> None:
        """Some prompts of each engine; the fault comes while they are looked for and loaded."""
        asked = [(engine, self._draw()) for engine in self.engines for _ in range(3)]
        for engine, tokens in asked:
            engine.cache.prefetch(tokens)
        fault()
        for engine, tokens in asked:
            assert engine.answer(tokens) in range(0, all_but_the_last_block(tokens) + 1, 4)
            engine.cache.step()

    def ask_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline, [each.cache.health() for each in self.engines]
            self.ask()

    def is_off(self) -> bool:
        return not any(engine.cache.health().ok for engine in self.engines)

    def is_on(self) -> bool:
        return all(engine.cache.health().ok for engine in self.engines)

    def shares(self) -> bool:
        """Whether one engine finds what the other has computed just now."""
        one, other = self.random.sample(self.engines, 2)
        self.fresh += 1
        one.save(prompt(self.fresh))
        other.look_for(prompt(self.fresh))
        return other.answer(prompt(self.fresh)) == all_but_the_last_block(prompt(self.fresh))

    def require_whole(self) -> None:
        """It recovers by itself: the store serves again, and nothing was taken for another."""
        self.ask_until(self.is_on)
        self.ask_until(self.shares)
        for engine in self.engines:
            engine.run_until(lambda engine=engine: not engine.cache.busy)
            engine.cache.audit()

    def corrupt(self) -> int:
        return sum(engine.cache.statistics().blocks_corrupt for engine in self.engines)

    def _draw(self) -> list[int]:
        return prompt(self.random.randrange(PROMPTS))


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Fleet]]:
    """Opens engines over a store, each on a machine with a store process of its own."""
    monkeypatch.setattr("penstock.store.process.link.SILENT_S", 1.0)
    with ExitStack() as undo:

        def opened(store: str, seed: int = 0) -> Fleet:
            engines = []
            for name in ("one", "other"):
                folder = tmp_path / f"{name}-{seed}"
                folder.mkdir()
                monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
                engines.append(undo.enter_context(SharingEngine(folder, store, LIMITS)))
            found = Fleet(engines, seed)
            found.ask_until(found.is_on)
            found.ask_until(found.shares)
            return found

        yield opened


def misses(fleet: Fleet) -> int:
    return sum(sum(each.cache.statistics().misses.values()) for each in fleet.engines)


def kill(fleet: Fleet, server: Server) -> None:
    """Kills a server while it is used, and starts it again when all have noticed."""
    counted = misses(fleet)
    fleet.ask(server.kill)
    fleet.ask_until(fleet.is_off)
    fleet.ask(server.start)
    assert misses(fleet) > counted
    fleet.require_whole()


def stop(fleet: Fleet, server: Server) -> None:
    """The same for a server that stands still."""
    counted = misses(fleet)
    try:
        fleet.ask(server.stop)
        fleet.ask_until(fleet.is_off)
    finally:
        server.proceed()
    assert misses(fleet) > counted
    fleet.require_whole()


def test_a_redis_that_is_killed_and_stopped_under_load_costs_misses_only(
    redis: RedisServer, fleet: Callable[[str], Fleet]
) -> None:
    sharing = fleet(of_redis(redis))

    kill(sharing, redis)
    stop(sharing, redis)

    assert sharing.corrupt() == 0


class StoreProcess:
    """The store process of an engine; the engine starts another one after a kill."""

    def __init__(self, engine: SharingEngine) -> None:
        self._engine = engine
        self._pid = 0

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def start(self) -> None:
        """The engine does it."""

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def proceed(self) -> None:
        with suppress(ProcessLookupError):  # The engine may have given it up.
            os.kill(self._pid, signal.SIGCONT)

    def _send(self, number: int) -> None:
        folder = self._engine.folder
        self._engine.run_until(lambda: len(processes_of(folder)) == 1)
        self._pid = process_of(folder)
        os.kill(self._pid, number)


@pytest.fixture
def segment(master: MooncakeMaster) -> Iterator[MooncakeSegment]:
    """Another machine, which lends its memory to the store."""
    found = MooncakeSegment(master)
    yield found
    found.kill()


def of_mooncake(master: MooncakeMaster) -> str:
    return f'kind = "mooncake"\nmaster = "{master.address}"\n'


def test_store_processes_that_are_killed_under_load_cost_misses_only(
    redis: RedisServer, fleet: Callable[[str], Fleet]
) -> None:
    sharing = fleet(of_redis(redis))
    counted = misses(sharing)

    for engine in sharing.engines:
        sharing.ask(StoreProcess(engine).kill)
    sharing.require_whole()

    assert misses(sharing) > counted
    assert sharing.corrupt() == 0


@pytest.mark.long
@pytest.mark.usefixtures("segment")
def test_a_master_of_mooncake_that_is_killed_under_load_costs_misses_only(
    master: MooncakeMaster, fleet: Callable[[str], Fleet]
) -> None:
    kill(fleet(of_mooncake(master)), master)


@pytest.mark.long
@pytest.mark.usefixtures("segment")
def test_a_master_of_mooncake_that_stands_still_under_load_costs_misses_only(
    master: MooncakeMaster, fleet: Callable[[str], Fleet]
) -> None:
    stop(fleet(of_mooncake(master)), master)


@pytest.mark.long
def test_memory_of_mooncake_that_goes_or_stands_still_under_load_costs_misses_only(
    master: MooncakeMaster, segment: MooncakeSegment, fleet: Callable[[str], Fleet]
) -> None:
    sharing = fleet(of_mooncake(master))

    kill(sharing, segment)
    stop(sharing, segment)


def fail_at_random(fleet: Fleet, servers: list[Server], faults: int) -> None:
    """Servers and store processes that go and come back while the engines are asked.

    One may be gone already when the next one goes.
    """
    random = fleet.random
    victims = [*servers, *map(StoreProcess, fleet.engines)]
    for _ in range(faults):
        chosen = random.sample(victims, random.choice([1, 1, 2]))
        undo: dict[Server, Callable[[], None]] = {}
        try:
            for victim in chosen:
                fault, mend = random.choice(
                    [(victim.kill, victim.start), (victim.stop, victim.proceed)]
                )
                undo[victim] = mend
                for _ in range(random.randrange(1, 4)):
                    fleet.ask()
                fleet.ask(fault)
            for _ in range(random.randrange(20)):
                fleet.ask()
        finally:
            for victim in victims:  # A master comes before those who have to find it.
                undo.get(victim, lambda: None)()
    fleet.require_whole()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_engines_over_a_redis_outlive_whatever_fails(
    redis: RedisServer, fleet: Callable[[str, int], Fleet], seed: int
) -> None:
    sharing = fleet(of_redis(redis), seed)

    fail_at_random(sharing, [redis], 6)

    assert sharing.corrupt() == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_engines_over_mooncake_outlive_whatever_fails(
    master: MooncakeMaster,
    segment: MooncakeSegment,
    fleet: Callable[[str, int], Fleet],
    seed: int,
) -> None:
    fail_at_random(fleet(of_mooncake(master), seed), [master, segment], 4)
