"""The engine's side of the supervisor, and processes under a supervisor of one's own.

    with Supervisor.start() as supervisor:
        supervisor.hold("arena-0", arena.fd)
        supervisor.start_process(ProcessSpec(name="rank-0", module=…, descriptors=("arena-0",)))
        …
        for event in supervisor.events(): …            # whenever `descriptor` is readable

Start it before anything else: its processes get the environment and the output that the engine
has at that time. Every call waits at most until its deadline, on the monotonic clock.

The process is started again when it has ended, with a growing pause until one has worked; so is a
supervisor that cannot be started, does not answer, or was lost, whose processes the kernel has
killed.

The rules:

- A failure never looks like "no event". Once the supervisor is lost, every call reports
  `ChannelFailed(cause)`; the health of the engine depends on it.
- Nothing here waits, and nothing is given up. A supervisor is asked for its process before it has
  said that it is ready.
"""

from __future__ import annotations

import logging
import math
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import UnavailableError
from penstock.supervisor.descriptors import ANSWER_S, close_all
from penstock.supervisor.messages import (
    READY_S,
    AnyReply,
    Done,
    EventQueue,
    Fetch,
    Forget,
    Hold,
    MessageError,
    ProcessEvent,
    ProcessExited,
    ProcessStarted,
    RequestRefused,
    StartProcess,
    StopAll,
    StopProcess,
    SupervisorReady,
    SupervisorRequest,
    decode_answer,
    encode,
    receive_packet,
)
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
from penstock.transport.unix_sockets import Packet, channel_pair, send_packet
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    import socket
    from typing import Self

    from penstock.supervisor.messages import ProcessSpec


MODULE = "penstock.supervisor"

DYING_S = 0.2
"""A process that is killed closes its channel a moment before its status can be had."""

KILLED_S = 5.0
"""Nothing survives SIGKILL, but the kernel may be busy."""


