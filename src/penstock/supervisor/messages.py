"""The protocol between engine and supervisor: specs of processes, messages, their packets.

A spec checks itself on both sides of the channel: the engine gets the error where it builds the
spec, and the supervisor does not rely on the engine.

    packet = a frame (see `penstock.vocabulary.frames`), and a descriptor with `Hold` and `Done`

Requests carry a number, which their answer repeats; a number is never used twice. Events are sent
without a request. Packets go over a pair of Unix sockets that keeps their borders
(SOCK_SEQPACKET) and has no name: only processes that inherited an end can use it.

The rules: `decode_*` raises `MessageError` and nothing else, whatever the bytes are, so that
garbage can be refused. Every descriptor that arrives has an owner; those that nobody asked for are
closed at once. Events that had to be dropped are counted, and `EventsLost` reports the count.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from penstock.errors import PeerError
from penstock.transport import unix_sockets
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    import socket
    from collections.abc import Sized

    from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
    from penstock.transport.unix_sockets import Packet


NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

MODULE_CHARACTERS_MAX = 256
ARGUMENTS_MAX = 256
ENVIRONMENT_MAX = 256
PASSED_MAX = 64
"""Descriptors of one process: an arena a rank of a large machine, and some channels."""

READY_S = 30.0
"""From its start until a process reports that it runs: an interpreter may start slowly."""
SECONDS_MAX = 3600.0
RESTARTS_MAX = 1000


class Never(msgspec.Struct, frozen=True, kw_only=True, tag="never", forbid_unknown_fields=True):
    """A process that has ended is not restarted."""


class OnFailure(
    msgspec.Struct, frozen=True, kw_only=True, tag="on_failure", forbid_unknown_fields=True
):
    """A process that did not end with status 0 is restarted, up to a limit."""

    limit: int = 5
    """The most restarts within the window; the next failure is final."""
    window_s: float = 60.0
    delay_s: float = 0.1
    """Before the first restart; doubled for every further one within the window."""
    delay_max_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= RESTARTS_MAX:
            raise ValueError(f"limit is {self.limit}, must be between 1 and {RESTARTS_MAX}")
        if not 0 < self.window_s <= SECONDS_MAX:
            raise ValueError(f"window_s is {self.window_s}, must be in (0, {SECONDS_MAX:g}]")
        if not 0 <= self.delay_s <= self.delay_max_s <= SECONDS_MAX:
            raise ValueError(
                f"need 0 <= delay_s <= delay_max_s <= {SECONDS_MAX:g}, "
                f"got {self.delay_s} and {self.delay_max_s}"
            )


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that the supervisor is to start."""

    name: str
    """Unique among the processes of one supervisor."""
    module: str
    """The module that the engine's interpreter runs with `-m`."""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Added to the environment that the engine had when it started the supervisor."""
    descriptors: tuple[str, ...] = ()
    """Names of held descriptors; the process gets them with `inherited_descriptor`."""
    keeps: bool = False
    """Whether it may have descriptors kept for its next life, with `keeper.keeper`."""
    restart: Never | OnFailure = Never()
    stop_s: float = 5.0
    """From SIGTERM to SIGKILL, when it is stopped."""

    def __post_init__(self) -> None:
        require_name(self.name, "name")
        _require_module(self.module)
        _require_texts(self.arguments)
        _require_environment(self.environment)
        _require_descriptors(self.descriptors)
        require_stop_s(self.stop_s)


def require_name(name: str, field: str) -> None:
    """Refuses what is not a name of a process or of a descriptor."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{field} is {_short(name)}, must be 1 to 64 of a-z, 0-9, '.', '_', '-', "
            "and begin with a letter or digit"
        )


def require_stop_s(stop_s: float) -> None:
    """Refuses a time that no process may have between SIGTERM and SIGKILL."""
    if not 0 <= stop_s <= SECONDS_MAX:
        raise ValueError(f"stop_s is {stop_s}, must be in [0, {SECONDS_MAX:g}]")


def _require_module(module: str) -> None:
    if len(module) > MODULE_CHARACTERS_MAX or not _MODULE.fullmatch(module):
        raise ValueError(f"module is {_short(module)}, must be a dotted name as in `import a.b`")


def _require_texts(arguments: tuple[str, ...]) -> None:
    if len(arguments) > ARGUMENTS_MAX:
        raise ValueError(f"arguments are {len(arguments)}, must be at most {ARGUMENTS_MAX}")
    for number, argument in enumerate(arguments):
        if not _is_text(argument):
            raise ValueError(
                f"arguments[{number}] is {_short(argument)}, must be UTF-8 without NUL"
            )


def _require_environment(environment: tuple[tuple[str, str], ...]) -> None:
    if len(environment) > ENVIRONMENT_MAX:
        raise ValueError(f"environment has {len(environment)}, must have at most {ENVIRONMENT_MAX}")
    for variable, value in environment:
        if not variable or "=" in variable or not _is_text(variable):
            raise ValueError(
                f"environment has the name {_short(variable)}, must be UTF-8 without '=' and NUL"
            )
        if not _is_text(value):
            raise ValueError(
                f"environment[{variable!r}] is {_short(value)}, must be UTF-8 without NUL"
            )


def _require_descriptors(descriptors: tuple[str, ...]) -> None:
    if len(descriptors) > PASSED_MAX:
        raise ValueError(f"descriptors are {len(descriptors)}, must be at most {PASSED_MAX}")
    for name in descriptors:
        require_name(name, "descriptors")
    if len({*descriptors}) < len(descriptors):
        raise ValueError(f"descriptors are {descriptors}, must be different")


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:  # A lone surrogate: how Python keeps bytes that are not UTF-8.
        return False


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text)} characters)"


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


class DescriptorRequest(SupervisorRequest, frozen=True, kw_only=True):
    """The base of requests about a held descriptor."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class Hold(DescriptorRequest, frozen=True, kw_only=True):
    """Hold the descriptor that comes with this, under a name."""


class Fetch(DescriptorRequest, frozen=True, kw_only=True):
    """Send the descriptor that is held under this name."""


class Forget(DescriptorRequest, frozen=True, kw_only=True):
    """Close the descriptor that is held under this name."""


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
    return unix_sockets.receive_packet(channel, FRAME_BYTES_MAX)


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
