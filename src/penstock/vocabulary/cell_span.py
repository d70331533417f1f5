"""Cell spans: the checksums of whole blocks, or of some of their cells, many at a time.

This is the data path of a CPU: blocks as they lie packed in an arena, tables of sums out.
The one rule: a span sums packed bytes. Bytes in another order have to be packed first, or
their sums would mean something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from xxhash import xxh3_64_intdigest

from penstock.vocabulary.checksums import Algorithm, CellSums, cell_seeds, mix64_sums, place_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Cell, Layout, Segment


COUNTS_KEPT = 8
"""For how many numbers of blocks the places of all segments are kept."""


class _Run(NamedTuple):
    """Segments of one plane and length at equal distances in the packed block."""

    start: int
    step: int
    length: int
    segments: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class CellSpan:
    """Cells that follow each other in a packed block, ready to be summed.

    Build it once per layout (`of`), or from a slice of `layout.cells` to sum some layers or
    heads alone. The bytes to sum start with the first byte of the first cell.
    """

    cells: Sequence[Cell]
    length: int = field(init=False)
    """Bytes of all its cells."""
    _slices: tuple[slice, ...] = field(init=False, repr=False)
    _following: dict[int, list[slice]] = field(init=False, repr=False)
    """By number of blocks, the segments of blocks that follow each other."""
    _places: NDArray[np.uint64] = field(init=False, repr=False)
    _first_segments: NDArray[np.intp] = field(init=False, repr=False)
    _runs: tuple[_Run, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError("cells is empty, must have at least 1")
        for before, after in pairwise(self.cells):
            if before.start + before.length != after.start:
                raise ValueError(
                    f"cells must follow each other: one ends at {before.start + before.length}, "
                    f"the next starts at {after.start}"
                )
        base = self.cells[0].start
        segments = [segment for cell in self.cells for segment in cell.segments]
        slices = tuple(slice(s.start - base, s.start - base + s.length) for s in segments)
        places = [
            place_number(layer=cell.layer, plane=segment.plane.role, head=cell.head)
            for cell in self.cells
            for segment in cell.segments
        ]
        counts = [len(cell.segments) for cell in self.cells]
        set_field = object.__setattr__
        set_field(self, "length", slices[-1].stop)
        set_field(self, "_slices", slices)
        set_field(self, "_following", {})
        set_field(self, "_places", np.array(places, dtype=np.uint64))
        set_field(self, "_first_segments", np.cumsum([0, *counts[:-1]]))
        set_field(self, "_runs", tuple(_runs(segments, base)))

    @classmethod
    def of(cls, layout: Layout) -> CellSpan:
        return cls(layout.cells)

    def seeds(self, keys: Sequence[bytes], salt: int = 0) -> NDArray[np.uint64]:
        """The seed of every segment, of shape [keys, segments]."""
        return cell_seeds(keys, self._places, salt)

    def sum_blocks(
        self,
        blocks: NDArray[np.uint8],
        keys: Sequence[bytes],
        algorithm: Algorithm,
        *,
        salt: int = 0,
    ) -> NDArray[np.uint64]:
        """The cell sums of many packed blocks.

        Returns:
            The sums, of shape [blocks, cells], in canonical order.
        """
        self._require_fitting(blocks, keys)
        summed = self._xxh3_sums if algorithm is Algorithm.XXH3 else self._mix64_sums
        sums = summed(blocks, self.seeds(keys, salt))
        halves = sums.astype("<u8", copy=False).view("<u4").reshape(*sums.shape, 2)
        cells = np.add.reduceat(halves, self._first_segments, axis=1, dtype=np.uint32)
        return cells.astype("<u4", copy=False).view("<u8")[..., 0].astype(np.uint64, copy=False)

    def verify(
        self,
        blocks: NDArray[np.uint8],
        keys: Sequence[bytes],
        sums: Sequence[CellSums],
        algorithm: Algorithm,
    ) -> list[tuple[int, int]]:
        """The cells whose bytes are not what `sums` say, as (block, cell): empty if all hold."""
        if len(sums) != len(keys):
            raise ValueError(
                f"sums has {len(sums)} tables, must have one for each of {len(keys)} keys"
            )
        for position, table in enumerate(sums):
            if len(table) != len(self.cells):
                raise ValueError(
                    f"sums[{position}] has {len(table)} cells, must have {len(self.cells)}"
                )
        if not sums:
            return []
        found = self.sum_blocks(blocks, keys, algorithm)
        stored = np.stack([table.values for table in sums])
        return [(int(block), int(cell)) for block, cell in np.argwhere(found != stored)]

    def _require_fitting(self, blocks: NDArray[np.uint8], keys: Sequence[bytes]) -> None:
        if blocks.ndim != 2 or blocks.dtype != np.uint8:
            raise ValueError(
                f"blocks is an array {list(blocks.shape)} of {blocks.dtype}, "
                "must be [blocks, bytes] of uint8"
            )
        if blocks.shape != (len(keys), self.length):
            raise ValueError(
                f"blocks has shape {list(blocks.shape)}, {len(keys)} keys of {self.length} "
                f"bytes each need {[len(keys), self.length]}"
            )
        if blocks.size > 1 and self.length > 1 and blocks.strides[1] != 1:
            raise ValueError(f"bytes of a block are {blocks.strides[1]} apart, must be 1")

    def _xxh3_sums(
        self, blocks: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        # No Python for each segment or block: it would take longer than summing four kilobytes.
        if len(blocks) > 1 and blocks.strides[0] == self.length:
            segments = map(blocks.reshape(-1).data.__getitem__, self._slices_of(len(blocks)))
            return _xxh3_each(segments, seeds)
        rows = [
            _xxh3_each(map(block.data.__getitem__, self._slices), row)
            for block, row in zip(blocks, seeds, strict=True)
        ]
        return np.stack(rows) if rows else np.empty(seeds.shape, dtype=np.uint64)

    def _slices_of(self, count: int) -> list[slice]:
        """The segments of `count` blocks that follow each other."""
        found = self._following.get(count)
        if found is None:
            if len(self._following) >= COUNTS_KEPT:
                self._following.clear()
            found = self._following[count] = [
                slice(each.start + shift, each.stop + shift)
                for shift in range(0, count * self.length, self.length)
                for each in self._slices
            ]
        return found

    def _mix64_sums(
        self, blocks: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        sums = np.empty(seeds.shape, dtype=np.uint64)
        for run in self._runs:
            segments = as_strided(
                blocks[:, run.start :],
                shape=(len(blocks), len(run.segments), run.length),
                strides=(blocks.strides[0], run.step, 1),
                writeable=False,
            )
            sums[:, run.segments] = mix64_sums(segments, seeds[:, run.segments])
        return sums


def _xxh3_each(segments: Iterator[memoryview], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sum of each segment under its seed, in the shape of the seeds."""
    sums = map(xxh3_64_intdigest, segments, seeds.ravel().tolist())
    return np.fromiter(sums, dtype=np.uint64, count=seeds.size).reshape(seeds.shape)


def _runs(segments: Sequence[Segment], base: int) -> Iterator[_Run]:
    """The segments of each plane and length, in as few equal distances as they allow."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        alike.setdefault((segment.plane.role, segment.length), []).append(index)
    for (_, length), indices in alike.items():
        row = [indices[0]]
        step = 0
        for index in indices[1:]:
            distance = segments[index].start - segments[row[-1]].start
            if len(row) > 1 and distance != step:
                yield _Run(segments[row[0]].start - base, step, length, np.array(row))
                row = []
            step = distance if len(row) == 1 else step
            row.append(index)
        yield _Run(segments[row[0]].start - base, step, length, np.array(row))
