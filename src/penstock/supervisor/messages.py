"""The protocol between engine and supervisor: messages, their packets, and waiting events.

    packet = a frame (see `penstock.vocabulary.frames`), and a descriptor with `Hold` and `Done`

Requests carry a number, which their answer repeats; a number is never used twice. Events are sent
without a request. Packets go over a pair of Unix sockets that keeps their borders
(SOCK_SEQPACKET) and has no name: only processes that inherited an end can use it.

The rules: `decode_*` raises `MessageError` and nothing else, whatever the bytes are, so that
garbage can be refused. Every descriptor that arrives has an owner; those that nobody asked for are
closed at once. Events that had to be dropped are counted, and `EventsLost` reports the count.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from penstock.errors import PeerError
from penstock.supervisor.spec import ProcessSpec, require_name, require_stop_s
from penstock.transport import packets
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    import socket
    from collections.abc import Sized

    from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
    from penstock.transport.packets import Packet

VERSION = 1
FRAME_BYTES_MAX = 64 << 10
"""A spec with long arguments has a few KiB; a packet has to fit into a socket's buffer."""
PROBLEM_CHARACTERS_MAX = 2000
EVENTS_MAX = 1024
"""Sixteen for each process that there may be: more than repeated restarts cause before they end."""
WAITING_MAX = 64
"""An engine asks once, and once more after a deadline that passed."""


class MessageError(PeerError):
    """A frame is no message; `request` is its number as far as it could be read, else 0."""

    def __init__(self, problem: str, *, request: int = 0) -> None:
        super().__init__(problem)
        self.request = request


class RequestRefusedError(Exception):
    """A request cannot be carried out, and nothing was changed; becomes `RequestRefused`."""

    def __init__(self, problem: str, *, blame: Literal["caller", "world"] = "caller") -> None:
        super().__init__(problem)
        self.problem = problem
        self.blame: Literal["caller", "world"] = blame


class SupervisorMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True
):
    """The base of all messages."""


# Requests of the engine.


class SupervisorRequest(SupervisorMessage, frozen=True, kw_only=True):
    """The base of all requests; `request` is its number."""

    request: int


