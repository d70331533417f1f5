"""What engine and supervisor say to each other, as one frame each.

    frame = version byte, then a msgpack map with a tag: the type

Requests carry a number, which their answer repeats; a number is never used twice. Events come by
themselves. The one rule: `decode_*` raises `MessageError` and nothing else, whatever the bytes
are, so that garbage can be refused and does no harm.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from penstock.supervisor.spec import ProcessSpec, require_name, require_stop_s

VERSION = 1
FRAME_BYTES_MAX = 64 << 10
"""A spec with long arguments has a few KiB; a packet has to fit into a socket's buffer."""
PROBLEM_CHARACTERS_MAX = 2000


class MessageError(ValueError):
    """A frame is no message; `request` is its number as far as it could be read, else 0."""

    def __init__(self, problem: str, *, request: int = 0) -> None:
        super().__init__(problem)
        self.request = request


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages."""


# What the engine asks.


class Request(Message, frozen=True, kw_only=True):
    """The root of all requests."""

    request: int


class Hold(Request, frozen=True, kw_only=True):
    """Keep the descriptor that comes with this, under a name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class Fetch(Request, frozen=True, kw_only=True):
    """Send me the descriptor that you hold under this name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class Forget(Request, frozen=True, kw_only=True):
    """Close the descriptor that you hold under this name."""

    name: str

    def __post_init__(self) -> None:
        require_name(self.name, "name")


class StartProcess(Request, frozen=True, kw_only=True):
    """Start this; the answer comes when it runs, or cannot."""

    spec: ProcessSpec


class StopProcess(Request, frozen=True, kw_only=True):
    """Have this process end, SIGKILL after `stop_s`; the answer comes when it has."""

    name: str
    stop_s: float | None = None
    """Seconds; by default what its spec says."""

    def __post_init__(self) -> None:
        require_name(self.name, "name")
        if self.stop_s is not None:
            require_stop_s(self.stop_s)


class StopAll(Request, frozen=True, kw_only=True):
    """Have all processes end, the last started first; answer, and end."""


OtherRequest = Fetch | Forget | StartProcess | StopProcess | StopAll
AnyRequest = Hold | OtherRequest


# What the supervisor answers.


class Ready(Message, frozen=True, kw_only=True):
    """The first message: I am there."""

    pid: int


class Done(Message, frozen=True, kw_only=True):
    """The request was carried out; a fetched descriptor comes with this."""

    request: int
    pid: int | None = None
    """Of the process that was started, if that was asked."""


class Refused(Message, frozen=True, kw_only=True):
    """The request was not carried out, and nothing has changed."""

    request: int
    blame: Literal["caller", "world"]
    """Whether the request is wrong, or the machine lacks something."""
    problem: str


AnyReply = Ready | Done | Refused


# What the supervisor tells.


class Started(Message, frozen=True, kw_only=True):
    """A process runs, for the first time or again."""

    name: str
    pid: int


class Exited(Message, frozen=True, kw_only=True):
    """A process that ran has ended, or one that was to run again could not."""

    name: str
    pid: int | None
    """Absent if there was not even a process; `problem` says why."""
    code: int | None = None
    """Its status, if it ended by itself."""
    signal: int | None = None
    """What killed it, if something did."""
    restart_at: float | None = None
    """When it is started again, on the monotonic clock; absent: never."""
    problem: str = ""
    """Why it did not get as far as its module, if so."""


class GaveUp(Message, frozen=True, kw_only=True):
    """A process failed too often, and is not started again."""

    name: str
    restarts: int
    window_s: float


class Missed(Message, frozen=True, kw_only=True):
    """So many events are lost: nobody took them for so long that there was no more room."""

    count: int


Event = Started | Exited | GaveUp | Missed


class _Numbered(msgspec.Struct):
    request: int = 0


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(AnyRequest)
_answers = msgspec.msgpack.Decoder(AnyReply | Event)
_numbers = msgspec.msgpack.Decoder(_Numbered)

_T = TypeVar("_T")


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        MessageError: it would be longer than `FRAME_BYTES_MAX`.
    """
    frame = bytes((VERSION,)) + _encoder.encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise MessageError(
            f"{type(message).__name__} has {len(frame)} bytes, must have at most {FRAME_BYTES_MAX}"
        )
    return frame


def decode_request(frame: bytes) -> AnyRequest:
    """The request in a frame that the engine sent."""
    request: AnyRequest = _decode(frame, _requests)
    return request


def decode_answer(frame: bytes) -> AnyReply | Event:
    """The reply or event in a frame that the supervisor sent."""
    answer: AnyReply | Event = _decode(frame, _answers)
    return answer


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    if not frame:
        raise MessageError(f"frame is empty, must begin with the version, {VERSION}")
    if frame[0] != VERSION:
        raise MessageError(f"version is {frame[0]}, must be {VERSION}")
    try:
        return decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"no message: {error}", request=_number_of(frame)) from error


def _number_of(frame: bytes) -> int:
    try:
        return _numbers.decode(memoryview(frame)[1:]).request
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return 0
