"""Whoever dies, however: the others end, it is noticed, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.errors import UnavailableError
from penstock.supervisor.client import Supervisor
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
from tests.descriptors import arena_holders, open_descriptors
from tests.stopped import stop_process
from tests.supervisor.conftest import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.supervisor.conftest import Lab, Line, Watch

PROGRAMS = Path(__file__).parent / "programs"


@contextmanager
def engine(
    line: Line, arena: str, *how: str
) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """An engine in a process of its own, and the pids of its supervisor and processes."""
    command = [sys.executable, "-m", "engine", str(line.theirs), arena, *how]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAMS)}
    with subprocess.Popen(command, pass_fds=[line.theirs], env=environment) as process:
        try:
            heard = ""
            while not heard.startswith("pids"):
                heard = line.hear()
            yield process, [int(pid) for pid in heard.split()[1:]]
        finally:
            process.kill()


@pytest.fixture
def arena() -> str:
    """A name that no other run has."""
    return f"deaths-{os.getpid()}-{time.monotonic_ns()}"


# The engine's.


def test_nothing_outlives_a_killed_engine(line: Line, arena: str, watch: Watch) -> None:
    with engine(line, arena) as (process, pids):
        others = [watch(pid) for pid in pids]
        # The engine, the supervisor, and the two that were handed the arena.
        assert arena_holders(arena) == {process.pid, *pids}

        process.kill()

        assert [other.ended() for other in others] == [True, True, True]
    assert arena_holders(arena) == set()
    assert not [entry for entry in os.listdir("/dev/shm") if arena in entry]


def test_a_fork_of_the_engine_does_not_keep_the_supervisor(
    line: Line, arena: str, watch: Watch
) -> None:
    with engine(line, arena, "fork") as (process, pids):
        *others, fork = [watch(pid) for pid in pids]
        try:
            process.kill()

            assert [other.ended() for other in others] == [True, True, True]
            assert not fork.ended(0)
        finally:
            os.kill(fork.pid, signal.SIGKILL)


def test_an_engine_that_lets_go_has_no_supervisor(lab: Lab, watch: Watch) -> None:
    others = [watch(lab.supervisor.pid), watch(lab.start("run"))]

    lost = lab.supervisor._link.lose("for a test")

    assert [other.ended() for other in others] == [True, True]
    assert lab.supervisor.lost == lost == ChannelFailed("for a test")


# The supervisor's.


def test_a_killed_supervisor_is_a_failure_and_takes_its_processes_along(
    lab: Lab, watch: Watch
) -> None:
    others = [watch(lab.start("run")), watch(lab.start("ignore_sigterm", stop_s=3000))]
    lab.supervisor.events()
    assert lab.supervisor.receive() == Empty()

    os.kill(lab.supervisor.pid, signal.SIGKILL)
    found = lab.supervisor.receive(deadline=time.monotonic() + PATIENCE_S)

    failed = ChannelFailed(f"the supervisor (process {lab.supervisor.pid}) ended by signal 9")
    assert found == failed
    assert lab.supervisor.events() == [failed]
    assert lab.supervisor.lost == failed
    assert [other.ended() for other in others] == [True, True]
    for call in (
        lambda: lab.start("run"),
        lambda: lab.supervisor.stop_process("run"),
        lambda: lab.supervisor.fetch("line"),
    ):
        with pytest.raises(UnavailableError, match="ended by signal 9"):
            call()


def test_a_supervisor_that_is_killed_during_a_call_fails_the_call(lab: Lab) -> None:
    pid = lab.start("kill_supervisor_on_sigterm")
    assert lab.line.hear() == f"kill-supervisor-on-sigterm runs {pid}"

    with pytest.raises(UnavailableError, match="ended by signal 9"):
        lab.supervisor.stop_process("kill-supervisor-on-sigterm")


def test_what_was_told_before_the_end_is_heard_before_it(lab: Lab, watch: Watch) -> None:
    with suppress(ProcessLookupError):  # It may be gone already.
        assert watch(lab.start("succeed")).ended()
    fd = lab.supervisor.fetch("line")  # By its answer, the end of the process has been told.
    os.close(fd)

    os.kill(lab.supervisor.pid, signal.SIGKILL)
    events = [lab.supervisor.receive(deadline=time.monotonic() + PATIENCE_S) for _ in range(3)]

    assert [type(event).__name__ for event in events] == [
        "ProcessStarted",
        "ProcessExited",
        "ChannelFailed",
    ]


def test_a_supervisor_that_hangs_costs_no_more_than_the_deadline(lab: Lab) -> None:
    stop_process(lab.supervisor.pid)
    began = time.monotonic()

    with pytest.raises(UnavailableError, match="gave no answer to Fetch in time"):
        lab.supervisor.fetch("line", deadline=began + 0.1)

    assert 0.1 <= time.monotonic() - began < PATIENCE_S
    assert lab.supervisor.lost is None
    os.kill(lab.supervisor.pid, signal.SIGCONT)


def test_a_late_answer_is_not_taken_for_another(lab: Lab) -> None:
    before = open_descriptors()
    stop_process(lab.supervisor.pid)
    with pytest.raises(UnavailableError, match="gave no answer"):
        lab.supervisor.fetch("line", deadline=time.monotonic())

    os.kill(lab.supervisor.pid, signal.SIGCONT)

    with pytest.raises(ValueError, match="descriptor 'nothing' is not held"):
        lab.supervisor.fetch("nothing")
    assert open_descriptors() <= before


def test_a_supervisor_that_hangs_at_the_end_is_killed(lab: Lab, watch: Watch) -> None:
    others = [watch(lab.supervisor.pid), watch(lab.start("run"))]
    stop_process(lab.supervisor.pid)

    lab.supervisor.close(deadline=time.monotonic() + 0.1)

    assert [other.ended() for other in others] == [True, True]
    assert lab.supervisor.events()[-1] == ChannelClosed()
    with pytest.raises(UnavailableError, match="the supervisor was closed"):
        lab.supervisor.fetch("line")


def test_closing_twice_does_no_harm() -> None:
    before = open_descriptors()
    with Supervisor.start() as supervisor:
        supervisor.close()

        supervisor.close()

    assert open_descriptors() <= before


def test_a_fork_of_the_engine_cannot_use_or_end_its_supervisor() -> None:
    command = [sys.executable, str(PROGRAMS / "forking.py")]

    said = subprocess.check_output(command, text=True, timeout=300).splitlines()

    assert said[0].startswith("this supervisor belongs to process ")
    assert said[1:] == [said[0], "the fork ended: 0", "the engine's is well"]


# What a terminal or a service says to all of them.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_supervisor_stays_for_the_engine_to_drain(lab: Lab, number: signal.Signals) -> None:
    os.kill(lab.supervisor.pid, number)

    pid = lab.start("run")

    assert lab.line.hear() == f"run runs {pid}"
    assert os.getpgid(lab.supervisor.pid) != os.getpgid(0)


# Before anybody lives.


def test_no_process_begins_without_its_supervisor() -> None:
    told, report = os.pipe()
    command = ["penstock.supervisor.child", "rank", "1", str(report), "", "", "", "timeit"]

    status = subprocess.call([sys.executable, "-m", *command], pass_fds=[report])

    os.close(report)
    assert status == 127
    assert os.read(told, 4096) == b"the supervisor, process 1, has ended"
    os.close(told)


def test_a_supervisor_is_not_started_by_hand() -> None:
    command = [sys.executable, "-m", "penstock.supervisor"]

    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 2
    assert "is started by Supervisor.start()" in result.stderr


def test_a_supervisor_that_cannot_begin_is_an_error_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(UnavailableError, match=r"no supervisor: the supervisor .* ended: 9"):
        Supervisor.start()


def test_an_interpreter_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    with pytest.raises(UnavailableError, match="'/nowhere/python' cannot be started: No such"):
        Supervisor.start()


def test_a_supervisor_that_is_not_ready_in_time_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    with pytest.raises(UnavailableError, match="it did not say that it is ready"):
        Supervisor.start(deadline=time.monotonic() + 0.2)
