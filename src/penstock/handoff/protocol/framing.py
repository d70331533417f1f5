"""Bytes ⇄ messages: one version byte, then one message in MessagePack.

What must not break (P22): bytes from outside become a message that is well formed in every
field, or a `PeerError`; never another exception, never a guess. Too long, too short, of another
version, of an unknown kind, with a field too many or too few or out of its bounds: all refused.
"""

from __future__ import annotations

import msgspec

from penstock.errors import PeerError
from penstock.handoff.protocol.messages import PROTOCOL_VERSION, AnyMessage

MESSAGE_BYTES_MAX = 8 << 20
"""A claim of 2^20 parts that were spoiled 8 times has 1.2 MiB; a block table of 2^20 slots five."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyMessage)
_VERSION = bytes([PROTOCOL_VERSION])


class VersionError(PeerError):
    """A frame of another version of the protocol: nothing else of it can be understood."""

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs
        super().__init__(f"version is {PROTOCOL_VERSION} here and {theirs} there")


def encode(message: AnyMessage) -> bytes:
    """The frame of a message.

    Raises:
        ValueError: the frame would be longer than `MESSAGE_BYTES_MAX`.
    """
    frame = _VERSION + _ENCODER.encode(message)
    if len(frame) > MESSAGE_BYTES_MAX:
        kind = type(message).__name__
        raise ValueError(f"a {kind} has {len(frame)} bytes, at most {MESSAGE_BYTES_MAX} may travel")
    return frame


def decode(frame: bytes) -> AnyMessage:
    """The message of a frame.

    Raises:
        VersionError: the frame is of another version.
        PeerError: the frame makes no sense here.
    """
    if not 1 < len(frame) <= MESSAGE_BYTES_MAX:
        raise PeerError(f"a frame of {len(frame)} bytes, must be from 2 to {MESSAGE_BYTES_MAX}")
    if frame[0] != PROTOCOL_VERSION:
        raise VersionError(frame[0])
    try:
        message: AnyMessage = _DECODER.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a frame of {len(frame)} bytes is no message: {error}") from error
    return message
