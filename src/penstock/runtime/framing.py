"""Messages between owner and ranks: a letter, the version of the format, a MessagePack value.

| letter | message                                    | module  |
|--------|--------------------------------------------|---------|
| `F`    | facts: what a rank has, told when it starts | `facts` |
| `P`    | plan: what every rank is to do              | `plans` |
| `R`    | report: what has ended on one rank          | `plans` |

The one rule: whatever bytes arrive, they are read as exactly what the other side said, or they
raise `PeerError` and nothing has changed.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.errors import PeerError
from penstock.transport.base import FRAME_BYTES_MAX

VERSION = 2
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX
"""A longer message is refused: it would not fit into a frame of a channel."""
TEXT_MAX = 1000
"""Causes and failures are for people to read, and are cut to so many characters."""

_HEAD_BYTES = 2

ValueT = TypeVar("ValueT")

_encoder = msgspec.msgpack.Encoder()


def framed(letter: bytes, value: object) -> bytes:
    """A value as a message.

    Raises:
        ValueError: it is longer than `MESSAGE_BYTES_MAX`.
    """
    message = bytearray(letter)
    message.append(VERSION)
    _encoder.encode_into(value, message, _HEAD_BYTES)
    if len(message) > MESSAGE_BYTES_MAX:
        raise ValueError(
            f"a message has {len(message)} bytes, must have at most {MESSAGE_BYTES_MAX}"
        )
    return bytes(message)


def unframed(
    letter: bytes, word: str, message: bytes, decoder: msgspec.msgpack.Decoder[ValueT]
) -> ValueT:
    """The value that a message says; `word` is what it is called in refusals.

    Raises:
        PeerError: the message is something else, of another version, or damaged.
    """
    if len(message) > MESSAGE_BYTES_MAX:
        raise PeerError(f"a {word} has {len(message)} bytes, must have at most {MESSAGE_BYTES_MAX}")
    if message[:1] != letter:
        raise PeerError(
            f"a {word} begins with {message[:1]!r}, must begin with {letter!r}: "
            "it is something else"
        )
    if message[1:_HEAD_BYTES] != bytes([VERSION]):
        raise PeerError(
            f"a {word} is of version {message[1:_HEAD_BYTES].hex() or 'none'}, must be of "
            f"{VERSION:02x}: owner and ranks must be of one release"
        )
    try:
        return decoder.decode(memoryview(message)[_HEAD_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"a {word} cannot be read: {error}") from error


def short(text: str) -> str:
    """A text as it may travel: cut to `TEXT_MAX`, without what cannot be encoded."""
    return text[:TEXT_MAX].encode("utf-8", "replace").decode("utf-8")
