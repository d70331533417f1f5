"""Where the blocks of a disk tier lie: a digest of each block's identity, its segment and slot.

The index holds no keys. A digest is 64 bits of XXH3; two blocks of one digest are told apart by
the key in the trailer, and the one that is asked for and not there is reported as missing. With a
hundred million blocks that happens to one pair in a folder out of four thousand.

A million blocks take 41 bytes of memory each (`BlockIndex`). Keys and parents stay in the tables
of the segments, and are read again where they are needed (`read_table`).

The one rule: the index names a slot only after its row was written, and a segment begins a new
life only after the index names none of its slots.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.movers.packing import PARTS
from penstock.store.base import key_fields
from penstock.store.disk.format import (
    FILE_MODE,
    ROW,
    ROW_BYTES,
    Geometry,
)
from penstock.store.disk.io import read_all
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import Space
    from penstock.store.disk.io import DiskCalls
    from penstock.vocabulary.keys import Key

PLACE_BITS = 32
NONE = np.uint64(0)
"""The digest of no block; one block in 2⁶⁴ has it, and is not kept."""
EMPTY, DELETED = (1 << 64) - 1, (1 << 64) - 2
"""Places of entries without a block: never taken, and taken by one that was forgotten."""
CAPACITY_MIN = 1 << 12


def digests_of(space: Space, part: bytes, keys: Sequence[Key]) -> list[int]:
    """What the index knows blocks by."""
    before = space.name + space.generation.to_bytes(8, "little") + part
    return [xxh3_64_intdigest(before + key) for key in keys]


class TableScan(NamedTuple):
    """What was read of a table when its folder was taken."""

    digests: NDArray[np.uint64]
    """By slot; 0 where the row is not sound."""
    generations: frozenset[tuple[bytes, int]]
    """Each space and generation that sound rows name."""


@dataclass(slots=True, eq=False)
class DiskSegment:
    """One file, and its life."""

    number: int
    path: str
    """For messages. It is opened by its name in `folder`: the path may lead elsewhere by now."""
    file_bytes: int
    folder: int = -1
    """A descriptor."""
    geometry: Geometry | None = None
    """`None`: it has no head that can be read, and may be filled anew at once."""
    life: int = 0
    age: int = 0
    part: bytes = b""
    form: bytes = b""
    algorithm: bytes = b""
    next_slot: int = 0
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Of the blocks in the index, by slot."""
    live: int = 0
    """How many those are."""
    hits: float = 0.0
    """Recent ones: halved whenever a segment begins a new life."""
    busy: int = 0
    """Reads and writes under way."""
    writes: int = 0
    """Writes whose rows are not written yet."""
    known: bool = True
    """Whether its table was read, or written by this process."""
    dirty: bool = False
    """Whether something was written since its last sync."""
    scan: TableScan | None = None
    """Of a table that recovery has not come to yet."""
    foreign: bool = False
    """Of another key: neither read nor reclaimed."""

    @property
    def slot_count(self) -> int:
        return 0 if self.geometry is None else self.geometry.slot_count

    @property
    def is_full(self) -> bool:
        return self.next_slot >= self.slot_count

    @property
    def coldness(self) -> tuple[float, int]:
        """The least is reclaimed first."""
        return (self.hits, self.age)

    @contextmanager
    def open(self, flags: int, calls: DiskCalls) -> Iterator[int]:
        """A descriptor of the file.

        Raises `OSError`: it cannot be opened, or is a symbolic link.
        """
        fd = calls.open(os.path.basename(self.path), flags, FILE_MODE, self.folder)
        try:
            yield fd
        finally:
            os.close(fd)

    def begin_life(self, geometry: Geometry, *, life: int, age: int, part: bytes) -> None:
        self.geometry, self.life, self.age, self.part = geometry, life, age, part
        self.next_slot, self.live, self.hits, self.known, self.scan = 0, 0, 0.0, True, None
        self.digests = np.zeros(geometry.slot_count, dtype=np.uint64)


class Stretch(NamedTuple):
    """Neighbouring slots of a segment."""

    segment: DiskSegment
    first: int
    slot_count: int


class Place(NamedTuple):
    """Where a block lies."""

    segment: int
    slot: int


