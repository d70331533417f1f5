"""A supervisor with real processes, and a line on which they say what they do."""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.supervisor import client
from penstock.supervisor.client import Supervisor
from penstock.supervisor.messages import ProcessSpec
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from penstock.supervisor.messages import ProcessEvent

    Watch = Callable[[int], "Watched"]
    MakeLab = Callable[[], "Lab"]

PROGRAMS = Path(__file__).parent / "programs"
PATIENCE_S = 600.0
"""How long a test waits for what has to happen; a busy machine starts processes slowly."""


class Watched:
    """A process, whoever's it is, that lives now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def ended(self, seconds: float = PATIENCE_S) -> bool:
        """Whether it has ended, or does by then."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def close(self) -> None:
        os.close(self._pidfd)


class Line:
    """What processes say, packet by packet; they have the end `theirs`."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(PATIENCE_S)
        self.theirs = self._theirs.fileno()

    def hear(self) -> str:
        return self._ours.recv(4096).decode()

    def hear_all(self) -> list[str]:
        """What was said and not heard yet, without waiting."""
        self._ours.settimeout(0)
        heard = []
        try:
            while True:
                heard.append(self._ours.recv(4096).decode())
        except BlockingIOError:
            self._ours.settimeout(PATIENCE_S)
            return heard

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class Lab:
    """A supervisor that holds a line for its processes."""

    def __init__(self, supervisor: Supervisor, line: Line) -> None:
        self.supervisor = supervisor
        self.line = line
        supervisor.hold("line", line.theirs)

    def spec(self, task: str, *arguments: str, name: str = "", **wishes: Any) -> ProcessSpec:
        name = name or task.replace("_", "-")
        held = ("line", *wishes.pop("descriptors", ()))
        return ProcessSpec(
            name=name,
            module="supervised",
            arguments=(task, *(arguments or (name,))),
            environment=(("PYTHONPATH", str(PROGRAMS)), *wishes.pop("environment", ())),
            descriptors=held,
            **wishes,
        )

    def start(self, task: str, *arguments: str, **wishes: Any) -> int:
        return self.supervisor.start_process(self.spec(task, *arguments, **wishes))

    def event(self) -> ProcessEvent:
        """The next event, which has to come."""
        event = self.supervisor.receive(deadline=time.monotonic() + PATIENCE_S)
        assert not isinstance(event, Empty | ChannelClosed | ChannelFailed), event
        return event


@pytest.fixture(autouse=True)
def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that answers late on a busy machine is none that is lost."""
    monkeypatch.setattr(client, "ANSWER_S", PATIENCE_S)


@pytest.fixture
def watch() -> Iterator[Watch]:
    with ExitStack() as stack:
        yield lambda pid: stack.enter_context(closing(Watched(pid)))


@pytest.fixture
def line() -> Iterator[Line]:
    with closing(Line()) as line:
        yield line


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Each call starts a supervisor of its own."""
    with ExitStack() as stack:
        yield lambda: Lab(
            stack.enter_context(Supervisor.start()), stack.enter_context(closing(Line()))
        )


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    return make_lab()


@pytest.fixture
def supervisor(lab: Lab) -> Supervisor:
    return lab.supervisor
