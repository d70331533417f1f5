"""A rank that is killed and restarted finds its host memory again, and so does its owner."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab.fixtures.channel_suite import soon
from lab.fixtures.rank_channels import CarryingEngine, meet
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import OnFailure, ProcessSpec
from penstock.transport.zeromq import Listener
from tests.descriptors import arena_holders
from tests.stopped import stop_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.transport.zmq_channel import ZmqChannel

PROGRAMS = Path(__file__).parent / "programs"
RESTART = OnFailure(limit=5, window_s=60, delay_s=0.01)
STEPS_MAX = 2000


def config_of(ranks: int, *, blocks: int = 32, tier: str = "host") -> str:
    return (
        f'version = 1\n[model]\nname = "none"\n[cache]\nblock_tokens = 4\nranks = {ranks}\n'
        f'[[tiers]]\nname = "{tier}"\nkind = "host"\nblocks = {blocks}\nhuge_pages = "never"\n'
    )


def keys_of(config: penstock.Config, count: int) -> list[bytes]:
    return config.key_chain().extend(range(4 * count))


class Fleet:
    """An owner here, and its ranks under a supervisor."""

    def __init__(self, stack: ExitStack, *, ranks: int, tier: str = "host") -> None:
        self.text = config_of(ranks, tier=tier)
        self.config = penstock.parse_config(self.text)
        self.supervisor = stack.enter_context(Supervisor.start())
        self.listener = stack.enter_context(Listener("owner"))
        self.pids = [self._start(rank) for rank in range(ranks)]
        met = [self.meet() for _ in range(ranks)]
        met.sort(key=lambda each: each[0].rank)
        self.facts = [facts for facts, _ in met]
        self.owner = penstock.open_offload(self.config, ranks=self.facts)
        self.engine = CarryingEngine(self.owner, self.facts, [channel for _, channel in met])
        stack.callback(self.engine.close)

    def meet(self) -> tuple[penstock.RankFacts, ZmqChannel]:
        """The next rank that dials, in its first life or a later one."""
        channel = self.listener.accept(deadline=soon())
        assert channel is not None
        return meet(channel, deadline=soon()), channel

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            self.engine.step()
            if done():
                return
            self.engine.wait(time.monotonic() + 60)
        raise AssertionError(f"it did not come to pass in {STEPS_MAX} steps")

    def settle(self) -> list[ef.Ended | ef.Settled]:
        self.step_until(lambda: not self.owner.busy)
        return self.owner.poll()

    def _start(self, rank: int) -> int:
        return self.supervisor.start_process(
            ProcessSpec(
                name=f"rank-{rank}",
                module="kept_rank",
                arguments=(self.text, str(rank), str(10 + rank), self.listener.address),
                environment=(("PYTHONPATH", str(PROGRAMS)),),
                keeps=True,
                restart=RESTART,
            )
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_after_kill_9_the_blocks_of_a_rank_are_hits_again(stack: ExitStack) -> None:
    fleet = Fleet(stack, ranks=2)
    keys = keys_of(fleet.config, 3)
    fleet.owner.save(keys, [0, 1, 2], cause="save")
    fleet.settle()
    assert fleet.owner.lookup(keys).ready == 3

    os.kill(fleet.pids[1], signal.SIGKILL)
    fleet.step_until(lambda: not fleet.owner.health().ok)
    facts, channel = fleet.meet()
    fleet.engine.rejoin(facts, channel)

    assert facts.life != fleet.facts[1].life
    assert facts.tiers[0].memory == fleet.facts[1].tiers[0].memory
    assert fleet.owner.health().ok
    assert fleet.owner.lookup(keys).ready == 3
    fleet.owner.load(keys, [5, 6, 7], cause="load")
    (ended,) = fleet.settle()
    assert isinstance(ended, ef.Ended)
    assert (ended.outcome.value, ended.faults) == ("done", ())


def test_what_was_being_written_when_it_died_is_no_hit(stack: ExitStack) -> None:
    fleet = Fleet(stack, ranks=2)
    whole, torn = keys_of(fleet.config, 8)[:2], keys_of(fleet.config, 8)[2:]
    fleet.owner.save(whole, [0, 1], cause="whole")
    fleet.settle()
    stop_process(fleet.pids[0])
    fleet.owner.save(torn, [2, 3, 4, 5, 6, 7], cause="torn", parent=whole[-1])
    fleet.engine.step()  # The plan is on its way to a rank that will never take it.
    os.kill(fleet.pids[0], signal.SIGKILL)
    fleet.step_until(lambda: not fleet.owner.health().ok)
    facts, channel = fleet.meet()

    fleet.engine.rejoin(facts, channel)

    (ended,) = (each for each in fleet.settle() if isinstance(each, ef.Ended))
    assert (ended.outcome.value, ended.failure) == ("failed", "rank 0 is lost")
    assert fleet.owner.lookup(whole + torn).ready == 2
    fleet.owner.save(torn, [2, 3, 4, 5, 6, 7], cause="again", parent=whole[-1])
    fleet.settle()
    assert fleet.owner.lookup(whole + torn).ready == 8


def test_a_rank_that_is_told_to_stop_leaves_in_good_order(stack: ExitStack) -> None:
    fleet = Fleet(stack, ranks=2)
    keys = keys_of(fleet.config, 3)
    fleet.owner.save(keys, [0, 1, 2], cause="last")
    fleet.engine.step()

    os.kill(fleet.pids[0], signal.SIGTERM)
    ended = [each for each in fleet.settle() if isinstance(each, ef.Ended)]
    fleet.step_until(lambda: not fleet.owner.health().ok)

    # Whether the plan came before the signal is a matter of luck; that it is told is not.
    assert len(ended) == 1
    assert fleet.owner.health().reasons == ("rank 0 is lost: it closed its channel",)


ENGINE = """
import sys, signal
from contextlib import ExitStack
from tests.runtime.test_kept_arenas import Fleet
with ExitStack() as stack:
    fleet = Fleet(stack, ranks=2, tier=sys.argv[1])
    print(fleet.supervisor.pid, *fleet.pids, flush=True)
    signal.pause()
