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

from typing import TYPE_CHECKING, TypeVar

from penstock.transport.base import FRAME_BYTES_MAX
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    import msgspec

VERSION = 2
MESSAGE_BYTES_MAX = FRAME_BYTES_MAX
"""A longer message is refused: it would not fit into a frame of a channel."""
TEXT_MAX = 1000
"""Causes and failures are for people to read, and are cut to so many characters."""

ValueT = TypeVar("ValueT")


def frames_of(
    letter: bytes, name: str, decoder: msgspec.msgpack.Decoder[ValueT]
) -> FrameCodec[ValueT]:
    """The codec of one kind of message; `name` is what its errors call the message."""
    return FrameCodec(decoder, version=VERSION, bytes_max=MESSAGE_BYTES_MAX, mark=letter, name=name)


def short(text: str) -> str:
    """A text as it may travel: cut to `TEXT_MAX`, without what cannot be encoded."""
    return text[:TEXT_MAX].encode("utf-8", "replace").decode("utf-8")
