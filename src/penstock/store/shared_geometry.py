"""Into which pieces engines cut their blocks, and how the pieces of one become blocks of another.

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

from penstock.store.base import DIGEST_BYTES
from penstock.store.shared_value import ValuePiece, piece_of
from penstock.vocabulary.form import Form
from penstock.vocabulary.reshard import plan_reshard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.base import MappedArena
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.layout import Cell, Layout
    from penstock.vocabulary.reshard import ReshardPlan

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
