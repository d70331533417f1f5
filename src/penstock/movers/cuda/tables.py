"""What links and kernels see of blocks: runs of slots, and tables of chunks.

Plain integers and lists: a batch has few runs, and calls of NumPy for each would take longer
than the copies' own.

A segment is what one plane adds to a cell: `tokens × channels` numbers of one head. Its bytes
are runs of equal length along a few axes with a stride each. Segments with the same runs and
strides form a *pattern*; those numbers are compiled into the kernels, and what differs from
segment to segment (where it starts, in memory and in the packed block) is a row of a table.

The rules:

- What goes in comes out, every byte once and in order.
- Words are used only where every address is a multiple of a word, whatever slot it belongs to. All
  else goes byte by byte, slowly and right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.vocabulary.checksums import place_number
from penstock.vocabulary.planes import Axis

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout, Segment


class Road(NamedTuple):
    """Which blocks of a copy follow each other in host memory."""

    slots: list[int]
    ends: list[int] | None
    """For each block the end of its run; `None` where all of them are one."""
    alone: bool = False
    """Whether no block follows another."""

    @classmethod
    def survey(cls, slots: NDArray[np.int32], *, run_slots: int) -> Road:
        """Looks for slots that follow each other and do not cross a multiple of `run_slots`."""
        found: list[int] = slots.tolist()
        first, last = found[0], found[-1]
        # As a pool gives them while it fills; other ways to find out take several times as long.
        if first // run_slots == last // run_slots and found == list(range(first, last + 1)):
            return cls(found, None)
        begins = np.ones(len(slots) + 1, dtype=bool)
        begins[1:-1] = (slots[1:] - slots[:-1] != 1) | (slots[1:] % run_slots == 0)
        if begins.all():
            return cls(found, list(range(1, len(found) + 1)), alone=True)
        firsts = np.flatnonzero(begins)
        ends: list[int] = np.repeat(firsts[1:], np.diff(firsts)).tolist()
        return cls(found, ends)

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs among some of the blocks: where each begins, and how many blocks it has."""
        if self.ends is None:
            return [(first, end - first)]
        runs: list[tuple[int, int]] = []
        while first < end:
            stop = min(self.ends[first], end)
            runs.append((first, stop - first))
            first = stop
        return runs


COLUMN_COUNT = 8
"""Address, block stride, start in the packed block, number of the chunk, place, cell, group."""
CELL_COLUMN = 5
AXES_MAX = 3
CHUNK_WORDS_MAX = 1024
"""A program's share: 4 KiB, eight words a thread."""
CHUNK_WORDS_MIN = 32
VECTOR_BYTES = 16
WORD_BYTES = 4
_NEAR_BYTES = 1 << 30
"""Offsets inside a block below this are computed in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """How the bytes of a segment lie, from its own start."""

    segment_bytes: int
    run_bytes: int
    axes: tuple[tuple[int, int], ...]
    """Runs along each axis and the bytes between two of them, outermost first."""
    unit: int
    """What is copied at a time: a word, or a byte where words would not be aligned."""
    aligned: bool
    """Whether four words can be copied at a time."""

    @property
    def chunk_words(self) -> int:
        """How many words a program works on: a power of two."""
        words = -(-self.segment_bytes // WORD_BYTES)
        return min(CHUNK_WORDS_MAX, max(CHUNK_WORDS_MIN, 1 << (words - 1).bit_length()))

    @property
    def chunk_count(self) -> int:
        """How many programs share a segment."""
        return -(-self.segment_bytes // (WORD_BYTES * self.chunk_words))

    @property
    def constants(self) -> dict[str, int | bool]:
        """What is compiled into a kernel that follows the strides."""
        (_, s0), (n1, s1), (n2, s2) = ((1, 0),) * (AXES_MAX - len(self.axes)) + self.axes
        reach = sum((count - 1) * stride for count, stride in self.axes)
        return {
            **self.packed_constants,
            "RUN": self.run_bytes // self.unit,
            "N1": n1,
            "N2": n2,
            "S0": s0 // self.unit,
            "S1": s1 // self.unit,
            "S2": s2 // self.unit,
            "WIDE": reach + self.segment_bytes >= _NEAR_BYTES,
        }

    @property
    def packed_constants(self) -> dict[str, int | bool]:
        """What is compiled into a kernel that reads packed bytes alone."""
        return {
            "SEGMENT_BYTES": self.segment_bytes,
            "UNIT": self.unit,
            "ALIGNED": self.aligned,
            "WORDS": self.chunk_words,
        }


class ChunkTable(NamedTuple):
    """All chunks of one block whose segments follow one pattern."""

    pattern: Pattern
    rows: NDArray[np.int64]


def chunk_tables(layout: Layout, addresses: Mapping[int, int], *, pitch: int) -> list[ChunkTable]:
    """The chunks of a block of `layout`."""
    rows: dict[Pattern, list[tuple[int, ...]]] = {}
    for number, cell in enumerate(layout.cells):
        for segment in cell.segments:
            plane = segment.plane
            address = addresses[plane.buffer] + plane.offset
            if plane.has_heads:
                address += segment.local_head * plane.dims[1].stride
            # Of a plane with a single block, the stride means nothing.
            block_stride = plane.block_stride if plane.block_count > 1 else 0
            pattern = _pattern_of(segment, address, block_stride, pitch)
            place = place_number(layer=cell.layer, plane=plane.role, head=cell.head)
            rows.setdefault(pattern, []).extend(
                (address, block_stride, segment.start, chunk, place, number, cell.group, 0)
                for chunk in range(pattern.chunk_count)
            )
    return [
        ChunkTable(pattern, np.array(found, dtype=np.uint64).view(np.int64))
        for pattern, found in rows.items()
    ]


def layer_spans(table: ChunkTable, layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Which rows of a table belong to which layer: number of the layer, first row, rows."""
    layers = np.array([cell.layer for cell in layout.cells])[table.rows[:, CELL_COLUMN]]
    firsts = np.flatnonzero(np.diff(layers, prepend=-1))
    counts = np.diff(firsts, append=len(layers))
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        yield int(layers[first]), first, count


def _pattern_of(segment: Segment, address: int, block_stride: int, pitch: int) -> Pattern:
    plane = segment.plane
    inner = [dim for dim in plane.wide_dims if dim.axis in {Axis.TOKEN, Axis.CHANNEL}]
    run_bytes = plane.dtype.itemsize
    while inner and inner[-1].stride == run_bytes:
        run_bytes *= inner.pop().size
    axes: list[tuple[int, int]] = []
    for dim in inner:
        if axes and axes[-1][1] == dim.size * dim.stride:
            axes[-1] = (axes[-1][0] * dim.size, dim.stride)
        else:
            axes.append((dim.size, dim.stride))
    if len(axes) > AXES_MAX:
        raise ValueError(
            f"plane {plane.role.label} has {len(axes)} token and channel axes with gaps, "
            f"must have at most {AXES_MAX}"
        )
    places = [address, block_stride, pitch, segment.start, run_bytes]
    places += [stride for _, stride in axes]
    return Pattern(
        segment_bytes=segment.length,
        run_bytes=run_bytes,
        axes=tuple(axes),
        unit=WORD_BYTES if all(place % WORD_BYTES == 0 for place in places) else 1,
        aligned=all(place % VECTOR_BYTES == 0 for place in places),
    )
