"""What goes over a line: a message of the protocol, and what the driver attaches to it.

    length of the message (4 bytes, little-endian), the message, the attachment

| message  | attachment                                                                        |
|----------|-----------------------------------------------------------------------------------|
| `Claim`  | the description of the landing area, for the writer to connect                     |
| `Expect` | `Content`: how long the prompt is, and the keys that its sums are bound to          |

An attachment travels with every repetition of its message, so that losing one costs no more
than losing the message. The one rule: what arrives is read as exactly what was sent, or it
raises `PeerError`.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from penstock.errors import PeerError
from penstock.handoff.protocol.identity import NAME_CHARS_MAX
from penstock.handoff.protocol.messages import (
    INDEX_MAX,
    MESSAGE_BYTES_MAX,
    SLOT_COUNT_MAX,
    decode,
    encode,
)
from penstock.transport.base import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.handoff.protocol.messages import AnyMessage

_LENGTH_BYTES = 4
KEY_BYTES_MAX = 64
KEY_COUNT_MAX = 1 << 18
TOKEN_COUNT_MAX = 1 << 31
CONTENT_BYTES_MAX = FRAME_BYTES_MAX - MESSAGE_BYTES_MAX - _LENGTH_BYTES
"""An encoded content of this size fits a frame with any message."""


class Envelope(NamedTuple):
    """A message and its attachment, empty for most."""

    message: AnyMessage
    attachment: bytes = b""


class Content(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a decode rank has to know of a prompt beside its grids."""

    token_count: Annotated[int, msgspec.Meta(ge=1, le=TOKEN_COUNT_MAX)]
    keys: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)], ...],
        msgspec.Meta(max_length=KEY_COUNT_MAX),
    ]
    """Of the blocks that travel, in blocks of the *source*, the first missing one first."""


_ENCODER = msgspec.msgpack.Encoder()
_CONTENTS = msgspec.msgpack.Decoder(Content)


def seal(message: AnyMessage, attachment: bytes = b"") -> bytes:
    """The frame of a message with its attachment.

    Raises `ValueError`: the frame would be longer than `FRAME_BYTES_MAX`.
    """
    inner = encode(message)
    frame = b"".join((len(inner).to_bytes(_LENGTH_BYTES, "little"), inner, attachment))
    if len(frame) > FRAME_BYTES_MAX:
        kind = type(message).__name__
        raise ValueError(f"a {kind} has {len(frame)} bytes, at most {FRAME_BYTES_MAX} may travel")
    return frame


def unseal(frame: bytes) -> Envelope:
    """What `seal` put into a frame.

    Raises `PeerError`: the frame makes no sense here.
    """
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if len(frame) < end or len(frame) < _LENGTH_BYTES:
        raise PeerError(f"a frame of {len(frame)} bytes has no message of {length}")
    return Envelope(decode(frame[_LENGTH_BYTES:end]), frame[end:])


def encode_content(content: Content) -> bytes:
    """As it is attached."""
    return _ENCODER.encode(content)


def decode_content(attachment: bytes) -> Content:
    """The content that was attached.

    Raises `PeerError`: it is none.
    """
    try:
        return _CONTENTS.decode(attachment)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"an attachment of {len(attachment)} bytes is no content: {error}") from (
            error
        )


# Arguments of an engine's calls. A value that no message can carry must be found here, before
# anything changes: at the send it would be found in `step()`, and again at every resend.


def handoff_name(handoff: object) -> str:
    """The name of a handoff.

    Raises `TypeError`: it is no text; `ValueError`: it is empty or too long.
    """
    if not isinstance(handoff, str):
        raise TypeError(f"handoff is {handoff!r}, must be a str")
    if not 0 < len(handoff) <= NAME_CHARS_MAX:
        raise ValueError(
            f"handoff has {len(handoff)} characters, must have from 1 to {NAME_CHARS_MAX}"
        )
    return handoff


def numbers(name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1) -> tuple[int, ...]:
    """Whole numbers from 0 up to `end`, as plain `int`.

    Raises `TypeError`: one of them is no whole number; `ValueError`: one of them is out of range.
    """
    try:
        found = tuple(index(value) for value in values)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{name} must be whole numbers: {error}") from error
    wrong = [number for number in found if not 0 <= number < end]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]}, must be from 0 to {end - 1}")
    return found


def slot_numbers(
    name: str, values: Iterable[object], *, end: int = INDEX_MAX + 1
) -> tuple[int, ...]:
    """Slots of one rank."""
    found = numbers(name, values, end=end)
    if len(found) > SLOT_COUNT_MAX:
        raise ValueError(f"{name} are {len(found)}, must be at most {SLOT_COUNT_MAX}")
    return found


def block_keys(keys: Sequence[object]) -> tuple[bytes, ...]:
    """Keys of blocks.

    Raises `TypeError`: one of them is not bytes; `ValueError`: one of them is empty or too long, or
    there are too many.
    """
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"keys has {key!r}, must be bytes")
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise ValueError(f"keys has one of {len(key)} bytes, must have 1 to {KEY_BYTES_MAX}")
    if len(keys) > KEY_COUNT_MAX:
        raise ValueError(f"keys are {len(keys)}, must be at most {KEY_COUNT_MAX}")
    return tuple(keys)  # type: ignore[arg-type]


def whole_number(name: str, value: object, *, first: int = 0, end: int = INDEX_MAX + 1) -> int:
    """One whole number from `first` up to `end`, as a plain `int`.

    Raises `TypeError`: it is none; `ValueError`: it is out of range.
    """
    (number,) = numbers(name, [value], end=end)
    if number < first:
        raise ValueError(f"{name} is {number}, must be from {first} to {end - 1}")
    return number
