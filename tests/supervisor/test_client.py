"""What the engine can ask: held descriptors, events for its poll, deadlines."""

from __future__ import annotations

import math
import os
import select
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from penstock.supervisor.client import Supervisor, SupervisorLink
from penstock.supervisor.descriptors import inherited_descriptor
from penstock.supervisor.messages import ProcessExited, ProcessSpec, ProcessStarted
from penstock.transport.base import ChannelClosed, Empty
from tests.supervisor.conftest import PATIENCE_S

if TYPE_CHECKING:
    from tests.supervisor.conftest import Lab


def test_what_is_fetched_is_what_was_held(supervisor: Supervisor) -> None:
    held = os.memfd_create("held")
    supervisor.hold("held", held)
    inode = os.fstat(held).st_ino
    os.close(held)

    fetched = supervisor.fetch("held")

    assert os.fstat(fetched).st_ino == inode
    assert not os.get_inheritable(fetched)
    os.close(fetched)


def test_what_is_forgotten_is_closed(lab: Lab) -> None:
    read, write = os.pipe()
    lab.supervisor.hold("write", write)
    os.close(write)

    lab.supervisor.forget("write")

    assert os.read(read, 1) == b""  # Nobody has the other end.
    os.close(read)
    with pytest.raises(ValueError, match="descriptor 'write' is not held, must be one of: line"):
        lab.supervisor.fetch("write")


def test_what_a_process_is_started_with_is_not_forgotten(lab: Lab) -> None:
    lab.start("run")

    with pytest.raises(ValueError, match=r"descriptor 'line' is in use: stop these .* first: run"):
        lab.supervisor.forget("line")

    lab.supervisor.stop_process("run")
    lab.supervisor.forget("line")


def test_a_number_that_is_no_descriptor_is_refused(supervisor: Supervisor) -> None:
    with pytest.raises(ValueError, match="fd is 987654, must be an open descriptor"):
        supervisor.hold("held", 987654)


def test_a_name_that_is_none_is_refused_before_anything_is_sent(supervisor: Supervisor) -> None:
    for call in (supervisor.fetch, supervisor.forget, supervisor.stop_process):
        with pytest.raises(ValueError, match="name is 'A/B', must be 1 to 64 of"):
            call("A/B")


def test_the_engines_poll_hears_of_events(lab: Lab) -> None:
    poller = select.poll()
    poller.register(lab.supervisor.descriptor, select.POLLIN)
    pid = lab.start("run")
    assert lab.supervisor.events() == [ProcessStarted(name="run", pid=pid)]
    assert lab.supervisor.events() == []
    assert poller.poll(0) == []

    os.kill(pid, 9)

    assert poller.poll(60_000)
    assert lab.supervisor.events() == [ProcessExited(name="run", pid=pid, signal=9)]
    assert poller.poll(0) == []


def test_a_process_can_be_asked_for_without_waiting(lab: Lab) -> None:
    lab.supervisor.begin_process(lab.spec("run"))

    started = lab.event()

    assert isinstance(started, ProcessStarted)
    assert lab.line.hear() == f"run runs {started.pid}"


def test_a_process_that_was_asked_for_and_cannot_run_has_exited(lab: Lab) -> None:
    lab.supervisor.begin_process(ProcessSpec(name="none", module="no.such.module"))

    exited = lab.event()

    assert isinstance(exited, ProcessExited)
    assert (exited.name, exited.pid) == ("none", None)
    assert "no.such.module" in exited.problem


def test_a_look_loses_no_event(lab: Lab) -> None:
    poller = select.poll()
    poller.register(lab.supervisor.descriptor, select.POLLIN)
    pid = lab.start("run")
    lab.supervisor.events()
    os.kill(pid, 9)
    assert poller.poll(60_000)

    assert lab.supervisor.look() is None

    assert lab.supervisor.events() == [ProcessExited(name="run", pid=pid, signal=9)]


def test_a_request_waits_until_the_supervisor_has_room_for_it() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.settimeout(0)
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(["sleep", "3600"]))
        stack.callback(process.kill)
        stack.enter_context(near)
        stack.enter_context(far)
        link = SupervisorLink(near, process)
        stack.callback(link.lose)
        packets = 0
        with suppress(BlockingIOError):
            while near.send(b"x" * 1000):
                packets += 1
        read: list[bytes] = []
        reader = threading.Thread(
            target=lambda: read.extend(far.recv(2000) for _ in range(packets + 1))
        )

        reader.start()
        link.send(b"a request", None, deadline=time.monotonic() + PATIENCE_S)

        reader.join(PATIENCE_S)
        assert read[-1] == b"a request"


def test_no_event_is_empty_and_costs_the_deadline(supervisor: Supervisor) -> None:
    began = time.monotonic()

    assert supervisor.receive(deadline=began + 0.05) == Empty()

    assert time.monotonic() - began >= 0.05
    assert supervisor.lost is None


def test_after_the_end_there_is_only_closed() -> None:
    with Supervisor.start() as supervisor:
        pass

    assert supervisor.events() == [ChannelClosed()]
    assert supervisor.receive(deadline=time.monotonic() + PATIENCE_S) == ChannelClosed()
    assert supervisor.lost is None


@pytest.mark.parametrize("deadline", [math.inf, math.nan])
def test_a_deadline_is_a_time(supervisor: Supervisor, deadline: float) -> None:
    for call in (
        lambda: supervisor.fetch("line", deadline=deadline),
        lambda: supervisor.receive(deadline=deadline),
        lambda: supervisor.stop_process("rank", deadline=deadline),
        lambda: supervisor.close(deadline=deadline),
        lambda: Supervisor.start(deadline=deadline),
    ):
        with pytest.raises(ValueError, match=f"deadline is {deadline}, must be a time on the"):
            call()


def test_a_process_without_a_supervisor_has_no_descriptors() -> None:
    with pytest.raises(ValueError, match=r"name is 'arena', must be one of .*started with: none"):
        inherited_descriptor("arena")


def test_a_look_takes_no_event_away() -> None:
    with Supervisor.start() as supervisor:
        pid = supervisor.start_process(ProcessSpec(name="brief", module="this"))
        looked = []
        events: list[object] = []
        while not any(isinstance(each, ProcessExited) for each in events):
            looked.append(supervisor.look())
            event = supervisor.receive(deadline=time.monotonic() + 60)
            events.append(event)

    assert set(looked) == {None}
    assert events == [
        ProcessStarted(name="brief", pid=pid),
        ProcessExited(name="brief", pid=pid, code=0),
    ]
