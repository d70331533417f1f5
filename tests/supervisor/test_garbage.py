"""Whatever comes over the channel: it is refused, it is said so, and the supervisor lives on."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.supervisor import messages as ms
from penstock.supervisor.client import SupervisorLink
from penstock.supervisor.descriptors import HELD_MAX
from penstock.supervisor.messages import WAITING_MAX, ProcessSpec
from penstock.transport.base import ChannelFailed, Empty
from penstock.transport.unix_sockets import channel_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

PATIENCE_S = 600.0


class Bare:
    """A supervisor, and the bare socket to it."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self._number = 1 << 40

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self.channel.sendmsg([frame], [rights] if descriptors else [])

    def hear(self) -> ms.AnyReply | ms.ProcessEvent:
        return ms.decode_answer(self.channel.recv(1 << 20))

    def open_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def require_alive(self) -> None:
        """Asks a question with a known answer; nothing else may be waiting before it."""
        self._number += 1
        self.send(ms.encode(ms.Fetch(request=self._number, name="nothing")))
        answer = self.hear()
        assert isinstance(answer, ms.RequestRefused)
        assert answer.request == self._number


@contextmanager
def bare_supervisor() -> Iterator[Bare]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE_S)
    engine = os.pidfd_open(os.getpid())
    command = [sys.executable, "-m", "penstock.supervisor", str(theirs.fileno())]
    with (
        ours,
        theirs,
        subprocess.Popen([*command, str(engine)], pass_fds=(theirs.fileno(), engine)) as process,
    ):
        os.close(engine)
        theirs.close()
        bare = Bare(ours, process.pid)
        assert bare.hear() == ms.SupervisorReady(pid=process.pid)
        try:
            yield bare
            ours.close()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    with bare_supervisor() as bare:
        yield bare


numbers = st.integers(0, 2**31)
names = st.sampled_from(["a", "b", "no-such"])
spec = ProcessSpec(name="rank", module="rank", descriptors=("no-such",))
harmless = st.one_of(
    st.builds(ms.Fetch, request=numbers, name=names),
    st.builds(ms.Forget, request=numbers, name=names),
    st.builds(ms.Hold, request=numbers, name=names),
    st.builds(ms.StartProcess, request=numbers, spec=st.just(spec)),
    st.builds(ms.StopProcess, request=numbers, name=names),
)
"""Requests that, as they come without a descriptor or name nothing that is there, are refused."""


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    frame = bytearray(ms.encode(draw(harmless)))
    for _ in range(draw(st.integers(0, 3))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frame=st.binary(max_size=300) | damaged(), descriptors=st.integers(0, 4))
def test_garbage_is_refused_and_leaves_nothing(bare: Bare, frame: bytes, descriptors: int) -> None:
    if descriptors and frame[:1] == b"\x01":
        frame = b"\x02" + frame[1:]  # A Hold with a descriptor would be no garbage.
    before = bare.open_descriptors()

    bare.send(frame, [0] * descriptors)

    assert isinstance(bare.hear(), ms.RequestRefused)
    bare.require_alive()
    assert bare.open_descriptors() == before


def test_a_frame_that_is_too_long_is_refused(bare: Bare) -> None:
    bare.send(b"\x01" * (ms.FRAME_BYTES_MAX + 1))

    answer = bare.hear()

    assert isinstance(answer, ms.RequestRefused)
    assert answer.problem == "frame is longer than 65536 bytes"
    bare.require_alive()


def test_an_empty_packet_is_not_the_end(bare: Bare) -> None:
    bare.send(b"")

    answer = bare.hear()

    assert isinstance(answer, ms.RequestRefused)
    assert answer.problem == "a frame has no version, must have version 1"
    bare.require_alive()


@pytest.mark.parametrize(
    ("request_", "count", "problem"),
    [
        (ms.Hold(request=5, name="a"), 0, "0 descriptors came with Hold, must be 1"),
        (ms.Hold(request=5, name="a"), 2, "2 descriptors came with Hold, must be 1"),
        (ms.Fetch(request=5, name="a"), 1, "1 descriptors came with Fetch, must be 0"),
    ],
)
def test_descriptors_that_should_not_be_there_are_closed(
    bare: Bare, request_: ms.AnyRequest, count: int, problem: str
) -> None:
    before = bare.open_descriptors()

    bare.send(ms.encode(request_), [0] * count)

    assert bare.hear() == ms.RequestRefused(request=5, blame="caller", problem=problem)
    bare.require_alive()
    assert bare.open_descriptors() == before


def test_a_wrong_field_is_named_to_who_asked(bare: Bare) -> None:
    asked = {"type": "StopProcess", "request": 77, "name": "rank", "stop_s": "soon"}

    bare.send(b"\x01" + msgspec.msgpack.encode(asked))

    answer = bare.hear()
    assert isinstance(answer, ms.RequestRefused)
    assert answer.request == 77
    assert "got `str` - at `$.stop_s`" in answer.problem


def test_a_value_that_makes_no_sense_is_refused_there_as_well(bare: Bare) -> None:
    wrong = {"name": "rank", "module": "rank", "stop_s": -1.0}

    bare.send(
        b"\x01" + msgspec.msgpack.encode({"type": "StartProcess", "request": 78, "spec": wrong})
    )

    answer = bare.hear()
    assert isinstance(answer, ms.RequestRefused)
    assert answer.request == 78
    assert "stop_s is -1.0, must be in [0, 3600]" in answer.problem


