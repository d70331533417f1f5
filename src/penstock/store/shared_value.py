"""What one value of a shared store holds: a piece of a block, with all that is needed to trust it.

    value = head (256 bytes), cell sums (8 bytes a cell), block (packed; perhaps compressed)
    name  = penstock.v1/SPACE/GENERATION/PIECE/KEY

A *piece* is what one rank holds of a block: some layers and heads of it, in canonical order. It is
named by the fingerprint of its form, which knows no rank: the ranks of two engines that hold the
same heads of the same layers have one piece. Where the bytes of two ranks differ but their forms do
not (an engine's opaque blocks without heads), the piece is named by the rank as well.

The head repeats the name, and its sum covers the cell sums, which cover the bytes. So a value that
was cut, exchanged, aged or damaged on the way is no value. Sums are those of the plain bytes, also
where the block is compressed (`block_codec`). Numbers are little-endian.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.store.base import DIGEST_BYTES, part_name
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layers import GroupKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.base import MappedArena, Space
    from penstock.vocabulary.ids import Key

MAGIC = b"PENSTOCK"
VERSION = 1
HEAD_BYTES = 256
PREFIX = "penstock.v1"
NO_PARENT = bytes(KEY_BYTES)
CODEC_PLAIN, CODEC_PLANES = 0, 1
"""How the block of a value is stored: as it is, or by `block_codec`."""

HEAD = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("codec", "<u4"),  # Of the block: `CODEC_PLAIN`, `CODEC_PLANES`.
        ("space", f"V{DIGEST_BYTES}"),
        ("generation", "<u8"),
        ("piece", f"V{DIGEST_BYTES}"),
        ("key", "V32"),  # Keys have 16 bytes today; zeros follow.
        ("parent", "V32"),  # Zeros: the first block of its chain.
        ("salt", "<u8"),  # Of the cell sums.
        ("block_bytes", "<u8"),
        ("stored_bytes", "<u8"),  # Of the block as it is stored.
        ("cell_count", "<u4"),
        ("block_tokens", "<u4"),
        ("reserved", "V96"),
        ("sum", "<u8"),  # XXH3-64 of the bytes before it and of the cell sums after it.
    ]
)
assert HEAD.itemsize == HEAD_BYTES


class ValuePiece(NamedTuple):
    """What one rank holds of every block."""

    name: bytes
    block_bytes: int
    cell_count: int
    block_tokens: int

    @property
    def front_bytes(self) -> int:
        """Where the block begins in a value."""
        return HEAD_BYTES + self.cell_count * SUM_BYTES

    @property
    def value_bytes(self) -> int:
        return self.front_bytes + self.block_bytes


def piece_of(arena: MappedArena) -> ValuePiece:
    """The piece that a rank's arena holds of each block."""
    form = arena.form
    layout = form.layout
    # Latents are the same on all ranks; heads beside them tell the ranks apart.
    told_apart = any(group.heads is not None for group in layout.groups) and all(
        group.heads is not None or group.kind is GroupKind.LATENT for group in layout.groups
    )
    # The part of a rank that is alone, or whose bytes are those of all others, says nothing more.
    alone = (
        part_name(form, rank=0, rank_count=1, equal=False),
        part_name(form, rank=0, rank_count=1, equal=True),
    )
    name = form.fingerprint if told_apart or arena.part in alone else arena.part
    return ValuePiece(name, layout.block_bytes, len(layout.cells), form.block_tokens)


def value_name(space: Space, piece: ValuePiece, key: Key) -> str:
    return f"{PREFIX}/{space.name.hex()}/{space.generation:016x}/{piece.name.hex()}/{key.hex()}"


def generation_name(space: bytes) -> str:
    """Of the record that says which generation of a space counts.

    Its first form was a number alone, under `generation`: both can be used at a time.
    """
    return f"{PREFIX}/{space.hex()}/generations"


def geometry_name(space: Space, number: int) -> str:
    """Of a record that says into which pieces an engine cuts its blocks."""
    return f"{PREFIX}/{space.name.hex()}/{space.generation:016x}/geometry/{number}"


