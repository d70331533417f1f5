"""The engine's side of the supervisor.

    with Supervisor.start() as supervisor:
        supervisor.hold("arena-0", arena.fd)
        supervisor.start_process(ProcessSpec(name="rank-0", module=…, descriptors=("arena-0",)))
        …
        for event in supervisor.events(): …            # whenever `descriptor` is readable

Start it before anything else: its processes get the environment and the output that the engine
has then. Every call waits at most until its deadline, on the monotonic clock.

The one rule: nothing that went wrong looks like "no event". A supervisor that is lost is
`Failed(cause)`, from then on and for every call; the health of the engine depends on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.supervisor.backlog import Backlog
from penstock.supervisor.descriptors import close_all
from penstock.supervisor.link import Answer, Link, require_deadline
from penstock.supervisor.messages import (
    Done,
    Event,
    Exited,
    Fetch,
    Forget,
    Hold,
    Ready,
    Refused,
    Request,
    StartProcess,
    StopAll,
    StopProcess,
    encode,
)
from penstock.supervisor.spec import READY_S
from penstock.supervisor.wire import channel_pair
from penstock.transport.base import Closed, Empty, Failed

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from penstock.supervisor.spec import ProcessSpec

MODULE = "penstock.supervisor"

ANSWER_S = 5.0
"""The supervisor answers within a millisecond; a machine may be busy."""


class Supervisor:
    """A supervisor that this process started, and that ends with it. For one thread."""

    def __init__(self, link: Link, pid: int) -> None:
        self.pid = pid
        self._link = link
        self._owner = os.getpid()
        self._events = Backlog()
        self._requests = 0
        self._stop_s: dict[str, float] = {}

    @classmethod
    def start(cls, *, deadline: float | None = None) -> Self:
        """Starts a supervisor.

        Raises:
            UnavailableError: the machine does not let us, or it is not there by the deadline.
        """
        deadline = time.monotonic() + READY_S if deadline is None else deadline
        require_deadline(deadline)
        link, pid = _launch()
        supervisor = cls(link, pid)
        answer = link.take(deadline)
        if isinstance(answer, Answer) and isinstance(answer.message, Ready):
            return supervisor
        problem = answer.cause if isinstance(answer, Failed) else "it did not say that it is ready"
        link.close(deadline=deadline)
        raise UnavailableError(f"no supervisor: {problem}")

    # Processes.

    def start_process(self, spec: ProcessSpec, *, deadline: float | None = None) -> int:
        """Starts a process and returns its pid once it runs its module.

        If the deadline passes before, it may run later: `Started` tells.

        Raises:
            UnavailableError: it cannot be started, or there was no answer.
            ValueError: there is such a process, or a descriptor that it names is not held.
        """
        deadline = time.monotonic() + READY_S + ANSWER_S if deadline is None else deadline
        self._stop_s.setdefault(spec.name, spec.stop_s)
        done, _ = self._ask(StartProcess(request=self._number(), spec=spec), deadline)
        assert done.pid is not None
        self._stop_s[spec.name] = spec.stop_s
        return done.pid

    def stop_process(self, name: str, *, deadline: float | None = None) -> None:
        """Has a process end: SIGTERM now, SIGKILL at the deadline; returns when it has ended.

        Args:
            name: The process; one that waits for its restart is not started again.
            deadline: By default as far away as its spec's `stop_s`.

        Raises:
            UnavailableError: there was no answer, a while after the deadline.
            ValueError: there is no such process.
        """
        if deadline is not None:
            require_deadline(deadline)
        now = time.monotonic()
        stop_s = None if deadline is None else max(0.0, deadline - now)
        request = StopProcess(request=self._number(), name=name, stop_s=stop_s)
        wait_s = self._stop_s.get(name, 0.0) if stop_s is None else stop_s
        self._ask(request, now + wait_s + ANSWER_S)

    # Descriptors.

    def hold(self, name: str, fd: int, *, deadline: float | None = None) -> None:
        """Has the supervisor keep a copy of a descriptor; this one stays the caller's.

        Raises:
            UnavailableError: too many are held, or there was no answer.
            ValueError: the name is held already, or `fd` is no open descriptor.
        """
        try:
            os.fstat(fd)
        except OSError as error:
            raise ValueError(f"fd is {fd}, must be an open descriptor") from error
        self._ask(Hold(request=self._number(), name=name), self._soon(deadline), fd)

    def fetch(self, name: str, *, deadline: float | None = None) -> int:
        """A copy of a descriptor that is held; the caller owns it.

        Raises:
            UnavailableError: there was no answer, or no room for another descriptor here.
            ValueError: there is none of that name.
        """
        request = Fetch(request=self._number(), name=name)
        _, descriptors = self._ask(request, self._soon(deadline))
        if len(descriptors) != 1:
            raise UnavailableError(f"descriptor {name!r} did not arrive")
        return descriptors[0]

    def forget(self, name: str, *, deadline: float | None = None) -> None:
        """Has the supervisor close a descriptor that it holds.

        Raises:
            UnavailableError: there was no answer.
            ValueError: there is none of that name, or a process was started with it.
        """
        self._ask(Forget(request=self._number(), name=name), self._soon(deadline))

    # Events.

    @property
    def descriptor(self) -> int:
        """A file descriptor for the engine's poll: readable when there may be an event.

        It does not show what a call of ours took in passing: ask `events` before the poll too.
        """
        return self._link.descriptor

    def receive(self, *, deadline: float | None = None) -> Event | Empty | Closed | Failed:
        """The next event; waits for it until `deadline`, if given."""
        self._require_owner()
        if deadline is not None:
            require_deadline(deadline)
        while True:
            event = self._events.next()
            if event is not None:
                self._events.drop()
                return event
            answer = self._link.take(deadline)
            if not isinstance(answer, Answer):
                return answer
            self._keep(answer)

    def events(self) -> list[Event | Closed | Failed]:
        """All events that are there, without waiting; the last may say that none will come."""
        found: list[Event | Closed | Failed] = []
        while not isinstance(event := self.receive(), Empty):
            found.append(event)
            if isinstance(event, Closed | Failed):
                break
        return found

    @property
    def lost(self) -> Failed | None:
        """Why the supervisor is lost, as far as was noticed; absent while all is well."""
        end = self._link.end
        return end if isinstance(end, Failed) else None

    def look(self) -> Failed | None:
        """Why the supervisor is lost, if it is now; events that have come wait for `events`."""
        self._require_owner()
        while isinstance(answer := self._link.take(None), Answer):
            self._keep(answer)
        return self.lost

    # The end.

    def close(self, *, deadline: float | None = None) -> None:
        """Has all processes end, the last started first, then the supervisor.

        What has not ended by the deadline is killed. By default that is as far away as the
        `stop_s` of all processes together, and a while.
        """
        if isinstance(self._link.end, Closed) or os.getpid() != self._owner:
            return
        if deadline is None:
            deadline = time.monotonic() + sum(self._stop_s.values()) + ANSWER_S
        require_deadline(deadline)
        if self._link.end is None:
            try:
                self._ask(StopAll(request=self._number()), deadline)
            except UnavailableError:
                deadline = time.monotonic()  # It did not do it, so it is done to it.
        self._link.close(deadline=deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # How it asks.

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _soon(self, deadline: float | None) -> float:
        return time.monotonic() + ANSWER_S if deadline is None else deadline

    def _ask(
        self, request: Request, deadline: float, fd: int | None = None
    ) -> tuple[Done, tuple[int, ...]]:
        self._require_owner()
        require_deadline(deadline)
        if self._link.end is not None:
            raise UnavailableError(_cause(self._link.end))
        self._link.send(encode(request), fd, deadline=deadline)
        while True:
            answer = self._link.take(deadline)
            if isinstance(answer, Closed | Failed):
                raise UnavailableError(_cause(answer))
            if isinstance(answer, Empty):
                if time.monotonic() >= deadline:
                    what = type(request).__name__
                    raise UnavailableError(f"the supervisor gave no answer to {what} in time")
                continue
            message = answer.message
            if isinstance(message, Done) and message.request == request.request:
                return message, answer.descriptors
            # What could not even be read has no number; it can only be what was asked last.
            if isinstance(message, Refused) and message.request in {request.request, 0}:
                raise _error_of(message)
            self._keep(answer)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ValueError(
                f"this supervisor belongs to process {self._owner}, "
                f"and cannot be used in its fork {os.getpid()}"
            )

    def _keep(self, answer: Answer) -> None:
        """Keeps an event for later; an answer that came after its deadline is of no use."""
        close_all(answer.descriptors)
        message = answer.message
        if isinstance(message, Ready | Done | Refused):
            return
        self._events.add(message)
        if isinstance(message, Exited) and message.restart_at is None:
            self._stop_s.pop(message.name, None)


def _launch() -> tuple[Link, int]:
    """Starts the process, with our end of its channel."""
    with ExitStack() as undo:
        try:
            ours, theirs = map(undo.enter_context, channel_pair())
            engine = os.pidfd_open(os.getpid())
            undo.callback(os.close, engine)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(engine)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), engine),
                process_group=0,
            )
        except OSError as error:
            raise UnavailableError(
                f"no supervisor: {sys.executable!r} cannot be started: {error.strerror}"
            ) from error
        # A copy, as ours and theirs are closed here, whatever happened.
        return Link(ours.dup(), process), process.pid


def _cause(end: Closed | Failed) -> str:
    return end.cause if isinstance(end, Failed) else "the supervisor was closed"


def _error_of(refused: Refused) -> ValueError | UnavailableError:
    if refused.blame == "caller":
        return ValueError(refused.problem)
    return UnavailableError(refused.problem)
