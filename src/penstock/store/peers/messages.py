"""What the store processes of two engines say to each other.

Each dials the others that it is to read from. Who dials is the *reader*, who listens the *lender*:

    reader, lender   PeerHello, Resets              who it is, and which generations count
    lender           LentForms, Lends, LendingEnded   what it has, and every change of it
    reader           ReadBlocks                     answered by `BlocksRead`, in any order
    reader, lender   AreaOffered, NoLanding         whether answers come by NIXL (`landing.py`)

The one rule: nothing is believed but the sums. A message that is none ends the channel; one that
names what is not there is answered so.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from penstock.store.base import DIGEST_BYTES
from penstock.store.peers.generations import ORDER_MAX
from penstock.store.shared.generations import ANCESTORS_MAX
from penstock.store.shared.values import RANKS_MAX, RECORD_BYTES_MAX
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.vocabulary.frames import Count, FrameCodec, Text
from penstock.vocabulary.keys import KEY_BYTES

VERSION = 1
SLOT = np.dtype("<i4")
KEYS_MAX = 4096
"""Keys of one message."""
SPANS_MAX = 1 << 14
"""Pieces of a value that one request names: a block of another tensor parallelism has one for each
layer and head."""
ANSWER_BYTES = 4 << 20
"""What a request asks for at most; a frame has room for four of them."""
BERTHS = 8
"""Answers that an area of a reader has room for."""
DESCRIPTION_BYTES_MAX = 2 << 20

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX * KEY_BYTES)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Generation = Annotated[int, msgspec.Meta(ge=1)]
Order = Annotated[int, msgspec.Meta(ge=0, le=ORDER_MAX)]
Generations = Annotated[dict[Generation, Order], msgspec.Meta(max_length=ANCESTORS_MAX)]

MISSING, FOUND = 0, 1
"""Of a block in `BlocksRead`."""


class PeerMessage(
    msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """The base of all messages."""


class PeerHello(PeerMessage, array_like=True, frozen=True, gc=False):
    """The first message of both."""

    process: Count
    """A number that this process has drawn."""
    arena_address: Text
    """Where peers of this machine get its arenas (`near`); empty: nowhere."""


class Resets(PeerMessage, array_like=True, frozen=True, gc=False):
    """What a process knows of the generations of a space, as `PeerGenerations` has it."""

    space: Digest
    counting: Generations
    ended: Generations
    asks: bool
    """Whether the other end is to say what it knows now."""


class LentForms(PeerMessage, array_like=True, frozen=True, gc=False):
    """How an engine cuts its blocks: `EngineGeometry.to_record`."""

    space: Digest
    record: Annotated[bytes, msgspec.Meta(max_length=RECORD_BYTES_MAX)]


class Lends(PeerMessage, array_like=True, frozen=True, gc=False):
    """Blocks that an engine has now, and those that it has no longer."""

    lender: Count
    """A number of the engine, up to its next reset."""
    space: Digest
    generation: Count
    pieces: Annotated[list[Digest], msgspec.Meta(max_length=RANKS_MAX)]
    keys: Keys
    slots: Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX * SLOT.itemsize)]
    """Where each lies in the arenas, and"""
    salt: Count
    """what the sums there were made with: for who has them mapped."""
    gone: Keys


class LendingEnded(PeerMessage, array_like=True, frozen=True, gc=False):
    """An engine lends nothing any more."""

    lender: Count


class ReadBlocks(PeerMessage, array_like=True, frozen=True, gc=False):
    """Send these bytes of the values of some keys."""

    number: Count
    space: Digest
    generation: Count
    piece: Digest
    keys: Keys
    spans: Annotated[list[tuple[Count, Size]], msgspec.Meta(max_length=SPANS_MAX)]
    """Where each begins in the value, and its length."""
    berth: Annotated[int, msgspec.Meta(ge=-1, lt=BERTHS)] = -1
    """Where in the reader's area the values go; -1: over the channel."""


class BlocksRead(PeerMessage, array_like=True, frozen=True, gc=False):
    """The answer: one byte a key, and the bytes of those that were found."""

    number: Count
    found: bytes
    content: memoryview


class AreaOffered(PeerMessage, array_like=True, frozen=True, gc=False):
    """Memory of the reader into which values may be written by NIXL."""

    description: Annotated[bytes, msgspec.Meta(max_length=DESCRIPTION_BYTES_MAX)]


class NoLanding(PeerMessage, array_like=True, frozen=True, gc=False):
    """The lender does not write there, or not any more."""

    why: Text


AnyPeerMessage = (
    PeerHello
    | Resets
    | LentForms
    | Lends
    | LendingEnded
    | ReadBlocks
    | BlocksRead
    | AreaOffered
    | NoLanding
)

frames: FrameCodec[AnyPeerMessage] = FrameCodec(
    msgspec.msgpack.Decoder(AnyPeerMessage),
    version=VERSION,
    bytes_max=FRAME_BYTES_MAX,
    mark=b"PP",
    name="a message of a peer",
)
_NO_BYTES, _BYTES = b"\xc4\x00", struct.Struct(">BI")
"""No bytes in MessagePack, with which a message without content ends; what begins many."""


def read_frame(number: int, found: bytes, content: Iterable[NDArray[np.uint8]]) -> bytes:
    """The frame of a `BlocksRead`: each byte of its content is copied once."""
    head = frames.encode(BlocksRead(number, found, memoryview(b"")))
    parts = [each.data for each in content]
    size = sum(map(len, parts))
    return b"".join((head.removesuffix(_NO_BYTES), _BYTES.pack(0xC6, size), *parts))