def test_there_is_a_limit_to_descriptors(bare: Bare) -> None:
    for number in range(HELD_MAX):
        bare.send(ms.encode(ms.Hold(request=number, name=f"held-{number}")), [0])
        assert bare.hear() == ms.Done(request=number)

    bare.send(ms.encode(ms.Hold(request=999, name="more")), [0])

    answer = bare.hear()
    assert isinstance(answer, ms.RequestRefused)
    assert (answer.request, answer.blame) == (999, "world")
    assert answer.problem == "name is 'more', but 256 descriptors are held, which is the most"
    for number in range(HELD_MAX):
        bare.send(ms.encode(ms.Forget(request=number, name=f"held-{number}")))
        assert bare.hear() == ms.Done(request=number)


def test_a_name_is_held_once(bare: Bare) -> None:
    bare.send(ms.encode(ms.Hold(request=1, name="once")), [0])
    assert bare.hear() == ms.Done(request=1)
    before = bare.open_descriptors()

    bare.send(ms.encode(ms.Hold(request=2, name="once")), [0])

    answer = bare.hear()
    assert isinstance(answer, ms.RequestRefused)
    assert answer.problem == "name is 'once', which is held already: forget it first"
    bare.require_alive()
    assert bare.open_descriptors() == before
    bare.send(ms.encode(ms.Forget(request=3, name="once")))
    assert bare.hear() == ms.Done(request=3)


def test_who_does_not_listen_is_not_listened_to_and_loses_nothing() -> None:
    with bare_supervisor() as bare:
        bare.channel.settimeout(0.5)
        sent = 0
        with suppress(TimeoutError):
            while sent < 100_000:
                bare.send(ms.encode(ms.Fetch(request=sent, name="nothing")))
                sent += 1
        bare.channel.settimeout(PATIENCE_S)
        assert sent < 100_000

        answers = [bare.hear() for _ in range(sent)]

        assert [answer.request for answer in answers if isinstance(answer, ms.RequestRefused)] == [
            *range(sent)
        ]


def test_who_asks_and_goes_without_an_answer_is_gone() -> None:
    with bare_supervisor() as bare:
        os.kill(bare.pid, signal.SIGSTOP)
        bare.send(ms.encode(ms.Fetch(request=1, name="nothing")))
        bare.channel.close()

        os.kill(bare.pid, signal.SIGCONT)  # It ends, as the context requires.


@pytest.mark.parametrize("what", [ms.StopProcess(request=2, name="rank"), ms.StopAll(request=2)])
def test_who_asks_for_the_same_end_over_and_over_is_refused(
    what: ms.AnyRequest, tmp_path: Path
) -> None:
    (tmp_path / "stuck.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(os.open(os.environ['TOLD'], os.O_WRONLY), b'deaf')\n"
        "while True: signal.pause()\n"
    )
    told = tmp_path / "told"
    os.mkfifo(told)
    environment = (("PYTHONPATH", str(tmp_path)), ("TOLD", str(told)))
    stuck = ProcessSpec(name="rank", module="stuck", environment=environment, stop_s=3000)
    with bare_supervisor() as bare, heard_from(told) as deaf:
        bare.send(ms.encode(ms.StartProcess(request=1, spec=stuck)))
        started = bare.hear()
        assert isinstance(started, ms.ProcessStarted)
        assert bare.hear() == ms.Done(request=1, pid=started.pid)
        # A stop by SIGSTOP would not do: of two signals that wait for a process which does not
        # get a core, SIGTERM takes effect first.
        assert deaf(PATIENCE_S)

        for _ in range(WAITING_MAX + 1):
            bare.send(ms.encode(what))

        refused = bare.hear()
        assert isinstance(refused, ms.RequestRefused)
        assert "64 requests wait for the end, which is the most" in refused.problem
        os.kill(started.pid, signal.SIGKILL)
        assert isinstance(bare.hear(), ms.ProcessExited)
        assert [bare.hear() for _ in range(WAITING_MAX)] == [ms.Done(request=2)] * WAITING_MAX


@contextmanager
def heard_from(pipe: Path) -> Iterator[Callable[[float], bool]]:
    """Tells whether something was written to a named pipe within some seconds."""
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        yield lambda timeout_s: bool(poll.poll(timeout_s * 1e3))
    finally:
        os.close(fd)


def test_an_engine_does_not_believe_everything_either() -> None:
    ours, theirs = channel_pair()
    with theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        link = SupervisorLink(ours, process)
        theirs.send(b"\x07garbage")

        found = link.receive(None)

        assert isinstance(found, ChannelFailed)
        assert found.cause.startswith(
            "the supervisor cannot be understood: a frame has version 7, must have version 1"
        )
        assert link.receive(None) == found
        process.stdin.close()
        link.close(deadline=0.0)


def test_a_copy_of_the_other_end_does_not_hide_a_death() -> None:
    ours, theirs = channel_pair()  # `theirs` stays open, as it would in a fork of the engine.
    with theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        link = SupervisorLink(ours, process)
        assert link.receive(None) == Empty()

        process.kill()

        found = link.receive(time.monotonic() + PATIENCE_S)
        assert found == ChannelFailed(f"the supervisor (process {process.pid}) ended by signal 9")
        link.close(deadline=0.0)
