"""What an engine's process and its relay say to each other, and what describes a landing area.

    engine  ──→  relay     main connection: one byte, with the socket of a new session
    engine  ──→  relay     session: `OpenSession`, with the descriptor of its memory
    relay   ──→  engine    session: READY, then NOTICE (a target) or WRITE_ENDED (a source)
    engine  ──→  relay     session: `WriteOrder`s of a source; it shuts its end to close
    relay   ──→  engine    session: CLOSED, after its agent was destroyed

Frames are packets of a Unix socket. What the relay sends begins with one byte that says what it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from penstock.transport.remote import NOTICE_BYTES_MAX

NEW_SESSION = b"\x01"
"""What the socket of a session is sent along with."""
READY = b"R"
NOTICE = b"N"
WRITE_ENDED = b"E"
FAILED = b"F"
CLOSED = b"C"

SPANS_MAX = 1024
"""A write has no more pieces; a part of a prompt has one."""
ORDER_ROOM_BYTES = 40 * SPANS_MAX
"""Of a `WriteOrder`, besides its notice."""
FRAME_BYTES_MAX = NOTICE_BYTES_MAX + ORDER_ROOM_BYTES + 64

MAGIC = b"PENSTOCK"
VERSION = 1
METADATA_BYTES_MAX = 1 << 20
SIZE_MAX = 1 << 48

_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]


class NixlDescription(msgspec.Struct, frozen=True, tag="nixl", forbid_unknown_fields=True):
    """What a writer has to know of an area."""

    peer: Annotated[str, msgspec.Meta(max_length=200)]
    """Whose area it is."""
    metadata: Annotated[bytes, msgspec.Meta(min_length=1, max_length=METADATA_BYTES_MAX)]
    """Of the area's agent: its name, and how to reach it and its memory."""
    address: _Address
    """Of the area's first byte, in the relay that has the agent."""
    size: _Size


class OpenSession(msgspec.Struct, frozen=True, array_like=True):
    """An area or a link, with an agent of its own."""

    role: Literal["target", "source"]
    size: int
    """Bytes of the memory whose descriptor comes along."""
    metadata: bytes = b""
    """For a source: of the target's agent."""
    address: int = 0
    """For a source: of the target's memory."""


class SessionReady(msgspec.Struct, frozen=True, array_like=True):
    """The memory is registered. For a target, what its writer has to know."""

    metadata: bytes
    address: int


class WriteOrder(msgspec.Struct, frozen=True, array_like=True):
    """Writes ranges of a source's memory to the same offsets of its target, then the notice."""

    number: int
    ranges: list[tuple[int, int]]
    """Offset and length of each."""
    notice: bytes


class WriteReport(msgspec.Struct, frozen=True, array_like=True):
    """A write has ended; `cause` is why it failed, or empty."""

    number: int
    cause: str


_DESCRIPTIONS = msgspec.msgpack.Decoder(NixlDescription)
open_sessions = msgspec.msgpack.Decoder(OpenSession)
session_readies = msgspec.msgpack.Decoder(SessionReady)
write_orders = msgspec.msgpack.Decoder(WriteOrder)
write_reports = msgspec.msgpack.Decoder(WriteReport)


def encode_description(description: NixlDescription) -> bytes:
    """As it goes over a control channel."""
    return MAGIC + bytes((VERSION,)) + msgspec.msgpack.encode(description)


def decode_description(encoded: bytes) -> NixlDescription:
    """What `encode_description` wrote; `ValueError` for anything else."""
    head = MAGIC + bytes((VERSION,))
    if not encoded.startswith(head):
        raise ValueError("description is of no area, or of another version: it begins otherwise")
    try:
        return _DESCRIPTIONS.decode(encoded[len(head) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"description is not of an area of NIXL: {error}") from error