def fill_fronts(
    room: NDArray[np.uint8],
    space: Space,
    piece: ValuePiece,
    keys: Sequence[Key],
    parents: Sequence[Key | None],
    salt: int,
    sums: NDArray[np.uint64],
    stored_bytes: Sequence[int],
) -> None:
    """Writes heads and cell sums into `room`, of shape [keys, `piece.front_bytes`].

    `stored_bytes` are those of each block as it is stored; if they are fewer than the block has, it
    is compressed.
    """
    heads = np.zeros(len(keys), dtype=HEAD)
    heads["magic"], heads["version"] = MAGIC, VERSION
    heads["salt"], heads["block_bytes"] = salt, piece.block_bytes
    heads["stored_bytes"], heads["cell_count"] = stored_bytes, piece.cell_count
    heads["codec"][heads["stored_bytes"] < piece.block_bytes] = CODEC_PLANES
    heads["block_tokens"] = piece.block_tokens
    heads["parent"] = _key_fields([each or NO_PARENT for each in parents])
    _name_heads(heads, space, piece, keys)
    room[:, HEAD_BYTES:] = sums.astype("<u8", copy=False).view(np.uint8).reshape(len(keys), -1)
    raw = heads.view(np.uint8).reshape(len(keys), HEAD_BYTES)
    room[:, :HEAD_BYTES] = raw
    totals = np.array([_sum_of(each) for each in room], dtype="<u8")
    room[:, HEAD_BYTES - SUM_BYTES : HEAD_BYTES] = totals.view(np.uint8).reshape(len(keys), -1)


class Fronts(NamedTuple):
    """Heads and cell sums as they were read."""

    sound: NDArray[np.bool_]
    """Which are whole, and of the value that was asked for."""
    salts: list[int]
    sums: NDArray[np.uint64]
    """Of shape [values, cells]."""
    codecs: list[int]
    """How each block is stored, and"""
    stored_bytes: list[int]
    """in how many bytes: fewer than the block has, unless it is plain."""


def read_fronts(
    room: NDArray[np.uint8], space: Space, piece: ValuePiece, keys: Sequence[Key]
) -> Fronts:
    """What `fill_fronts` wrote, as far as it is what it should be."""
    heads = np.ascontiguousarray(room[:, :HEAD_BYTES]).view(HEAD)[:, 0]
    wanted = np.zeros(len(keys), dtype=HEAD)
    wanted["magic"], wanted["version"] = MAGIC, VERSION
    wanted["block_bytes"] = piece.block_bytes
    wanted["cell_count"], wanted["block_tokens"] = piece.cell_count, piece.block_tokens
    _name_heads(wanted, space, piece, keys)
    sound = heads["sum"] == np.array([_sum_of(each) for each in room], dtype="<u8")
    for name in HEAD.names or ():
        if name not in {"salt", "parent", "reserved", "sum", "codec", "stored_bytes"}:
            sound &= heads[name] == wanted[name]
    stored = heads["stored_bytes"]
    sound &= np.where(
        heads["codec"] == CODEC_PLAIN,
        stored == piece.block_bytes,
        (stored > 0) & (stored < piece.block_bytes),
    )
    sums = np.ascontiguousarray(room[:, HEAD_BYTES:]).view("<u8").astype(np.uint64, copy=False)
    return Fronts(sound, heads["salt"].tolist(), sums, heads["codec"].tolist(), stored.tolist())


def _name_heads(
    heads: NDArray[np.void], space: Space, piece: ValuePiece, keys: Sequence[Key]
) -> None:
    heads["space"], heads["generation"] = np.void(space.name), space.generation
    heads["piece"], heads["key"] = np.void(piece.name), _key_fields(keys)


def _key_fields(keys: Sequence[Key]) -> NDArray[np.void]:
    size = HEAD["key"].itemsize
    return np.frombuffer(b"".join(key.ljust(size, b"\0") for key in keys), dtype=f"V{size}")


def _sum_of(front: NDArray[np.uint8]) -> int:
    raw = front.tobytes()
    return xxh3_64_intdigest(raw[: HEAD_BYTES - SUM_BYTES] + raw[HEAD_BYTES:])
