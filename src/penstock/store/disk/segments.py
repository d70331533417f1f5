"""The segments of a folder and the blocks in them: filled, found, read again, given up.

Three threads use it: the one that looks blocks up, the keeper, which alone fills and reclaims
segments, and recovery. `lock` guards index and records; methods that do I/O take it themselves
and do not hold it meanwhile, the others want it held.

Room is made by giving up the segment with the fewest recent hits, the oldest of them first. One
that is being filled, has an operation under way, or is of another key is never given up.

The one rule: the index names no slot of a segment from before its new life is written until its
slots were filled again.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError
from penstock.store.base import GoneBlocks, Page, Space
from penstock.store.disk.folder import write_head
from penstock.store.disk.format import (
    PAGE_BYTES,
    SEGMENT_BYTES,
    Geometry,
    write_form,
)
from penstock.store.disk.index import (
    BlockIndex,
    DiskSegment,
    Stretch,
    bytes_of,
    check_rows,
    keys_of,
    parents_of,
    read_table,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.store.base import MappedArena
    from penstock.store.disk.folder import DiskFolder, Generations
    from penstock.store.disk.format import DiskCipher
    from penstock.store.disk.io import DiskCalls
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.keys import Key

logger = logging.getLogger(__name__)

SEGMENTS_MIN = 8
"""In a folder, so that giving one up does not cost half of it."""
SEGMENTS_LEAST = 2
"""With fewer, each save would give up the only one."""
FREE_SHARE = 64
"""One of so many bytes of the file system stays free, for its own tables and for small files."""
PAGE_TABLES_MAX = 64
"""How many tables one call of `page` reads at most."""
CURSOR_BITS = 32


class NoRoomError(Exception):
    """Every segment is in use now."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What the blocks of an arena have in common, so that they can share a segment."""

    part: bytes
    form: bytes
    algorithm: bytes
    block_bytes: int
    cell_count: int

    @classmethod
    def of(cls, arena: MappedArena) -> BlockKind:
        return cls(
            arena.part,
            arena.form.fingerprint,
            arena.form.checksum.value.encode(),
            arena.span.length,
            len(arena.span.cells),
        )

    @property
    def least_bytes(self) -> int:
        """Of a segment with one of them."""
        return Geometry.least_bytes(block_bytes=self.block_bytes, cell_count=self.cell_count)


