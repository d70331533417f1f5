"""The supervisor starts processes, restarts those that fail, and ends those that are to end."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from penstock.errors import UnavailableError
from penstock.supervisor.client import Supervisor
from penstock.supervisor.loop import PROCESSES_MAX
from penstock.supervisor.messages import (
    OnFailure,
    ProcessExited,
    ProcessSpec,
    ProcessStarted,
    RestartsExhausted,
)
from penstock.tiers.arena import Arena
from tests.supervisor.conftest import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.supervisor.conftest import Lab, MakeLab, Watch

AT_ONCE = OnFailure(limit=3, window_s=3600, delay_s=0, delay_max_s=0)
MUCH_LATER = OnFailure(limit=3, window_s=3600, delay_s=1800, delay_max_s=1800)


# Starting.


def test_a_process_runs_its_module_with_what_its_spec_says(lab: Lab) -> None:
    pid = lab.start("look_around", "here", environment=(("SUPERVISED", "yes"),))

    seen = json.loads(lab.line.hear())

    assert seen["arguments"] == ["look_around", "here"]
    assert seen["variable"] == "yes"
    assert seen["stdin"] == "/dev/null"
    assert seen["group"]
    assert lab.event() == ProcessStarted(name="look-around", pid=pid)
    assert lab.event() == ProcessExited(name="look-around", pid=pid, code=0)


def test_a_process_gets_no_descriptor_but_output_and_those_it_names(lab: Lab) -> None:
    with Arena.create(4096, huge_pages=False) as arena:
        lab.supervisor.hold("arena", arena.fd)
    pid = lab.start("run", descriptors=("arena",))
    assert lab.line.hear() == f"run runs {pid}"
    lab.start("look_around")

    seen = json.loads(lab.line.hear())

    # The last one is the folder that it reads to find out.
    assert seen["descriptors"][:-1] == ["0", "1", "2", str(seen["line"])]
    assert seen["inherited"] == [0, 1, 2]


def test_signals_are_as_if_nobody_had_touched_them(make_lab: MakeLab) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    chosen = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        lab = make_lab()
    finally:
        signal.signal(signal.SIGCHLD, chosen)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    pid = lab.start("look_around")

    seen = json.loads(lab.line.hear())

    assert seen["sigterm"]
    assert seen["blocked"] == 0
    assert lab.event() == ProcessStarted(name="look-around", pid=pid)
    assert lab.event() == ProcessExited(name="look-around", pid=pid, code=0)


def test_what_lies_in_the_current_folder_is_not_run_by_accident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "select.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "accident.py").write_text("")
    monkeypatch.chdir(tmp_path)

    with (
        Supervisor.start() as supervisor,
        pytest.raises(UnavailableError, match="module is 'accident', must be one that"),
    ):
        supervisor.start_process(ProcessSpec(name="rank", module="accident"))


@pytest.mark.parametrize("module", ["nowhere", "nowhere.at_all", "penstock.tiers"])
def test_a_module_that_cannot_be_run_is_named(supervisor: Supervisor, module: str) -> None:
    with pytest.raises(
        UnavailableError,
        match=f"process 'rank' did not start: module is '{module}', must be one that `",
    ):
        supervisor.start_process(ProcessSpec(name="rank", module=module))

    assert supervisor.events() == []


def test_a_descriptor_that_nobody_holds_is_named(lab: Lab) -> None:
    spec = ProcessSpec(name="rank", module="rank", descriptors=("arena",))

    with pytest.raises(ValueError, match="descriptor 'arena' is not held, must be one of: line"):
        lab.supervisor.start_process(spec)


def test_a_name_is_taken_while_its_process_lives(lab: Lab) -> None:
    lab.start("run")

    with pytest.raises(ValueError, match="name is 'run', but that process is running: stop it"):
        lab.start("run")

    lab.supervisor.stop_process("run")
    lab.start("run")


def test_an_interpreter_that_dies_early_is_no_start(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 9)")
    spec = ProcessSpec(
        name="rank", module="supervised", environment=(("PYTHONPATH", str(tmp_path)),)
    )

    with pytest.raises(UnavailableError, match=r"it ended before it was ready \(signal 9\)"):
        lab.supervisor.start_process(spec)


def test_without_descriptors_to_spare_nothing_starts_and_all_goes_on(lab: Lab) -> None:
    used = {int(fd) for fd in os.listdir(f"/proc/{lab.supervisor.pid}/fd")}
    first_free = min({*range(1024)} - used)
    before = resource.prlimit(lab.supervisor.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(lab.supervisor.pid, resource.RLIMIT_NOFILE, (first_free, before[1]))

    with pytest.raises(UnavailableError, match="'run' cannot be started: Too many open files"):
        lab.start("run")

    resource.prlimit(lab.supervisor.pid, resource.RLIMIT_NOFILE, before)
    lab.start("run")


@pytest.mark.long
def test_there_is_a_limit_to_processes(lab: Lab) -> None:
    for number in range(PROCESSES_MAX):
        lab.start("run", name=f"run-{number}")

    with pytest.raises(UnavailableError, match="name is 'more', but 64 processes are the most"):
        lab.start("run", name="more")


# Restarting.


def test_a_process_that_crashes_finds_what_it_wrote_before(lab: Lab) -> None:
    with Arena.create(1 << 20, huge_pages=False) as arena:
        lab.supervisor.hold("arena", arena.fd)
        lab.start("count_in_arena", "2", descriptors=("arena",), restart=AT_ONCE)

        heard = [lab.line.hear() for _ in range(3)]

        assert heard == ["found 0", "found 1", "found 2"]
        assert arena.bytes[0] == 3


def test_an_arena_outlives_everybody_who_mapped_it_but_the_supervisor(lab: Lab) -> None:
    with Arena.create(1 << 20, huge_pages=False) as arena:
        arena.bytes[7] = 70
        lab.supervisor.hold("arena", arena.fd)

    fd = lab.supervisor.fetch("arena")

    with Arena.attach(fd) as again:
        assert again.bytes[7] == 70
    os.close(fd)


def test_a_restart_is_told_with_its_time(lab: Lab) -> None:
    began = time.monotonic()
    pid = lab.start("run", restart=OnFailure(delay_s=0.2))
    assert lab.event() == ProcessStarted(name="run", pid=pid)

    os.kill(pid, signal.SIGKILL)
    exited = lab.event()
    started = lab.event()

    assert isinstance(exited, ProcessExited)
    assert (exited.pid, exited.code, exited.signal) == (pid, None, signal.SIGKILL)
    assert exited.restart_at is not None
    assert began + 0.2 <= exited.restart_at <= time.monotonic()
    assert isinstance(started, ProcessStarted)
    assert started.pid != pid


def test_a_restart_storm_ends(lab: Lab) -> None:
    pid = lab.start("fail", restart=AT_ONCE)

    events = [lab.event() for _ in range(9)]

    assert events[0] == ProcessStarted(name="fail", pid=pid)
    assert [type(event) for event in events] == [ProcessStarted, ProcessExited] * 4 + [
        RestartsExhausted
    ]
    assert events[-1] == RestartsExhausted(name="fail", restarts=3, window_s=3600)
    assert [event.code for event in events if isinstance(event, ProcessExited)] == [3] * 4
    assert lab.line.hear_all() == ["fail fails"] * 4
    lab.start("run", name="fail")  # The name is free again.


@pytest.mark.parametrize("task", ["fail", "succeed"])
def test_a_process_is_not_restarted_without_a_reason(lab: Lab, task: str) -> None:
    restart = {"restart": AT_ONCE} if task == "succeed" else {}
    pid = lab.start(task, **restart)

    assert lab.event() == ProcessStarted(name=task, pid=pid)
    assert lab.event() == ProcessExited(name=task, pid=pid, code=3 if task == "fail" else 0)
    with pytest.raises(ValueError, match=f"name is '{task}', must be a process; there are: none"):
        lab.supervisor.stop_process(task)


def test_a_restart_that_does_not_succeed_counts_as_a_failure(lab: Lab, tmp_path: Path) -> None:
    module = tmp_path / "fleeting.py"
    module.write_text("import os; os.remove(__file__); raise SystemExit(1)")
    lab.supervisor.start_process(
        ProcessSpec(
            name="rank",
            module="fleeting",
            environment=(("PYTHONPATH", str(tmp_path)),),
            restart=OnFailure(limit=1, delay_s=0),
        )
    )

    events = [lab.event() for _ in range(4)]

    assert [type(event) for event in events] == [
        ProcessStarted,
        ProcessExited,
        ProcessExited,
        RestartsExhausted,
    ]
    assert isinstance(events[2], ProcessExited)
    assert events[2].problem.startswith("module is 'fleeting', must be one that")


# Stopping.


def test_a_process_that_ignores_sigterm_is_killed_at_its_deadline(lab: Lab) -> None:
    pid = lab.start("ignore_sigterm", stop_s=0.3)
    assert lab.line.hear() == f"ignore-sigterm runs {pid}"
    began = time.monotonic()

    lab.supervisor.stop_process("ignore-sigterm")

    assert time.monotonic() - began >= 0.3
    assert lab.supervisor.events() == [
        ProcessStarted(name="ignore-sigterm", pid=pid),
        ProcessExited(name="ignore-sigterm", pid=pid, signal=signal.SIGKILL),
    ]


def test_the_caller_may_allow_less_time(lab: Lab) -> None:
    pid = lab.start("ignore_sigterm", stop_s=3000)
    assert lab.line.hear() == f"ignore-sigterm runs {pid}"

    lab.supervisor.stop_process("ignore-sigterm", deadline=time.monotonic() + 0.1)

    assert lab.supervisor.events()[-1] == ProcessExited(
        name="ignore-sigterm", pid=pid, signal=signal.SIGKILL
    )


def test_a_process_that_is_stopped_is_not_restarted(lab: Lab) -> None:
    pid = lab.start("run", restart=AT_ONCE)

    lab.supervisor.stop_process("run")

    assert lab.supervisor.events() == [
        ProcessStarted(name="run", pid=pid),
        ProcessExited(name="run", pid=pid, signal=signal.SIGTERM),
    ]


def test_a_process_that_waits_for_its_restart_can_be_stopped(lab: Lab) -> None:
    lab.start("fail", restart=MUCH_LATER)
    while not isinstance(lab.event(), ProcessExited):
        pass

    lab.supervisor.stop_process("fail")

    with pytest.raises(ValueError, match="name is 'fail', must be a process; there are: none"):
        lab.supervisor.stop_process("fail")
    assert lab.supervisor.events() == []


def test_who_is_left_in_its_group_ends_with_it(lab: Lab, watch: Watch) -> None:
    lab.start("leave_somebody_behind")

    left = int(lab.line.hear().rsplit(maxsplit=1)[1])

    while not isinstance(lab.event(), ProcessExited):
        pass
    with suppress(ProcessLookupError):  # It may have been reaped already.
        assert watch(left).ended()


def test_leaving_its_group_does_not_save_a_process(lab: Lab) -> None:
    pid = lab.start("leave_group", stop_s=0.1)
    assert lab.line.hear() == f"leave-group runs {pid}"

    lab.supervisor.stop_process("leave-group")

    exited = lab.supervisor.events()[-1]
    assert exited == ProcessExited(name="leave-group", pid=pid, signal=signal.SIGKILL)


def test_all_stop_in_the_reverse_order_of_their_start(lab: Lab) -> None:
    for name in "abc":
        pid = lab.start("stop_politely", name=name, stop_s=PATIENCE_S)
        assert lab.line.hear() == f"{name} runs {pid}"

    lab.supervisor.close()

    assert lab.line.hear_all() == [f"{name} {what}" for name in "cba" for what in ("stops", "ends")]
    exited = [event for event in lab.supervisor.events() if isinstance(event, ProcessExited)]
    assert [(event.name, event.code) for event in exited] == [("c", 0), ("b", 0), ("a", 0)]


def test_stopping_all_does_not_wait_for_a_restart(lab: Lab) -> None:
    lab.start("fail", restart=MUCH_LATER)
    while not isinstance(lab.event(), ProcessExited):
        pass
    began = time.monotonic()

    lab.supervisor.close()

    # Whoever waits for it gives up after that.
    assert time.monotonic() - began < PATIENCE_S


# Several.


def test_two_supervisors_share_nothing(make_lab: MakeLab, watch: Watch) -> None:
    one, other = make_lab(), make_lab()
    with Arena.create(4096, huge_pages=False) as first, Arena.create(4096) as second:
        first.bytes[0], second.bytes[0] = 1, 2
        one.supervisor.hold("arena", first.fd)
        other.supervisor.hold("arena", second.fd)
    processes = [watch(lab.start("run")) for lab in (one, other)]

    one.supervisor.close()

    fd = other.supervisor.fetch("arena")
    with Arena.attach(fd) as held:
        assert held.bytes[0] == 2
    os.close(fd)
    assert processes[0].ended()
    assert not processes[1].ended(0)
    assert one.supervisor.pid != other.supervisor.pid