class BlockIndex:
    """Digests and places, in a table with open addressing.

    Its owner sees to it that one thread at a time calls it. It is filled by whole columns, since
    a restart fills it with millions of blocks at once. A million take 41 bytes each: 33 here (16 an
    entry, of which a quarter to two thirds are in use), 8 in the segments' `digests`.
    """

    def __init__(self) -> None:
        self._count = 0
        self._used = 0
        """Entries that were taken since the table was made, those of forgotten blocks included."""
        self._allocate(CAPACITY_MIN)

    def _allocate(self, capacity: int) -> None:
        self._mask = np.uint64(capacity - 1)
        self._digests = np.zeros(capacity, dtype=np.uint64)
        self._places = np.full(capacity, EMPTY, dtype=np.uint64)
        # For one block at a time: these give Python's own numbers.
        self._digest_at, self._place_at = self._digests.data, self._places.data
        self._table = self._digests.ctypes.data, self._places.ctypes.data, capacity - 1
        self._count = self._used = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, digest: int) -> bool:
        return self._entry(digest) is not None

    def _entry(self, digest: int) -> int | None:
        mask, places = len(self._places) - 1, self._place_at
        at = digest & mask
        while (place := places[at]) != EMPTY:
            if self._digest_at[at] == digest and place != DELETED:
                return at
            at = at + 1 & mask
        return None

    def find(self, digest: int) -> Place | None:
        at = self._entry(digest)
        if at is None:
            return None
        place = self._place_at[at]
        return Place(place >> PLACE_BITS, place & 0xFFFF_FFFF)

    def add(
        self,
        segment: DiskSegment,
        slots: Sequence[int],
        digests: Sequence[int],
        segments: dict[int, DiskSegment],
    ) -> None:
        """Blocks that were written now: earlier copies are dropped."""
        for digest in digests:
            before = self.find(digest)
            if before is not None:
                self.forget(digest, segments[before.segment], before.slot)
        self.add_recovered(
            segment, np.array(slots, dtype=np.intp), np.array(digests, dtype=np.uint64)
        )

    def add_recovered(
        self, segment: DiskSegment, slots: NDArray[np.intp], digests: NDArray[np.uint64]
    ) -> None:
        """Blocks of a segment that is older than what the index has: that stays.

        Of several blocks with one digest, the last counts: its slot is the highest.
        """
        self.reserve(len(slots))
        places = np.uint64(segment.number << PLACE_BITS) | slots.astype(np.uint64)
        fresh = self._insert(np.ascontiguousarray(digests), places)
        segment.digests[slots[fresh]] = digests[fresh]
        segment.live += int(np.count_nonzero(fresh))

    def _insert(self, digests: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these were not there; they are now. Of equal digests, the last counts."""
        inserted = np.zeros(len(digests), dtype=np.bool_)
        PARTS.insert(
            *(digests.ctypes.data, places.ctypes.data, len(digests)),
            *(*self._table, inserted.ctypes.data),
        )
        added = int(np.count_nonzero(inserted))
        self._count += added
        self._used += added
        return inserted

    def reserve(self, count: int) -> None:
        """Makes room for so many more, if need be by a new table without what was forgotten."""
        if (self._used + count) * 3 <= len(self._places) * 2:
            return
        live = self._places < DELETED
        digests, places = self._digests[live], self._places[live]
        self._allocate(max(CAPACITY_MIN, 1 << (2 * (len(digests) + count) - 1).bit_length()))
        self._insert(digests, places)

    def forget(self, digest: int, segment: DiskSegment, slot: int) -> bool:
        """Drops a block, if it is still there."""
        at = self._entry(digest)
        if at is None or self._place_at[at] != segment.number << PLACE_BITS | slot:
            return False
        self._place_at[at] = DELETED
        self._count -= 1
        segment.digests[slot] = NONE
        segment.live -= 1
        return True

    def drop(self, segment: DiskSegment) -> NDArray[np.intp]:
        """Drops all blocks of a segment; returns the slots that had one."""
        slots = np.flatnonzero(segment.digests)
        digests = segment.digests[slots]
        at = digests & self._mask
        left = np.arange(len(slots))
        while len(left):
            here = at[left]
            same = (self._digests[here] == digests[left]) & (self._places[here] < DELETED)
            self._places[here[same]] = DELETED
            left = left[~same]
            at[left] = at[left] + np.uint64(1) & self._mask
        self._count -= len(slots)
        segment.digests[slots] = NONE
        segment.live = 0
        return slots


def read_table(segment: DiskSegment, calls: DiskCalls) -> NDArray[np.void]:
    """The rows of a segment as they are on the disk; those after the end of the file are zeros.

    Raises `OSError`: they cannot be read.
    """
    with segment.open(os.O_RDONLY, calls) as fd:
        return read_rows(fd, 0, segment.slot_count, calls)


def read_rows(fd: int, first: int, count: int, calls: DiskCalls) -> NDArray[np.void]:
    """Rows of a table from a slot on; those after the end of the file are zeros.

    Raises `OSError`: they cannot be read.
    """
    raw = np.zeros(count * ROW_BYTES, dtype=np.uint8)
    read_all(fd, [raw.data], Geometry.row_offset(first), calls)
    return raw.view(ROW)


def bytes_of(rows: NDArray[np.void], name: str) -> list[bytes]:
    """A field of each row."""
    size = rows.dtype[name].itemsize
    joined = rows[name].tobytes()
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def keys_of(rows: NDArray[np.void]) -> list[Key]:
    return [each[:KEY_BYTES] for each in bytes_of(rows, "key")]


def parents_of(rows: NDArray[np.void]) -> list[Key | None]:
    return [each[:KEY_BYTES] if any(each) else None for each in bytes_of(rows, "parent")]


def check_rows(
    rows: NDArray[np.void], life: int, part: bytes
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Which rows of a table are sound (`sound_rows`), and the digests of those; 0 for others."""
    digests = np.zeros(len(rows), dtype=np.uint64)
    flags = np.zeros(len(rows), dtype=np.uint8)
    PARTS.check_rows(
        *(rows.ctypes.data, len(rows), life, part, flags.ctypes.data, digests.ctypes.data)
    )
    return flags.astype(np.bool_), digests


def make_rows(
    segment: DiskSegment,
    slots: Sequence[int],
    space: Space,
    keys: Sequence[Key],
    parents: Sequence[Key | None],
    trailer_sums: NDArray[np.uint64],
    *,
    now: float,
) -> NDArray[np.void]:
    """Rows without their sums (`seal_rows`)."""
    rows = np.zeros(len(slots), dtype=ROW)
    rows["life"], rows["slot"] = segment.life, slots
    rows["key"], rows["parent"] = key_fields(keys), key_fields(parents)
    rows["space"], rows["generation"] = np.void(space.name), space.generation
    rows["trailer_sum"], rows["written_at"] = trailer_sums, int(now)
    return rows
