"""What one value of a shared store holds, and into which pieces engines cut their blocks.

    value = head (256 bytes), cell sums (8 bytes a cell), block (packed; perhaps compressed)
    name  = penstock.v1/SPACE/GENERATION/PIECE/KEY

A *piece* is what one rank holds of a block: some layers and heads of it, in canonical order. It is
named by the fingerprint of its form, which knows no rank: the ranks of two engines that hold the
same heads of the same layers have one piece. Where the bytes of two ranks differ but their forms do
not (an engine's opaque blocks without heads), the piece is named by the rank as well.

The head repeats the name, and its sum covers the cell sums, which cover the bytes. So a value that
was cut, exchanged, aged or damaged on the way is no value. Sums are those of the plain bytes, also
where the block is compressed (`io`). Numbers are little-endian.

An engine announces its *geometry*, the forms of all its ranks, before it writes. Others read these
records and plan with the reshard planner which ranges of which values make up each of their own
ranks' blocks, if these have as many tokens. An engine's own geometry is a plan like any other: one
value, whole.

The one rule: each cell of a block comes from one value, and is checked by the sums of that value.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.store.base import DIGEST_BYTES, key_fields, part_name
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.reshard import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.base import MappedArena, Space
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Cell, Layout
    from penstock.vocabulary.reshard import ReshardPlan


MAGIC = b"PENSTOCK"
VERSION = 1
HEAD_BYTES = 256
PREFIX = "penstock.v1"
CODEC_PLAIN, CODEC_PLANES = 0, 1
"""How the block of a value is stored: as it is, or by `io.encode_block`."""

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
    heads["parent"] = key_fields(parents)
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
    heads["piece"], heads["key"] = np.void(piece.name), key_fields(keys)


def _sum_of(front: NDArray[np.uint8]) -> int:
    raw = front.tobytes()
    return xxh3_64_intdigest(raw[: HEAD_BYTES - SUM_BYTES] + raw[HEAD_BYTES:])


RECORD_BYTES_MAX = 64 << 10
FORMS_BYTES_MAX = 16 << 20
"""Of the forms of one engine, unpacked: those of 256 ranks with a hundred layers are fewer."""
RANKS_MAX = 256


class EngineGeometry(NamedTuple):
    """The pieces of one engine's blocks, one for each of its ranks that differ."""

    pieces: tuple[ValuePiece, ...]
    forms: tuple[Form, ...]

    @classmethod
    def of(cls, arenas: Sequence[MappedArena]) -> EngineGeometry:
        """That of an engine with these ranks."""
        found: dict[bytes, tuple[ValuePiece, Form]] = {}
        for arena in arenas:
            piece = piece_of(arena)
            found.setdefault(piece.name, (piece, arena.form))
        pieces, forms = zip(*found.values(), strict=True)
        return cls(pieces, forms)

    @property
    def block_tokens(self) -> int:
        return self.forms[0].block_tokens

    @property
    def names(self) -> tuple[bytes, ...]:
        return tuple(piece.name for piece in self.pieces)

    def to_record(self) -> bytes:
        """As it is announced."""
        ranks = [
            (piece.name, form.to_bytes())
            for piece, form in zip(self.pieces, self.forms, strict=True)
        ]
        return zlib.compress(msgspec.msgpack.encode(ranks), 6)

    @classmethod
    def from_record(cls, record: bytes) -> EngineGeometry:
        """What `to_record` wrote.

        Raises `ValueError`: it is something else.
        """
        unpacker = zlib.decompressobj()
        try:
            raw = unpacker.decompress(record, FORMS_BYTES_MAX)
            ranks = msgspec.msgpack.decode(raw, type=list[tuple[bytes, bytes]])
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError(f"record is damaged: {error}") from error
        if not 1 <= len(ranks) <= RANKS_MAX:
            raise ValueError(f"ranks are {len(ranks)}, must be 1 to {RANKS_MAX}")
        pieces, forms = [], []
        for name, encoded in ranks:
            if len(name) != DIGEST_BYTES:
                raise ValueError(f"a piece's name has {len(name)} bytes, must be {DIGEST_BYTES}")
            form = Form.from_bytes(encoded)
            layout = form.layout
            pieces.append(
                ValuePiece(name, layout.block_bytes, len(layout.cells), form.block_tokens)
            )
            forms.append(form)
        return cls(tuple(pieces), tuple(forms))


