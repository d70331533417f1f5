"""Real processes at invented times: what happens when, without waiting for it."""

from __future__ import annotations

import resource
import select
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from penstock.supervisor.descriptors import HeldDescriptors
from penstock.supervisor.loop import ProcessTable
from penstock.supervisor.messages import (
    READY_S,
    Done,
    OnFailure,
    ProcessExited,
    ProcessSpec,
    ProcessStarted,
    RequestRefused,
    RestartsExhausted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.supervisor.messages import ProcessEvent

STUCK = "import signal; signal.pause()"
SLOWLY = OnFailure(limit=2, window_s=1000, delay_s=10, delay_max_s=100)


class Stage:
    """A process table whose loop a test plays."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self.answers: list[Done | RequestRefused] = []
        self.table = ProcessTable(
            HeldDescriptors(), on_event=self.events.append, answer=self.answers.append
        )

    def play(self, now: float) -> None:
        """Waits until something happens to a process, and lets the table know."""
        poller = select.poll()
        called = dict(self.table.watched())
        for fd in called:
            poller.register(fd, select.POLLIN)
        ready = poller.poll(60_000)
        assert ready
        for fd, _ in ready:
            called[fd](now)

    def play_until_waiting(self, now: float) -> None:
        while [*self.table.watched()]:
            self.play(now)


@contextmanager
def stage() -> Iterator[Stage]:
    played = Stage()
    try:
        yield played
    finally:
        played.table.stop_all_at_once(0.0)
        played.table.advance(10_000.0)
        while len(played.table):
            played.play(10_000.0)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Nothing can be opened, whichever numbers are free or become so.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def spec_of(program: str, folder: Path, **wishes: object) -> ProcessSpec:
    (folder / "program.py").write_text(program)
    environment = (("PYTHONPATH", str(folder)),)
    return ProcessSpec(name="rank", module="program", environment=environment, **wishes)


def test_a_restart_comes_when_its_time_has_come_and_not_before(tmp_path: Path) -> None:
    with stage() as played:
        played.table.start(1, spec_of("exit(1)", tmp_path, restart=SLOWLY), 100.0)
        played.play_until_waiting(100.0)
        assert played.table.due() == 110.0

        played.table.advance(109.9)
        assert not [*played.table.watched()]
        played.table.advance(110.0)
        played.play_until_waiting(111.0)

        assert played.table.due() == 111.0 + 20.0


def test_the_table_is_due_when_the_first_of_its_processes_is(tmp_path: Path) -> None:
    with stage() as played:
        first = spec_of(STUCK, tmp_path)
        played.table.start(1, first, 100.0)
        played.table.start(2, msgspec.structs.replace(first, name="other"), 105.0)

        assert played.table.due() == 100.0 + READY_S


def test_after_the_last_restart_it_is_given_up(tmp_path: Path) -> None:
    with stage() as played:
        played.table.start(1, spec_of("exit(1)", tmp_path, restart=SLOWLY), 0.0)
        for now in (0.0, 10.0, 30.0):
            played.table.advance(now)
            played.play_until_waiting(now)

        exits = [event for event in played.events if isinstance(event, ProcessExited)]
        assert [event.restart_at for event in exits] == [10.0, 30.0, None]
        assert played.events[-1] == RestartsExhausted(name="rank", restarts=2, window_s=1000)
        assert len(played.table) == 0


def test_a_restart_that_the_machine_refuses_is_tried_again(tmp_path: Path) -> None:
    with stage() as played:
        played.table.start(1, spec_of("exit(1)", tmp_path, restart=SLOWLY), 0.0)
        played.play_until_waiting(0.0)

        with no_more_descriptors():
            played.table.advance(10.0)

        assert played.events[-1] == ProcessExited(
            name="rank",
            pid=None,
            restart_at=30.0,
            problem="it cannot be started: Too many open files",
        )
        assert played.table.due() == 30.0


def test_a_process_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    with stage() as played:
        played.table.start(1, spec_of("", tmp_path), 0.0)
        assert played.table.due() == READY_S

        played.table.advance(READY_S)
        played.play_until_waiting(READY_S)

        (refused,) = played.answers
        assert isinstance(refused, RequestRefused)
        assert refused.problem == (
            "process 'rank' did not start: it was not ready within 30 s (signal 9)"
        )
        assert played.events == []


def test_a_process_can_be_stopped_before_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    with stage() as played:
        played.table.start(1, spec_of("", tmp_path), 0.0)

        played.table.stop(2, "rank", None, 0.0)
        played.play_until_waiting(0.0)

        refused, done = played.answers
        assert isinstance(refused, RequestRefused)
        assert "it was stopped before it was ready (signal 15)" in refused.problem
        assert done == Done(request=2)
        assert played.events == []


def test_who_stops_twice_is_answered_twice_and_may_only_hurry(tmp_path: Path) -> None:
    program = "import signal; signal.signal(15, signal.SIG_IGN); print(end=''); signal.pause()"
    with stage() as played:
        played.table.start(1, spec_of(program, tmp_path), 0.0)
        played.play(0.0)
        assert isinstance(played.events[-1], ProcessStarted)

        played.table.stop(2, "rank", 50.0, 0.0)
        played.table.stop(3, "rank", 1000.0, 0.0)
        assert played.table.due() == 50.0
        played.table.stop(4, "rank", 10.0, 0.0)
        assert played.table.due() == 10.0
        played.table.advance(10.0)
        played.play_until_waiting(10.0)

        assert played.answers[1:] == [Done(request=number) for number in (2, 3, 4)]


def test_when_the_engine_is_gone_all_stop_at_once_and_nothing_restarts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal; signal.pause()")
    environment = (("PYTHONPATH", str(tmp_path)),)
    with stage() as played:
        for name in ("a", "b"):
            spec = ProcessSpec(name=name, module="program", environment=environment, restart=SLOWLY)
            played.table.start(1, spec, 0.0)
        while len(played.answers) < 2:
            played.play(0.0)

        played.table.stop_all_at_once(5.0)
        assert played.table.due() == 10.0
        played.play_until_waiting(5.0)

        exits = {
            event.name: event.signal for event in played.events if isinstance(event, ProcessExited)
        }
        assert exits == {"a": 15, "b": 15}
        assert len(played.table) == 0


def test_a_restart_that_is_due_while_others_stop_does_not_come(tmp_path: Path) -> None:
    failing = spec_of("exit(1)", tmp_path, restart=SLOWLY)
    (tmp_path / "steady.py").write_text("import signal; signal.pause()")
    steady = ProcessSpec(name="steady", module="steady", environment=failing.environment)
    with stage() as played:
        played.table.start(1, failing, 0.0)
        played.play_until_waiting(0.0)
        played.table.start(2, steady, 0.0)
        played.play(0.0)

        played.table.stop_all_in_order(9.0)
        played.table.advance(10.0)

        assert len([*played.table.watched()]) == 1  # The one that stops.
        played.play_until_waiting(10.0)
        assert len(played.table) == 0
