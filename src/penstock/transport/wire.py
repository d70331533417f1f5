"""What ends of a ZeroMQ channel say to each other, as bytes.

    hello, welcome, refusal    magic (8 bytes), version (1), msgpack map
    everything after           kind (1), incarnation of its sender (8), sequence (8), payload

The first two lines go between a dialling end and a listener, once; the last between the two
ends of the channel that came of it. Numbers are little-endian.

The one rule: nothing that arrives is believed. What is not exactly one of these is refused by
`WireError`, whose `reason` is a word to count by.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum
from typing import Annotated, NamedTuple

import msgspec

from penstock.errors import PeerError, PenstockError
from penstock.vocabulary.frames import FrameCodec, FrameVersionError

MAGIC = b"PENSTOCK"
VERSION = 2
HELLO_BYTES_MAX = 1024
NAME_LENGTH_MAX = 100
WINDOW_FRAMES_MAX = 1 << 20
WINDOW_BYTES_MAX = 1 << 32

_HEADER = struct.Struct("<BQQ")
HEADER_BYTES = _HEADER.size
_CREDIT = struct.Struct("<QQ")

Incarnation = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no number of more than 64 bits.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Key = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{40}$")]  # 32 bytes in Z85.


class RefusalReason(Enum):
    """Why something that arrived was thrown away."""

    GARBAGE = "garbage"
    """It is not one of our messages."""
    VERSION = "version"
    """It is, in another version of the protocol."""
    STALE = "stale"
    """It is from another life than the one this channel goes to."""
    REPLAYED = "replayed"
    """It arrived before."""
    TAKEN = "taken"
    """Its name is that of a peer that is here and alive."""
    CROWDED = "crowded"
    """More peers are being let in at once than a listener is willing to remember."""
    NO_PORT = "no_port"
    """All ports that a listener may use are in use."""
    UNKNOWN_KEY = "unknown_key"
    """A peer whose key is not listed; its connection was broken off."""


class WireError(PenstockError):
    """Something arrived that is not what may arrive here."""

    def __init__(self, reason: RefusalReason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class Kind(IntEnum):
    """What a frame between two ends is for."""

    OPEN = 1
    """The first one, of the end that dialled."""
    FRAME = 2
    """The payload is a frame of the caller."""
    CREDIT = 3
    """The payload says how much of what was sent has been taken so far."""
    CLOSE = 4
    """The last one: nothing more will come."""


_KINDS = {kind.value: kind for kind in Kind}


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much an end lets the other send before it has taken any of it."""

    frames: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_FRAMES_MAX)]
    frame_bytes: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_BYTES_MAX)]


class ChannelHello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """What an end that dials says first."""

    name: Name
    incarnation: Incarnation
    window: Window


class ChannelWelcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """What a listener answers: where the channel is, and who is at its other end."""

    name: Name
    incarnation: Incarnation
    window: Window
    link: Address
    """Where the channel's messages go."""
    pulse: Address
    """Where its heartbeats go."""
    key: Key
    """The public key of both, without which they let nobody in."""


class ChannelRefusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """What a listener answers when it does not let somebody in."""

    cause: Annotated[str, msgspec.Meta(max_length=300)]
    taken: bool = False
    """Whether it is the name alone, which may be free later."""


Greeting = ChannelHello | ChannelWelcome | ChannelRefusal
_greetings: FrameCodec[Greeting] = FrameCodec(
    msgspec.msgpack.Decoder(Greeting),
    version=VERSION,
    bytes_max=HELLO_BYTES_MAX,
    mark=MAGIC,
    name="greeting",
)


class Frame(NamedTuple):
    """A frame between two ends, taken apart."""

    kind: Kind
    incarnation: int
    sequence: int
    payload: bytes


def require_name(name: str) -> None:
    """Refuses a name that the other end would refuse."""
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise ValueError(
            f"name is {name[:NAME_LENGTH_MAX]!r}, of {len(name)} characters, must have from 1 to "
            f"{NAME_LENGTH_MAX}"
        )


def encode_greeting(greeting: Greeting) -> bytes:
    """The bytes of a hello, a welcome or a refusal."""
    return _greetings.encode(greeting)


def decode_greeting(message: bytes) -> Greeting:
    """What `encode_greeting` wrote, or a `WireError`."""
    try:
        return _greetings.decode(message)
    except FrameVersionError as error:
        raise WireError(RefusalReason.VERSION, str(error)) from error
    except PeerError as error:
        raise WireError(RefusalReason.GARBAGE, str(error)) from error


def encode_frame(kind: Kind, incarnation: int, sequence: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, incarnation, sequence) + payload


def decode_frame(message: bytes) -> Frame:
    """What `encode_frame` wrote, or a `WireError`."""
    if len(message) < HEADER_BYTES:
        raise WireError(
            RefusalReason.GARBAGE, f"frame has {len(message)} bytes, a header has {HEADER_BYTES}"
        )
    number, incarnation, sequence = _HEADER.unpack_from(message)
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(RefusalReason.GARBAGE, f"frame is of kind {number}, which there is not")
    length = len(message) - HEADER_BYTES
    expected = {Kind.FRAME: length, Kind.CREDIT: _CREDIT.size}.get(kind, 0)
    if length != expected:
        raise WireError(
            RefusalReason.GARBAGE,
            f"frame of kind {kind.name} has {length} bytes, {expected} belong there",
        )
    return Frame(kind, incarnation, sequence, message[HEADER_BYTES:])


def encode_credit(frames: int, frame_bytes: int) -> bytes:
    """How many frames, of how many bytes together, were taken since the channel was made."""
    return _CREDIT.pack(frames, frame_bytes)


def decode_credit(payload: bytes) -> tuple[int, int]:
    """What `encode_credit` wrote."""
    frames, frame_bytes = _CREDIT.unpack(payload)
    return frames, frame_bytes