"""


def test_nothing_is_left_after_kill_9_of_everybody() -> None:
    name = f"left-{os.getpid()}"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, name], stdout=subprocess.PIPE, text=True, cwd=root
    ) as engine:
        assert engine.stdout is not None
        others = [int(pid) for pid in engine.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in others]
        held_by = arena_holders(name)

        for pid in (engine.pid, *others):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for pidfd in watched:
        gone = select.poll()
        gone.register(pidfd, select.POLLIN)
        assert gone.poll(60_000)
        os.close(pidfd)

    assert held_by == {*others}  # The supervisor, and both ranks.
    assert arena_holders(name) == set()


class Drawer:
    """Keeps descriptors as a supervisor does, in this process."""

    def __init__(self, *, room: int = 8) -> None:
        self.room = room
        self.names: dict[str, int] = {}

    def kept(self, name: str) -> int | None:
        return self.names.get(name)

    def keep(self, name: str, fd: int) -> None:
        if len(self.names) >= self.room:
            raise UnavailableError("the drawer is full")
        self.names[name] = os.dup(fd)


def open_with(drawer: Drawer, *, blocks: int = 32) -> penstock.Rank:
    config = penstock.parse_config(config_of(1, blocks=blocks))
    return penstock.open_rank(config, rank=0, kv=np.zeros((8, 4, 16)), keeper=drawer)


def test_an_arena_that_does_not_fit_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    drawer = Drawer()
    first = open_with(drawer, blocks=32).facts.tiers[0]

    again = open_with(drawer, blocks=32).facts.tiers[0]
    other = open_with(drawer, blocks=64).facts.tiers[0]
    other_again = open_with(drawer, blocks=64).facts.tiers[0]

    assert again.memory == first.memory
    assert other.memory != first.memory
    assert other_again.memory == other.memory
    assert "kept arena left: name=host" in caplog.text


def test_a_rank_runs_although_nobody_keeps_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    facts = open_with(Drawer(room=0)).facts

    assert facts.tiers[0].off == ""
    assert "arena not kept: rank=0 tier=1 cause=the drawer is full" in caplog.text
