"""Where the blocks of a disk tier lie: a digest of each block's identity, its segment and slot.

The index holds no keys. A digest is 64 bits of XXH3; two blocks of one digest are told apart by
the key in the trailer, and the one that is asked for and not there is reported as missing. With a
hundred million blocks that happens to one pair in a folder out of four thousand.

Memory: see `BlockIndex`. Keys and parents stay in the tables of the segments, and are read again
where they are needed (`read_table`).

The one rule: the index names a slot only after its row was written, and a segment begins a new
life only after the index names none of its slots.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.movers.packing import PartsLibrary, load_parts_library
from penstock.store.disk_format import (
    FILE_MODE,
    PAGE_BYTES,
    ROW,
    ROW_BYTES,
    Geometry,
    seal_rows,
    sound_rows,
)
from penstock.store.disk_io import key_fields, read_all
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import Space
    from penstock.store.disk_io import DiskCalls
    from penstock.vocabulary.ids import Key

PLACE_BITS = 32
NONE = np.uint64(0)
"""The digest of no block; one block in 2⁶⁴ has it, and is not kept."""


def digests_of(space: Space, part: bytes, keys: Sequence[Key]) -> list[int]:
    """What the index knows blocks by."""
    before = space.name + space.generation.to_bytes(8, "little") + part
    return [xxh3_64_intdigest(before + key) for key in keys]


@dataclass(slots=True, eq=False)
class DiskSegment:
    """One file, and its life."""

    number: int
    path: str
    file_bytes: int
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
    known: bool = True
    """Whether its table was read, or written by this process."""
    dirty: bool = False
    """Whether something was written since its last sync."""
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

    def begin_life(self, geometry: Geometry, *, life: int, age: int, part: bytes) -> None:
        self.geometry, self.life, self.age, self.part = geometry, life, age, part
        self.next_slot, self.live, self.hits, self.known = 0, 0, 0.0, True
        self.digests = np.zeros(geometry.slot_count, dtype=np.uint64)


class Place(NamedTuple):
    """Where a block lies."""

    segment: int
    slot: int


class BlockIndex:
    """Digests and places. Its owner sees to it that one thread at a time calls it.

    A million blocks take 118 bytes each: 110 in the dictionary, 8 in the segments' `digests`.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: int) -> bool:
        return digest in self._places

    def find(self, digest: int) -> Place | None:
        place = self._places.get(digest)
        return None if place is None else Place(place >> PLACE_BITS, place & 0xFFFF_FFFF)

    def add(
        self,
        segment: DiskSegment,
        slots: Sequence[int],
        digests: Sequence[int],
        segments: dict[int, DiskSegment],
    ) -> None:
        """Blocks that were written now: earlier copies are dropped."""
        for slot, digest in zip(slots, digests, strict=True):
            before = self.find(digest)
            if before is not None:
                self.forget(digest, segments[before.segment], before.slot)
            self._places[digest] = segment.number << PLACE_BITS | slot
            segment.digests[slot] = digest
        segment.live += len(slots)

    def add_recovered(
        self, segment: DiskSegment, slots: NDArray[np.intp], digests: NDArray[np.uint64]
    ) -> None:
        """Blocks of a segment that is older than what the index has: that stays."""
        first = segment.number << PLACE_BITS
        places = self._places
        # The last row of a digest is the newest.
        found = dict(zip(digests.tolist(), slots.tolist(), strict=True))
        fresh = {digest: first | slot for digest, slot in found.items() if digest not in places}
        places.update(fresh)
        kept = np.fromiter((place - first for place in fresh.values()), np.intp, len(fresh))
        segment.digests[kept] = np.fromiter(fresh, np.uint64, len(fresh))
        segment.live += len(fresh)

    def forget(self, digest: int, segment: DiskSegment, slot: int) -> bool:
        """Drops a block, if it is still there."""
        if self._places.get(digest) != segment.number << PLACE_BITS | slot:
            return False
        del self._places[digest]
        segment.digests[slot] = NONE
        segment.live -= 1
        return True

    def drop(self, segment: DiskSegment) -> NDArray[np.intp]:
        """Drops all blocks of a segment; returns the slots that had one."""
        slots = np.flatnonzero(segment.digests)
        for digest in segment.digests[slots].tolist():
            del self._places[digest]
        segment.digests[slots] = NONE
        segment.live = 0
        return slots


def read_table(segment: DiskSegment, calls: DiskCalls) -> NDArray[np.void]:
    """The rows of a segment as they are on the disk; those after the end of the file are zeros.

    Raises:
        OSError: they cannot be read.
    """
    raw = np.zeros(segment.slot_count * ROW_BYTES, dtype=np.uint8)
    fd = calls.open(segment.path, os.O_RDONLY, FILE_MODE)
    try:
        read_all(fd, [raw.data], PAGE_BYTES, calls)
    finally:
        os.close(fd)
    return raw.view(ROW)


def check_rows(
    rows: NDArray[np.void],
    life: int,
    part: bytes,
    *,
    library: Callable[[], PartsLibrary | None] = load_parts_library,
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Which rows of a table are sound (`sound_rows`), and the digests of those; 0 for others."""
    digests = np.zeros(len(rows), dtype=np.uint64)
    loaded = library()
    if loaded is not None:
        flags = np.zeros(len(rows), dtype=np.uint8)
        loaded.check_rows(
            *(rows.ctypes.data, len(rows), life, part, flags.ctypes.data, digests.ctypes.data)
        )
        return flags.astype(np.bool_), digests
    sound = sound_rows(rows, life)
    digests[sound] = [
        xxh3_64_intdigest(
            row["space"].tobytes()
            + row["generation"].tobytes()
            + part
            + row["key"].tobytes()[:KEY_BYTES]
        )
        for row in rows[sound]
    ]
    return sound, digests


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
    rows = np.zeros(len(slots), dtype=ROW)
    rows["life"], rows["slot"] = segment.life, slots
    rows["key"], rows["parent"] = key_fields(keys), key_fields(parents)
    rows["space"], rows["generation"] = np.void(space.name), space.generation
    rows["trailer_sum"], rows["written_at"] = trailer_sums, int(now)
    return seal_rows(rows)