class SourcePart(NamedTuple):
    """What of a value makes up a block of one rank."""

    piece: ValuePiece
    ranges: tuple[tuple[int, int, int], ...]
    """From where in the value's block, to where in the rank's block, and how many bytes."""
    source_cells: NDArray[np.intp]
    """The cells of the value's block that are taken, and"""
    target_cells: NDArray[np.intp]
    """what they are in the rank's block."""


class Gathering(NamedTuple):
    """How blocks of one rank are made of the values of a geometry."""

    parts: tuple[SourcePart, ...]
    checksum: Algorithm
    """Of the sums of those values."""


def gather(geometry: EngineGeometry, arenas: Sequence[MappedArena]) -> dict[bytes, Gathering]:
    """How the blocks of each of an engine's ranks are made, by the name of their part.

    Raises `ValueError`: they cannot be; the message names the first difference.
    """
    own = EngineGeometry.of(arenas)
    by_name = dict(zip(geometry.names, geometry.pieces, strict=True))
    if all(piece.name in by_name for piece in own.pieces):
        return {arena.part: _whole(piece_of(arena), arena.form) for arena in arenas}
    if any(piece.name != form.fingerprint for piece, form in zip(*geometry, strict=True)):
        raise ValueError("the pieces there are those of single ranks, and cannot be cut")
    forms = [arena.form for arena in arenas]
    if geometry.block_tokens != own.block_tokens:
        raise ValueError(
            f"block_tokens is {geometry.block_tokens} there, must be {own.block_tokens} as here"
        )
    plan = plan_reshard(geometry.forms, forms)
    return {
        arena.part: _gathering(geometry, plan, target, arena.form)
        for target, arena in enumerate(arenas)
    }


def _whole(piece: ValuePiece, form: Form) -> Gathering:
    cells = np.arange(piece.cell_count)
    ranges = ((0, 0, piece.block_bytes),)
    part = SourcePart(piece, ranges, cells, cells)
    return Gathering((part,), form.checksum)


def _gathering(geometry: EngineGeometry, plan: ReshardPlan, target: int, form: Form) -> Gathering:
    checksums = {each.checksum for each in geometry.forms}
    if len(checksums) > 1:
        raise ValueError("checksum is not the same on all ranks there")
    here = {_place(cell): number for number, cell in enumerate(form.layout.cells)}
    parts = []
    for route in plan.routes:
        if route.target != target:
            continue
        there = geometry.forms[route.source].layout
        wanted = {
            (layer, head)
            for piece in route.pieces
            for layer in piece.layers
            for head in (
                [None]
                if piece.heads is None
                else range(piece.heads.first, piece.heads.first + piece.heads.count)
            )
        }
        pairs = [
            (number, here[_place(cell)])
            for number, cell in enumerate(there.cells)
            if _place(cell) in here
            and ((cell.layer, cell.head) in wanted or (cell.layer, None) in wanted)
        ]
        parts.append(_source_part(geometry.pieces[route.source], there, form.layout, pairs))
    taken = sorted(int(cell) for part in parts for cell in part.target_cells)
    if taken != list(range(len(form.layout.cells))):
        raise ValueError("cells of a block would come twice, or from nowhere")
    return Gathering(tuple(parts), checksums.pop())


def _place(cell: Cell) -> tuple[int, int, tuple[int, ...]]:
    """What a cell is, on whichever rank."""
    return cell.layer, cell.head, tuple(segment.plane.role for segment in cell.segments)


def _source_part(
    piece: ValuePiece, there: Layout, here: Layout, pairs: Sequence[tuple[int, int]]
) -> SourcePart:
    ranges: list[tuple[int, int, int]] = []
    for source, target in sorted(pairs):
        start, to = there.cells[source].start, here.cells[target].start
        length = there.cells[source].length
        if ranges:
            last_start, last_to, last_length = ranges[-1]
            if (last_start + last_length, last_to + last_length) == (start, to):
                ranges[-1] = (last_start, last_to, last_length + length)
                continue
        ranges.append((start, to, length))
    numbers = np.array(sorted(pairs), dtype=np.intp).reshape(-1, 2)
    return SourcePart(piece, tuple(ranges), numbers[:, 0].copy(), numbers[:, 1].copy())
