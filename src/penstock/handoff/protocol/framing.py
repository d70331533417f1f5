"""The frames of the handoff: one version byte, then one message in MessagePack.

What must not break (P22): bytes from outside become a message that is well formed in every
field, or a `PeerError`; never another exception, never a guess. Too long, too short, of another
version, of an unknown kind, with a field too many or too few or out of its bounds: all refused.
"""

from __future__ import annotations

import msgspec

from penstock.handoff.protocol.messages import PROTOCOL_VERSION, AnyMessage
from penstock.vocabulary.frames import FrameCodec

MESSAGE_BYTES_MAX = 8 << 20
"""A claim of 2^20 parts that were spoiled 8 times has 1.2 MiB; a block table of 2^20 slots five."""

_frames: FrameCodec[AnyMessage] = FrameCodec(
    msgspec.msgpack.Decoder(AnyMessage), version=PROTOCOL_VERSION, bytes_max=MESSAGE_BYTES_MAX
)


def encode(message: AnyMessage) -> bytes:
    """The frame of a message.

    Raises:
        ValueError: the frame would be longer than `MESSAGE_BYTES_MAX`.
    """
    return _frames.encode(message)


def decode(frame: bytes) -> AnyMessage:
    """The message of a frame.

    Raises:
        FrameVersionError: the frame is of another version.
        PeerError: the frame makes no sense here.
    """
    return _frames.decode(frame)