class Supervisor:
    """A supervisor that this process started, and that ends with it. To be used by one thread."""

    def __init__(self, link: SupervisorLink, pid: int) -> None:
        self.pid = pid
        self._link = link
        self._owner = os.getpid()
        self._events = EventQueue()
        self._requests = 0
        self._stop_s: dict[str, float] = {}
        self._begun: dict[int, str] = {}
        """Processes that were asked for without waiting, by the number of the request."""
        self.has_begun = False
        """Whether it has said that it takes requests, as far as a call has noticed."""

    @classmethod
    def start(cls, *, deadline: float | None = None) -> Self:
        """Starts a supervisor.

        Raises:
            UnavailableError: its process cannot be created, or was not ready by the deadline.
        """
        deadline = time.monotonic() + READY_S if deadline is None else deadline
        require_deadline(deadline)
        link, pid = _launch()
        supervisor = cls(link, pid)
        answer = link.receive(deadline)
        if isinstance(answer, Received) and isinstance(answer.message, SupervisorReady):
            supervisor.has_begun = True
            return supervisor
        problem = (
            answer.cause if isinstance(answer, ChannelFailed) else "it did not say that it is ready"
        )
        link.close(deadline=deadline)
        raise UnavailableError(f"no supervisor: {problem}")

    @classmethod
    def begin(cls) -> Self:
        """Starts a supervisor and does not wait until it is ready: it takes requests already.

        Raises:
            UnavailableError: its process cannot be created.
        """
        return cls(*_launch())

    # Processes.

    def start_process(self, spec: ProcessSpec, *, deadline: float | None = None) -> int:
        """Starts a process and returns its pid once it runs its module.

        If the deadline passes before, it may still start later: watch for `ProcessStarted`.

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

    def begin_process(self, spec: ProcessSpec) -> None:
        """Asks for a process and does not wait: `ProcessStarted` or `ProcessExited` follows.

        Raises:
            UnavailableError: the supervisor is lost, or has no room for a request now.
        """
        self._require_owner()
        if self._link.end is not None:
            raise UnavailableError(_cause(self._link.end))
        self._stop_s.setdefault(spec.name, spec.stop_s)
        request = StartProcess(request=self._number(), spec=spec)
        self._link.send(encode(request), None, deadline=time.monotonic())
        self._begun[request.request] = spec.name

    def stop_process(self, name: str, *, deadline: float | None = None) -> None:
        """Stops a process: SIGTERM now, SIGKILL at the deadline; returns when it has ended.

        Args:
            name: The process; one that waits for its restart is not restarted.
            deadline: By default after its spec's `stop_s`.

        Raises:
            UnavailableError: there was no answer within `ANSWER_S` of the deadline.
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
        """Has the supervisor hold a copy of a descriptor; the caller still owns this one.

        Raises:
            UnavailableError: too many are held, or there was no answer.
            ValueError: the name is held already, or `fd` is not an open descriptor.
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

        Events that another call received meanwhile do not show: call `events` before the poll.
        """
        return self._link.descriptor

    def receive(
        self, *, deadline: float | None = None
    ) -> ProcessEvent | Empty | ChannelClosed | ChannelFailed:
        """The next event; waits for it until `deadline`, if given."""
        self._require_owner()
        if deadline is not None:
            require_deadline(deadline)
        while True:
            event = self._events.next()
            if event is not None:
                self._events.drop()
                return event
            answer = self._link.receive(deadline)
            if not isinstance(answer, Received):
                return answer
            self._keep(answer)

    def events(self) -> list[ProcessEvent | ChannelClosed | ChannelFailed]:
        """All events so far, without waiting; the last may say that no more will come."""
        found: list[ProcessEvent | ChannelClosed | ChannelFailed] = []
        while not isinstance(event := self.receive(), Empty):
            found.append(event)
            if isinstance(event, ChannelClosed | ChannelFailed):
                break
        return found

    @property
    def lost(self) -> ChannelFailed | None:
        """Why the supervisor is lost, as far as a call has noticed; `None` while it is well."""
        end = self._link.end
        return end if isinstance(end, ChannelFailed) else None

    def look(self) -> ChannelFailed | None:
        """Checks whether the supervisor is lost, and returns why; events wait for `events`."""
        self._require_owner()
        while isinstance(answer := self._link.receive(None), Received):
            self._keep(answer)
        return self.lost

    # The end.

    def close(self, *, deadline: float | None = None) -> None:
        """Stops all processes, the last started first, then the supervisor.

        What has not ended by the deadline is killed; by default that is after the `stop_s` of
        all processes together and `ANSWER_S`.
        """
        if isinstance(self._link.end, ChannelClosed) or os.getpid() != self._owner:
            return
        if deadline is None:
            deadline = time.monotonic() + sum(self._stop_s.values()) + ANSWER_S
        require_deadline(deadline)
        if self._link.end is None:
            try:
                self._ask(StopAll(request=self._number()), deadline)
            except UnavailableError:
                deadline = time.monotonic()  # The graceful stop failed: kill it now.
        self._link.close(deadline=deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Requests.

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _soon(self, deadline: float | None) -> float:
        return time.monotonic() + ANSWER_S if deadline is None else deadline

    def _ask(
        self, request: SupervisorRequest, deadline: float, fd: int | None = None
    ) -> tuple[Done, tuple[int, ...]]:
        self._require_owner()
        require_deadline(deadline)
        if self._link.end is not None:
            raise UnavailableError(_cause(self._link.end))
        self._link.send(encode(request), fd, deadline=deadline)
        while True:
            answer = self._link.receive(deadline)
            if isinstance(answer, ChannelClosed | ChannelFailed):
                raise UnavailableError(_cause(answer))
            if isinstance(answer, Empty):
                if time.monotonic() >= deadline:
                    what = type(request).__name__
                    raise UnavailableError(f"the supervisor gave no answer to {what} in time")
                continue
            message = answer.message
            if isinstance(message, Done) and message.request == request.request:
                return message, answer.descriptors
            # A request that could not be read is refused as number 0; it must be this one.
            if isinstance(message, RequestRefused) and message.request in {request.request, 0}:
                raise _error_of(message)
            self._keep(answer)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise ValueError(
                f"this supervisor belongs to process {self._owner}, "
                f"and cannot be used in its fork {os.getpid()}"
            )

    def _keep(self, answer: Received) -> None:
        """Queues an event; drops an answer that came after its deadline."""
        close_all(answer.descriptors)
        message = answer.message
        if isinstance(message, Done | RequestRefused):
            name = self._begun.pop(message.request, None)
            if name is not None and isinstance(message, RequestRefused):
                self._events.add(ProcessExited(name=name, pid=None, problem=message.problem))
            return
        if isinstance(message, SupervisorReady):
            self.has_begun = True
            return
        self._events.add(message)
        if isinstance(message, ProcessExited) and message.restart_at is None:
            self._stop_s.pop(message.name, None)


class Received(NamedTuple):
    """A reply or an event, and the descriptors that came with it; the receiver owns them."""

    message: AnyReply | ProcessEvent
    descriptors: tuple[int, ...]


class SupervisorLink:
    """The engine's end of the channel, and its watch over the supervisor's process.

    The pidfd shows the end of the process even where a copy of the other end, in a process that
    the engine forked, keeps the channel open.
    """

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.end: ChannelClosed | ChannelFailed | None = None
        """Why no more messages come; absent while they do."""
        self._channel = channel
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._poll = select.epoll()
        for fd in (channel.fileno(), self._pidfd):
            self._poll.register(fd, select.EPOLLIN)

    @property
    def descriptor(self) -> int:
        """Readable when there is something to receive."""
        return self._poll.fileno()

    def send(self, frame: bytes, fd: int | None, *, deadline: float) -> None:
        """Sends a frame.

        Raises:
            UnavailableError: the supervisor is lost, or takes nothing until the deadline.
        """
        writable = select.poll()
        writable.register(self._channel, select.POLLOUT)
        try:
            while not send_packet(self._channel, frame, fd):
                if not writable.poll(_left_ms(deadline)):
                    raise UnavailableError("the supervisor takes no requests: deadline passed")
        except ConnectionError:
            raise UnavailableError(self.lose().cause) from None

    def receive(self, deadline: float | None) -> Received | Empty | ChannelClosed | ChannelFailed:
        """The next message; waits for it until `deadline`, if given."""
        if self.end is not None:
            return self.end
        left_ms = 0 if deadline is None else _left_ms(deadline)
        ready = [fd for fd, _ in self._poll.poll(left_ms / 1000)]
        if not ready:
            return Empty()
        if self._channel.fileno() not in ready:
            return self.lose()
        packet = receive_packet(self._channel)
        if isinstance(packet, Empty):
            return packet
        return self._read(packet) if isinstance(packet, Packet) else self.lose()

    def _read(self, packet: Packet) -> Received | ChannelFailed:
        try:
            message = decode_answer(packet.frame)
        except MessageError as error:
            close_all(packet.descriptors)
            return self.lose(f"the supervisor cannot be understood: {error}")
        return Received(message, packet.descriptors)

    def lose(self, cause: str = "") -> ChannelFailed:
        """Closes the channel, which ends the supervisor and its processes if they still run."""
        lost = ChannelFailed(cause or self._cause())
        if self.end is None:
            self.end = lost
            self._cut()
        return lost

    def _cause(self) -> str:
        who = f"the supervisor (process {self._process.pid})"
        if not self._ended_by(time.monotonic() + DYING_S):
            return f"{who} closed its channel"
        status = self._process.poll()
        if status is None or status >= 0:
            return f"{who} ended: {status}"
        return f"{who} ended by signal {-status}"

    def close(self, *, deadline: float) -> None:
        """Closes the channel and waits for the process to end; kills it at the deadline."""
        self.end = self.end or ChannelClosed()
        self._cut()
        if not self._ended_by(deadline):
            self._process.kill()  # The kernel kills its processes as well.
            self._ended_by(time.monotonic() + KILLED_S)
        self._process.poll()
        if not self._poll.closed:
            self._poll.close()
            os.close(self._pidfd)

    def _cut(self) -> None:
        if self._channel.fileno() >= 0:
            self._poll.unregister(self._channel.fileno())
            self._channel.close()

    def _ended_by(self, deadline: float) -> bool:
        return self._process.poll() is not None or wait_readable(self._pidfd, deadline)


def _launch() -> tuple[SupervisorLink, int]:
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
        # A copy, because leaving this block closes both ends.
        return SupervisorLink(ours.dup(), process), process.pid


def _cause(end: ChannelClosed | ChannelFailed) -> str:
    return end.cause if isinstance(end, ChannelFailed) else "the supervisor was closed"


def _error_of(refused: RequestRefused) -> ValueError | UnavailableError:
    if refused.blame == "caller":
        return ValueError(refused.problem)
    return UnavailableError(refused.problem)


def require_deadline(deadline: float) -> None:
    """Refuses infinity and NaN: no call may wait without a limit."""
    if not math.isfinite(deadline):
        raise ValueError(f"deadline is {deadline}, must be a time on the monotonic clock")


def _left_ms(deadline: float) -> int:
    # Rounded up: a poll that ends slightly early would have to be repeated.
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))