class SegmentPool:
    """All segments of a folder, and the index of their blocks."""

    def __init__(
        self,
        folder: DiskFolder,
        size_bytes: int,
        *,
        generations: Generations,
        lock: threading.Lock,
        cipher: DiskCipher | None,
        calls: DiskCalls,
        flags: int,
        ignore_other_versions: bool,
    ) -> None:
        self.flags = flags
        """With which files are opened for blocks: `O_DIRECT` where there is direct I/O."""
        self._folder = folder
        self._folder_fd = folder.fd
        self.size_bytes = size_bytes
        """What segments are to take at most."""
        self.room_bytes = size_bytes
        """What segments may take: less than was wanted where the file system has less."""
        self._refused_at = size_bytes
        """So many bytes were taken when the file system refused more, if it did."""
        self._is_told = False
        """Whether the log says that the file system has less."""
        self._lock = lock
        self._cipher = cipher
        self._calls = calls
        found, self._numbers_taken = folder.find_segments(
            cipher, ignore_other_versions=ignore_other_versions
        )
        self.index = BlockIndex()
        self.segments = {each.number: each for each in found}
        self.generations = generations
        generations.take(found, calls)
        self.reclaimed = 0
        self.rows_found = self.rows_known = 0
        """Slots of the segments that were there at the start, and of those that were read."""
        self._open: dict[BlockKind, DiskSegment] = {}
        self._gone: list[GoneBlocks] = []
        self._cold: set[int] = set()
        self._age = max((each.age for each in found), default=0)
        self._unread = sorted(
            (each for each in found if not each.known and not each.foreign),
            key=lambda each: each.age,
        )
        self.rows_found = sum(each.slot_count for each in self._unread)
        self.index.reserve(self.rows_found)

    def is_in_place(self) -> bool:
        """Whether a restart would find these segments: the path still leads to their folder.

        It does not between the locking of a folder that came in its place and the reading, which
        may fail and be tried again.
        """
        return self._folder.fd == self._folder_fd and self._folder.is_ours()

    # With the lock held

    @property
    def foreign_count(self) -> int:
        return sum(each.foreign for each in self.segments.values())

    @property
    def block_bytes(self) -> int:
        return sum(
            each.live * each.geometry.block_bytes
            for each in self.segments.values()
            if each.geometry is not None
        )

    @property
    def opened(self) -> list[DiskSegment]:
        return list(self._open.values())

    @property
    def file_bytes(self) -> int:
        """What all segments take."""
        return sum(each.file_bytes for each in self.segments.values())

    def take_gone(self) -> list[GoneBlocks]:
        gone, self._gone = self._gone, []
        return gone

    def has_gone(self) -> bool:
        return bool(self._gone)

    def is_cold(self, segment: DiskSegment) -> bool:
        """Whether it is in the half that is given up next. While there is room, none is."""
        return segment.number in self._cold

    def _remove(self, segment: DiskSegment) -> None:
        """Removes a segment that was given up, and its file."""
        with self._lock:
            del self.segments[segment.number]
        with suppress(FileNotFoundError):  # Somebody else removed it.
            self._folder.remove(segment)

    # Filling; by the keeper alone

    def take_slots(self, arena: MappedArena, count: int) -> list[Stretch]:
        """Slots for new blocks. Each stretch counts as one operation under way.

        Raises `ConfigError`: the folder is too small for such blocks; `NoRoomError`: no segment can
        be given up now; what could be had is in the error; `OSError`: a segment could not be begun.
        """
        kind = BlockKind.of(arena)
        stretches: list[Stretch] = []
        try:
            while count:
                segment = self._open.get(kind)
                if segment is None or segment.is_full:
                    segment = self._open_segment(kind, arena.form)
                with self._lock:
                    taken = min(count, segment.slot_count - segment.next_slot)
                    stretches.append(Stretch(segment, segment.next_slot, taken))
                    segment.next_slot += taken
                    segment.busy += 1
                count -= taken
        except (ConfigError, NoRoomError, OSError):
            self.give_back(stretches)
            raise
        return stretches

    def give_back(self, stretches: Sequence[Stretch]) -> None:
        """Slots that will not be written; they stay empty until the segment's next life."""
        with self._lock:
            for stretch in stretches:
                stretch.segment.busy -= 1

    def _open_segment(self, kind: BlockKind, form: Form) -> DiskSegment:
        size = self._segment_bytes(kind)
        segment = self._resumable(kind)
        if segment is None:
            segment = self._make_room(size, kind)
            geometry = Geometry(
                segment_bytes=segment.file_bytes,
                block_bytes=kind.block_bytes,
                cell_count=kind.cell_count,
            )
            self._age += 1
            with self._lock:
                life = secrets.randbits(64) | 1  # Never that of a file full of zeros.
                segment.begin_life(geometry, life=life, age=self._age, part=kind.part)
                segment.form, segment.algorithm = kind.form, kind.algorithm
            try:
                self._begin(segment, form)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._shrink():
                    raise
                return self._open_segment(kind, form)
        with self._lock:
            if self.segments.get(segment.number) is not segment:
                raise OSError(errno.ESTALE, "somebody else removed it")
            self._open[kind] = segment
            self._cool()
        return segment

    def _begin(self, segment: DiskSegment, form: Form) -> None:
        try:
            self._write_form(form)
            write_head(segment, self._cipher, self._calls)
            self._folder.sync()
        except OSError:
            with self._lock:
                del self.segments[segment.number]
            # Half of it may be there; what cannot be removed has no head and is taken next time.
            with suppress(OSError):
                self._folder.remove(segment)
            raise

    def _write_form(self, form: Form) -> None:
        """Only those who look inside need it: blocks are found and verified without."""
        try:
            write_form(self._folder.fd, form)
        except OSError as error:
            name = form.fingerprint.hex()
            logger.warning("form %s cannot be written: %s", name, error.strerror)

    def _shrink(self) -> bool:
        """The file system is full: from now on the room of the segments that are there is used.

        Returns:
            Whether there are enough: with fewer than two, each save would give up the last one.
        """
        with self._lock:
            total = self.file_bytes
            idle = self._coldest() is not None
            if not idle or len(self.segments) < SEGMENTS_LEAST or total >= self.room_bytes:
                return False
            self.room_bytes = self._refused_at = total
        logger.warning(
            "the file system of %s is full: %d bytes are used for now, not %d",
            *(self._folder.path, total, self.size_bytes),
        )
        return True

    def _segment_bytes(self, kind: BlockKind) -> int:
        """Of a new segment.

        Raises `ConfigError`: the folder is too small for such blocks; `OSError`: the file system
        is.
        """
        least = kind.least_bytes
        if SEGMENTS_LEAST * least > self.size_bytes:
            raise ConfigError(
                "gib",
                f"gives the folder {self.size_bytes} bytes, must be at least "
                f"{SEGMENTS_LEAST * least} for two segments with a block of {kind.block_bytes} "
                "bytes each",
            )
        self._fit_file_system()
        if SEGMENTS_LEAST * least > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.room_bytes == self.size_bytes:
            wanted = min(SEGMENT_BYTES, self.size_bytes // SEGMENTS_MIN)
        else:
            # What is free varies a little all the time, and files of one size can be used again.
            wanted = min(SEGMENT_BYTES, 1 << (self.room_bytes // SEGMENTS_MIN).bit_length() - 1)
        return max(wanted - wanted % PAGE_BYTES, least)

    def _fit_file_system(self) -> None:
        """Uses what the file system has, where that is less than the folder may take."""
        try:
            found = self._calls.statvfs(self._folder.fd)
        except OSError:
            return  # Writing will tell.
        free = found.f_bavail * found.f_frsize
        with self._lock:
            total = self.file_bytes + free
            fits = total - total // FREE_SHARE
            before, wanted = self.room_bytes, min(self.size_bytes, self._refused_at)
            # It gives up no segment for others who fill the file system: that is for `_shrink`.
            self.room_bytes = min(wanted, max(fits, self.file_bytes))
            shrunk = self.room_bytes < min(before, self.size_bytes)
        if shrunk and not self._is_told:
            self._is_told = True
            logger.warning(
                "the file system of %s has room for %d bytes: the tier uses so much, not %d",
                *(self._folder.path, self.room_bytes, self.size_bytes),
            )
        elif self.room_bytes == self.size_bytes:
            self._is_told = False

    def _resumable(self, kind: BlockKind) -> DiskSegment | None:
        """A segment that an earlier process did not fill; what it has no rows for is free."""
        with self._lock:
            opened = set(self._open.values())
            for each in sorted(self.segments.values(), key=lambda each: -each.age):
                if each.foreign or not each.known or each.geometry is None or each in opened:
                    continue
                found = BlockKind(
                    each.part,
                    each.form,
                    each.algorithm,
                    each.geometry.block_bytes,
                    each.geometry.cell_count,
                )
                if found == kind and not each.is_full:
                    return each
        return None

    def _make_room(self, size: int, kind: BlockKind) -> DiskSegment:
        """A file for a new segment of `size` bytes: one that was given up, or a new one."""
        least = kind.least_bytes
        while True:
            with self._lock:
                if self.file_bytes + size <= self.room_bytes:
                    taken = self.segments.keys() | self._numbers_taken
                    number = next(n for n in range(len(taken) + 1) if n not in taken)
                    segment = self._folder.segment(number, size)
                    self.segments[number] = segment
                    return segment
                victim = self._coldest()
                if victim is None:
                    # If it is less than it may be, the file system may have room by now.
                    self._refused_at = self.size_bytes
                    raise NoRoomError
            if not self._give_up(victim):
                continue
            with self._lock:
                # Where room is short, a file that is there is used as it is: another one may find
                # no room any more.
                is_short = self.room_bytes < self.size_bytes and victim.file_bytes >= least
                is_right = victim.file_bytes == size or (
                    is_short and len(self.segments) >= SEGMENTS_LEAST
                )
                if is_right and self.file_bytes <= self.room_bytes:
                    return victim
            self._remove(victim)

    def _give_up(self, victim: DiskSegment) -> bool:
        """Drops the blocks of a segment and reports them, those not recovered yet as well.

        Returns:
            Whether it did: not if a read began meanwhile.
        """
        with suppress(OSError):  # Blocks in a table that cannot be read are not in the index.
            self.recover(victim)
        with self._lock:
            if self.segments.get(victim.number) is not victim:
                return False
            if victim.busy:
                return False
            self._open = {kind: each for kind, each in self._open.items() if each is not victim}
            life, dropped = victim.life, self.index.drop(victim)
            victim.life, victim.next_slot = 0, victim.slot_count
            self.reclaimed += len(dropped)
        self._report_gone(victim, life, dropped)
        return True

    def _coldest(self) -> DiskSegment | None:
        idle = [each for each in self.segments.values() if not each.busy and not each.foreign]
        opened = set(self._open.values())
        closed = [each for each in idle if each not in opened or each.is_full]
        if closed:
            return min(closed, key=lambda each: each.coldness)
        # More kinds of blocks than segments: the one that was begun first makes way.
        return min(idle, key=lambda each: each.age, default=None)

    def _cool(self) -> None:
        """Forgets half of the hits; says which segments are the colder half, if all are in use."""
        segments = [each for each in self.segments.values() if not each.foreign]
        for each in segments:
            each.hits /= 2
        newest = max(each.file_bytes for each in segments)
        self._cold = set()
        if self.file_bytes + newest > self.room_bytes:
            ranked = sorted(segments, key=lambda each: each.coldness)
            self._cold = {each.number for each in islice(ranked, len(ranked) // 2)}

    def _report_gone(self, victim: DiskSegment, life: int, dropped: NDArray[np.intp]) -> None:
        if not len(dropped):
            return
        try:
            rows = read_table(victim, self._calls)
        except OSError as error:
            # Engines find out when they ask for the blocks.
            logger.warning("the rows of %s cannot be read: %s", victim.path, error.strerror)
            return
        sound, _ = check_rows(rows, life, victim.part)
        rows = rows[dropped[sound[dropped]]]
        by_space: dict[Space, list[Key]] = {}
        names, generations = bytes_of(rows, "space"), rows["generation"].tolist()
        for name, generation, key in zip(names, generations, keys_of(rows), strict=True):
            by_space.setdefault(Space(name, generation), []).append(key)
        with self._lock:
            self._gone += [GoneBlocks(space, victim.part, keys) for space, keys in by_space.items()]

    # Reading tables

    def recover_next(self) -> bool:
        """Takes the newest table that was not taken yet; whether there was one.

        Raises `OSError`: it cannot be read; its blocks are not found.
        """
        with self._lock:
            if not self._unread:
                return False
            segment = self._unread.pop()
        self.recover(segment)
        return True

    def recover(self, segment: DiskSegment) -> None:
        """Puts the blocks of a segment into the index, but for those that it has.

        Raises `OSError`: its table cannot be read.
        """
        with self._lock:
            life = segment.life
            if segment.known:
                return
        try:
            slots, digests, written = self._read_live(segment, life)
        except OSError:
            with self._lock:
                self._mark_known(segment)
            if self.forget_if_removed(segment):
                return
            raise
        with self._lock:
            # Meanwhile it may have begun a new life, or `page` may have read it.
            if segment.life != life or not self._mark_known(segment):
                return
            self.index.add_recovered(segment, slots, digests)
            segment.next_slot = int(written[-1]) + 1 if len(written) else 0

    def _read_live(
        self, segment: DiskSegment, life: int
    ) -> tuple[NDArray[np.intp], NDArray[np.uint64], NDArray[np.intp]]:
        """Slots with blocks that count, their digests, and all slots that were written."""
        scan, segment.scan = segment.scan, None
        if scan is not None:
            written = np.flatnonzero(scan.digests)
            count = sum(self.generations.current(name) == each for name, each in scan.generations)
            if count in (0, len(scan.generations)):
                slots = written if count else written[:0]
                return slots, scan.digests[slots], written
        rows = read_table(segment, self._calls)
        sound, digests = check_rows(rows, life, segment.part)
        slots = np.flatnonzero(sound & self._are_current(rows))
        return slots, digests[slots], np.flatnonzero(sound)

    def forget_if_removed(self, segment: DiskSegment) -> bool:
        """Whether a file cannot be used because it is not there, which concerns its blocks alone.

        It was given up since somebody began to use it, or somebody else has removed it or put
        something else in its place. If the whole folder is gone, that is another matter.
        """
        if not self.is_in_place():
            return False
        is_there = self._folder.has_file(segment)
        with self._lock:
            if self.segments.get(segment.number) is not segment:
                return True
            if is_there:
                return False
            self._numbers_taken.add(segment.number)
            del self.segments[segment.number]
            self._open = {kind: each for kind, each in self._open.items() if each is not segment}
            count = len(self.index.drop(segment))
        logger.warning(
            "%s was removed or replaced by somebody else: its %d blocks are forgotten",
            *(segment.path, count),
        )
        return True

    def _mark_known(self, segment: DiskSegment) -> bool:
        """Whether it was not known before."""
        was_known, segment.known = segment.known, True
        if not was_known:
            self.rows_known += segment.slot_count
        return not was_known

    def _are_current(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which rows are of the generation that counts for their space."""
        current = np.zeros(len(rows), dtype=np.bool_)
        halves = np.ascontiguousarray(rows["space"]).view(np.uint64).reshape(-1, 2)
        left = np.ones(len(rows), dtype=np.bool_)
        while left.any():
            first = int(left.argmax())
            mine = left & (halves == halves[first]).all(axis=1)
            generation = self.generations.current(rows["space"][first].tobytes())
            if generation is not None:
                current |= mine & (rows["generation"] == np.uint64(generation))
            left &= ~mine
        return current

    def page(self, space: Space, part: bytes, cursor: int | None, limit: int) -> Page:
        """See `StoreTier.page`. A table that recovery has not read yet is read now.

        Raises `OSError`: a table cannot be read.
        """
        keys: list[Key] = []
        parents: list[Key | None] = []
        age_max, slot_end = (1 << 62, 0) if cursor is None else divmod(cursor, 1 << CURSOR_BITS)
        with self._lock:
            mine = [
                each
                for each in self.segments.values()
                if each.part == part
                and each.age <= age_max
                and each.life
                and not each.foreign
                # One that was begun just now may have no file yet, which is no sign of anything.
                and (each.live or not each.known)
            ]
        mine.sort(key=lambda each: -each.age)
        for tables, segment in enumerate(mine):
            if tables == PAGE_TABLES_MAX or len(keys) == limit:
                return Page(keys, parents, segment.age << CURSOR_BITS | segment.slot_count)
            end = slot_end if segment.age == age_max else segment.slot_count
            try:
                self.recover(segment)
                rows, slots = self._live_rows(segment, space, end)
            except OSError:
                if self.forget_if_removed(segment):
                    continue
                raise
            taken = slots[::-1][: limit - len(keys)]
            keys += keys_of(rows[taken])
            parents += parents_of(rows[taken])
            if len(taken) < len(slots):
                return Page(keys, parents, segment.age << CURSOR_BITS | int(taken[-1]))
        return Page(keys, parents, None)

    def _live_rows(
        self, segment: DiskSegment, space: Space, end: int
    ) -> tuple[NDArray[np.void], NDArray[np.intp]]:
        """The table of a segment, and the slots before `end` that have blocks of a space."""
        rows = read_table(segment, self._calls)
        sound, digests = check_rows(rows, segment.life, segment.part)
        wanted = sound & (rows["space"] == np.void(space.name))
        wanted &= rows["generation"] == np.uint64(space.generation)
        wanted[end:] = False
        with self._lock:
            if len(segment.digests) != len(digests):
                return rows, np.zeros(0, dtype=np.intp)
            return rows, np.flatnonzero(wanted & (segment.digests == digests))