class Hold(SupervisorRequest, frozen=True, kw_only=True):
    """Hold the descriptor that comes with this, under a name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class Fetch(SupervisorRequest, frozen=True, kw_only=True):
    """Send the descriptor that is held under this name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class Forget(SupervisorRequest, frozen=True, kw_only=True):
    """Close the descriptor that is held under this name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class StartProcess(SupervisorRequest, frozen=True, kw_only=True):
    """Start a process; the answer comes when it runs, or cannot."""

    spec: ProcessSpec


class StopProcess(SupervisorRequest, frozen=True, kw_only=True):
    """Stop a process, by SIGKILL after `stop_s`; the answer comes when it has ended."""

    name: str
    stop_s: float | None = None
    """Seconds; by default what its spec says."""

    def __post_init__(self) -> None:
        require_name(self.name, "name")
        if self.stop_s is not None:
            require_stop_s(self.stop_s)


class StopAll(SupervisorRequest, frozen=True, kw_only=True):
    """Stop all processes, the last started first; then answer and end."""


OtherRequest = Fetch | Forget | StartProcess | StopProcess | StopAll
AnyRequest = Hold | OtherRequest


# Answers of the supervisor.


class SupervisorReady(SupervisorMessage, frozen=True, kw_only=True):
    """The first message: the supervisor takes requests."""

    pid: int


class Done(SupervisorMessage, frozen=True, kw_only=True):
    """The request was carried out; a fetched descriptor comes with this."""

    request: int
    pid: int | None = None
    """Of the process that was started, if that was asked."""


class RequestRefused(SupervisorMessage, frozen=True, kw_only=True):
    """The request was not carried out, and nothing has changed."""

    request: int
    blame: Literal["caller", "world"]
    """Whether the request is wrong, or the machine lacks something."""
    problem: str


AnyReply = SupervisorReady | Done | RequestRefused


# Events.


class ProcessStarted(SupervisorMessage, frozen=True, kw_only=True):
    """A process runs, for the first time or again."""

    name: str
    pid: int


class ProcessExited(SupervisorMessage, frozen=True, kw_only=True):
    """A process has ended, or could not be restarted."""

    name: str
    pid: int | None
    """Absent if no process could be created; `problem` says why."""
    code: int | None = None
    """Its exit status, if no signal killed it."""
    signal: int | None = None
    """The signal that killed it, if one did."""
    restart_at: float | None = None
    """When it is started again, on the monotonic clock; absent: never."""
    problem: str = ""
    """Why it ended before its module ran, if it did."""


class RestartsExhausted(SupervisorMessage, frozen=True, kw_only=True):
    """A process failed too often, and is not restarted any more."""

    name: str
    restarts: int
    window_s: float


class EventsLost(SupervisorMessage, frozen=True, kw_only=True):
    """The number of events that were dropped because the queue was full."""

    count: int


ProcessEvent = ProcessStarted | ProcessExited | RestartsExhausted | EventsLost


# Frames.


class _Numbered(msgspec.Struct):
    request: int = 0


_T = TypeVar("_T")


def _frames(decoder: msgspec.msgpack.Decoder[_T]) -> FrameCodec[_T]:
    return FrameCodec(decoder, version=VERSION, bytes_max=FRAME_BYTES_MAX)


_requests: FrameCodec[AnyRequest] = _frames(msgspec.msgpack.Decoder(AnyRequest))
_answers: FrameCodec[AnyReply | ProcessEvent] = _frames(
    msgspec.msgpack.Decoder(AnyReply | ProcessEvent)
)
_numbers = _frames(msgspec.msgpack.Decoder(_Numbered))


def encode(message: SupervisorMessage) -> bytes:
    """The frame of a message.

    Raises:
        ValueError: it would be longer than `FRAME_BYTES_MAX`.
    """
    return _requests.encode(message)


def decode_request(frame: bytes) -> AnyRequest:
    """The request in a frame that the engine sent."""
    try:
        return _requests.decode(frame)
    except PeerError as error:
        raise MessageError(str(error), request=_number_of(frame)) from error


def decode_answer(frame: bytes) -> AnyReply | ProcessEvent:
    """The reply or event in a frame that the supervisor sent."""
    try:
        return _answers.decode(frame)
    except PeerError as error:
        raise MessageError(str(error)) from error


def _number_of(frame: bytes) -> int:
    try:
        return _numbers.decode(frame).request
    except PeerError:
        return 0


# Packets.


def receive_packet(channel: socket.socket) -> Packet | Empty | ChannelClosed | ChannelFailed:
    """The next packet, if there is one; the caller owns its descriptors."""
    return packets.receive_packet(channel, FRAME_BYTES_MAX)


# Queues.


class EventQueue:
    """A bounded queue of events; a full one drops its oldest event and counts it."""

    def __init__(self, limit: int = EVENTS_MAX) -> None:
        self._events: deque[ProcessEvent] = deque()
        self._limit = limit
        self._lost = 0

    def add(self, event: ProcessEvent) -> None:
        """Appends an event; an `EventsLost` adds to the count instead."""
        if isinstance(event, EventsLost):
            self._lost += event.count
            return
        if len(self._events) == self._limit:
            self._events.popleft()
            self._lost += 1
        self._events.append(event)

    def next(self) -> ProcessEvent | None:
        """The next event; it stays in the queue until `drop`."""
        if self._lost:
            return EventsLost(count=self._lost)
        return self._events[0] if self._events else None

    def drop(self) -> None:
        """Removes what `next` last returned."""
        if self._lost:
            self._lost = 0
        else:
            self._events.popleft()

    def __len__(self) -> int:
        return len(self._events) + bool(self._lost)


def require_room(waiting: Sized, who: str) -> None:
    """Refuses a request to stop where many wait for the same already."""
    if len(waiting) >= WAITING_MAX:
        raise RequestRefusedError(
            f"{who}: {WAITING_MAX} requests wait for the end, which is the most"
        )