logger = logging.getLogger(__name__)

EMBEDDED_ANSWER_S = READY_S + 15.0
EMBEDDED_ANSWER_MAX_S = 8 * EMBEDDED_ANSWER_S
"""Within this time a supervisor starts, and says what became of a process that was asked for, which
has `READY_S` to run; then another supervisor is asked. Doubled each time: a machine may be that
busy."""
RESTART_S = 0.1
RESTART_MAX_S = 30.0
"""Before a process that has ended is started again; doubled each time, until one has worked."""


class EmbeddedProcess:
    """A process of this one; it belongs to one thread.

    Args:
        spec: the process. Its name is what messages call it.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._supervisor: Supervisor | None = None
        """`None` while there is none: it was lost, or cannot be started."""
        self._epoll = select.epoll()
        self._asked_at: float | None = None
        """When a process was asked for of which nothing was heard since."""
        self._start_at = 0.0
        """When the next process may be asked for."""
        self._pause_s = RESTART_S
        self._answer_s = EMBEDDED_ANSWER_S
        self._runs = False
        self.why = ""
        """Why there is none."""
        # It takes a while to start, and the first process is asked for soon.
        try:
            self._take_supervisor(Supervisor.begin())
        except UnavailableError as error:
            self._note(str(error))

    @property
    def descriptor(self) -> int:
        """Readable when `poll` may find something."""
        return self._epoll.fileno()

    def start(self, now: float) -> None:
        """Starts the process, unless it runs or was asked for."""
        if self._asked_at is not None and now >= self._asked_at + self._answer_s:
            self._note(f"the supervisor has not answered for {self._answer_s:g} s")
            self._answer_s = min(2 * self._answer_s, EMBEDDED_ANSWER_MAX_S)
            self._drop_supervisor(time.monotonic())
        if self._runs or self._asked_at is not None or now < self._start_at:
            return
        self._start_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
        try:
            if self._supervisor is None:
                self._take_supervisor(Supervisor.begin())
            assert self._supervisor is not None
            self._supervisor.begin_process(self._spec)
        except UnavailableError as error:
            self._note(str(error))
        else:
            self._asked_at = now

    def _take_supervisor(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._epoll.register(supervisor.descriptor, select.EPOLLIN)

    def _drop_supervisor(self, deadline: float) -> None:
        """Ends the supervisor, and with it the process if there is one."""
        supervisor, self._supervisor = self._supervisor, None
        self._runs = False
        self._asked_at = None
        if supervisor is None:
            return
        self._epoll.unregister(supervisor.descriptor)
        supervisor.look()
        # One that has not begun yet has nothing to end in order.
        supervisor.close(deadline=deadline if supervisor.has_begun else time.monotonic())

    def note_success(self) -> None:
        """A process works: the next pause is a short one."""
        self._pause_s = RESTART_S
        self._answer_s = EMBEDDED_ANSWER_S
        self.why = ""

    def poll(self) -> None:
        """Takes what the supervisor reports."""
        if self._supervisor is None:
            return
        for event in self._supervisor.events():
            match event:
                case ProcessStarted():
                    self._runs = True
                    self._asked_at = None
                case ProcessExited():
                    self._runs = False
                    self._asked_at = None
                    self._note(self._why_ended(event))
                case ChannelFailed():
                    self._drop_supervisor(time.monotonic())
                    self._note(f"the {self._spec.name} process cannot be started: {event.cause}")
                case _:
                    pass

    def _why_ended(self, exited: ProcessExited) -> str:
        ended = exited.problem or (
            f"signal {exited.signal}"
            if exited.signal
            else f"status {exited.code}, and its log says why"
        )
        return f"the {self._spec.name} process has ended: {ended}"

    def _note(self, why: str) -> None:
        if why != self.why:
            self.why = why
            logger.warning("embedded %s: %s", self._spec.name, why)

    def close(self, deadline: float) -> None:
        self._drop_supervisor(deadline)
        self._epoll.close()
