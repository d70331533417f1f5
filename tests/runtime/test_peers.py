"""Caches that read each other's host memory, each with a store process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock.errors import ConfigError
from tests.ports import free_ports
from tests.runtime.sharing_engine import HEAD, SharingEngine
from tests.runtime.stored_engine import SOON_S, all_but_the_last_block, process_of, prompt
from tests.stopped import stop_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

QUICK = "ask_ms = 500\ntimeout_s = 0.5\n"


class PeerMachines:
    """Engines as if each were on a machine of its own: loopback ports, folders apart."""

    def __init__(self, folder: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._stack, self._patch = folder, stack, monkeypatch
        self.ports = free_ports(8)
        self.count = len(self.ports)

    def engine(self, number: int, limits: str = "ask_ms = 10000\n") -> SharingEngine:
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        self._patch.setenv("XDG_RUNTIME_DIR", str(folder))
        peers = ",".join(f"127.0.0.1:{port}" for port in self.ports[: self.count])
        store = f'kind = "peers"\nlisten = "127.0.0.1:{self.ports[number]}"\npeers = "{peers}"\n'
        engine = self._stack.enter_context(
            SharingEngine(folder, store, limits or "ask_ms = 10000\n")
        )
        engine.wait_until_on()
        return engine

    def process(self, number: int) -> int:
        return process_of(self.folder / str(number))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerMachines]:
    with ExitStack() as stack:
        yield PeerMachines(tmp_path, stack, monkeypatch)


def while_stepped(done: Callable[[], bool], engines: list[SharingEngine]) -> None:
    pause, deadline = threading.Event(), time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < deadline, [each.cache.health() for each in engines]
        for each in engines:
            each.cache.step()
        pause.wait(0.01)


def listed_by(engine: SharingEngine) -> int:
    """How many blocks its peers have listed."""
    store = engine.cache.statistics().tiers[-1].store
    return 0 if store is None else store.blocks


def hears_of(engine: SharingEngine, blocks: int, *others: SharingEngine) -> None:
    while_stepped(lambda: listed_by(engine) == blocks, [engine, *others])


def test_a_prefix_that_one_engine_has_computed_is_found_by_seven_others(
    machines: PeerMachines,
) -> None:
    one, *others = [machines.engine(number) for number in range(8)]
    assert one.save(prompt(1)) == 0
    blocks = len(prompt(1)) // 4

    for engine in others:
        while_stepped(lambda: listed_by(engine) >= blocks, [one, engine])  # noqa: B023
        engine.look_for(prompt(1))
        assert engine.answer(prompt(1)) == all_but_the_last_block(prompt(1))
        assert engine.cache.statistics().blocks_corrupt == 0
        engine.cache.audit()


def test_the_blocks_of_a_killed_peer_are_computed_and_those_of_its_next_process_found(
    machines: PeerMachines,
) -> None:
    machines.count = 2
    one, other = machines.engine(0), machines.engine(1)
    one.save(prompt(1))
    hears_of(other, 8, one)

    os.kill(machines.process(0), signal.SIGKILL)
    hears_of(other, 0)
    other.look_for(prompt(1))

    assert other.answer(prompt(2)) == 0
    assert other.cache.health().ok
    # Its engine lives on, and starts another process, which is told all again.
    hears_of(other, 8, one)
    other.look_for(prompt(1))
    assert other.answer(prompt(1)) == all_but_the_last_block(prompt(1))


def test_a_peer_that_stands_still_costs_a_miss_at_most_and_the_tier_stays_on(
    machines: PeerMachines,
) -> None:
    machines.count = 2
    one, other = machines.engine(0), machines.engine(1, QUICK)
    one.save(prompt(1))
    hears_of(other, 8, one)
    pid = machines.process(0)

    stop_process(pid)
    try:
        # Its memory can be read if it was mapped before.
        assert other.answer(prompt(1)) in {0, all_but_the_last_block(prompt(1))}
        assert other.cache.health().ok
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_reset_of_one_engine_is_one_for_all_peers(machines: PeerMachines) -> None:
    machines.count = 2
    one, other = machines.engine(0), machines.engine(1)
    one.save(prompt(1))
    hears_of(other, 8, one)

    other.cache.reset("new weights")
    while_stepped(lambda: other.cache.health().ok, [one, other])
    hears_of(other, 0, one)
    other.look_for(prompt(1))

    assert other.answer(prompt(1)) == 0
    # What is computed from now on is found again.
    one.save(prompt(3))
    other.run_until(lambda: not other.cache.busy)
    while_stepped(lambda: listed_by(other) >= 8, [one, other])
    other.look_for(prompt(3))
    assert other.answer(prompt(3)) == all_but_the_last_block(prompt(3))


def test_a_reset_is_reported_as_not_kept_while_a_peer_is_away(machines: PeerMachines) -> None:
    machines.count = 2
    one = machines.engine(0, QUICK)

    one.cache.reset("a test")
    while_stepped(lambda: not one.cache.health().ok, [one])

    assert "is away" in str(one.cache.health())
    other = machines.engine(1)
    while_stepped(lambda: one.cache.health().ok, [one, other])


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ('listen = "127.0.0.1:1"\npeers = "h"', "tiers[1].peers: has 'h', must be HOST:PORT"),
        ('listen = "127.0.0.1:1"\npeers = ""', "tiers[1].peers: is '', must name other engines"),
        ('listen = "10.0.0.1:1"\npeers = "10.0.0.2:1"', "tiers[1].keys_file: is '' while listen"),
        ('listen = "127.0.0.1:1"\npeers = "h:1"', "tiers[1].keys_file: is '' while peers has"),
        ('listen = "127.0.0.1:1"\npeers = "127.h:1"', "tiers[1].keys_file: is '' while peers has"),
        ('listen = "unix:x"\npeers = "unix:/x"', "tiers[1].listen: is 'unix:x', must be unix:"),
        (
            'listen = "127.0.0.1:1"\npeers = "127.0.0.1:2"\nwrite = "write_through"',
            "tiers[1].write: is 'write_through', must be 'none'",
        ),
        (
            'listen = "127.0.0.1:1"\npeers = "127.0.0.1:2"\nkeys_file = "x"',
            "tiers[1].keys_file: is 'x', must be an absolute path",
        ),
    ],
)
def test_what_peers_cannot_be_is_refused(keys: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r".*") as error:
        penstock.parse_config(f'{HEAD}kind = "peers"\n{keys}\n')

    assert str(error.value).startswith(problem)


def test_only_peers_are_never_written() -> None:
    with pytest.raises(ConfigError, match="is 'none', which only kind 'peers' can have"):
        penstock.parse_config(f'{HEAD}kind = "redis"\nurl = "redis://h:1"\nwrite = "none"\n')


def test_a_tier_of_peers_reads_back_as_it_was_printed() -> None:
    text = f'{HEAD}kind = "peers"\nlisten = "127.0.0.1:1"\npeers = "127.0.0.1:2"\n'
    config = penstock.parse_config(text)

    assert penstock.parse_config(config.to_toml()) == config
