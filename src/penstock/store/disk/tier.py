"""The disk tier: blocks in preallocated segments of a folder, found again after any end.

Who does what:

    caller's thread    takes jobs in, looks loads up, reports (`DiskTier`)
    I/O threads        read and write runs of neighbouring slots (`DiskThreads`)
    keeper             gives saves their slots, writes rows, opens and gives up segments
    recovery           finds the blocks of the tables that were there at the start

One lock guards the index and all records; nobody holds it during I/O. A segment counts the
operations under way in it, and begins a new life only when there are none.

A save is reported after its row was written: from then on the block outlives the process. Whether
it outlives a power loss is up to the next sync of its segment; sums find what did not.

The one rule: an arena slot is touched only by a run that its job waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.errors import PenstockError, UnavailableError
from penstock.store.base import EndedJob, GoneBlocks, NewGeneration, Page, SaveJob, Space, TierState
from penstock.store.disk.folder import DiskFolder, Generations
from penstock.store.disk.index import digests_of
from penstock.store.disk.io import DiskCalls, probe_direct
from penstock.store.disk.segments import SegmentPool
from penstock.store.disk.threads import (
    DiskThreads,
    JobBoard,
    LoadInHand,
    RunToRead,
    RunToWrite,
    SaveInHand,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.store.base import LoadJob
    from penstock.store.disk.format import DiskCipher
    from penstock.vocabulary.keys import Key

logger = logging.getLogger(__name__)

THREADS_MIN, THREADS_MAX = 4, 8
QUEUE_BYTES = 1 << 30
"""Of saves in hand: about a second of writing."""
RETRY_S = 1.0
THREADS_END_S = 0.5
"""What `close` keeps of its time for operations that are under way at its deadline."""
_UNREADABLE = BlockFault.UNREADABLE


class DiskTier:
    """A `StoreTier` in a folder. `close` it, or its threads stay."""

    def __init__(
        self,
        folder: Path,
        size_bytes: int,
        *,
        threads: int = 6,
        queue_bytes: int = QUEUE_BYTES,
        cipher: DiskCipher | None = None,
        ignore_other_versions: bool = False,
        direct: bool = True,
        retry_s: float = RETRY_S,
        calls: DiskCalls | None = None,
        stepped: bool = False,
    ) -> None:
        """Takes the folder, reads the tables that are there, and begins to find their blocks.

        Raises `ConfigError`: a segment is of another version; `UnavailableError`: the folder cannot
        be used, or another process does; `ValueError`: a number is out of range.
        """
        _require_numbers(threads, size_bytes, queue_bytes)
        self._size_bytes = size_bytes
        self._queue_bytes = queue_bytes
        self._cipher = cipher
        self._ignore_other_versions = ignore_other_versions
        self._wants_direct = direct
        self._calls = calls or DiskCalls()
        self._lock = threading.Lock()
        self._folder = DiskFolder(folder, self._calls)
        self._generations = Generations(self._folder)
        self._board = JobBoard(
            *(self._folder, self._take_folder_first()),
            lock=self._lock,
            retry_s=retry_s,
            clock=self._calls.clock,
        )
        self._threads = DiskThreads(
            self._board,
            count=threads,
            take_folder=self._take_folder,
            cipher=cipher,
            calls=self._calls,
        )
        if not stepped:
            self._threads.start()

    def _take_folder_first(self) -> SegmentPool:
        try:
            return self._take_folder()
        except OSError as error:
            self._folder.close()
            raise UnavailableError(
                f"folder {self._folder.path} cannot be used: {error.strerror}"
            ) from error
        except PenstockError:
            self._folder.close()
            raise

    def _take_folder(self) -> SegmentPool:
        """Reads the heads of what is there; at the start, and if the folder was exchanged."""
        direct = self._wants_direct and probe_direct(self._folder.fd, self._calls)
        if self._wants_direct and not direct:
            logger.warning(
                "folder %s has no direct I/O: reads and writes go through the page cache, which is "
                "slower",
                self._folder.path,
            )
        pool = SegmentPool(
            self._folder,
            self._size_bytes,
            generations=self._generations,
            lock=self._lock,
            cipher=self._cipher,
            calls=self._calls,
            flags=os.O_DIRECT if direct else 0,
            ignore_other_versions=self._ignore_other_versions,
        )
        if pool.foreign_count:
            logger.warning(
                "%d segments of folder %s are of another encryption key: they are neither read "
                "nor reclaimed",
                *(pool.foreign_count, self._folder.path),
            )
        return pool

    def close(self, *, deadline: float) -> None:
        board = self._board
        with board.lock:
            if board.closing:
                return
            board.closing = True
            if not self._wait_until_idle(deadline - THREADS_END_S):
                board.drop_reads(list(board.reads))
                board.drop_writes([each for each in board.writes if isinstance(each, RunToWrite)])
                for save in [each for each in board.saves.values() if not each.planned]:
                    save.faults = dict.fromkeys(range(len(save.digests)), _UNREADABLE)
                    board.end_save(save)
            board.stopped = True
            board.io_ready.notify_all()
            board.read_ready.notify_all()
            board.keeper_ready.notify_all()
        if not self._threads.join(deadline=deadline):
            logger.warning("the disk tier in %s was closed during I/O", self._folder.path)
        for segment in list(board.pool.segments.values()):
            if segment.dirty and time.monotonic() < deadline:
                self._threads.sync(segment)
        with suppress(OSError):
            # An older copy may have been put in its place meanwhile.
            self._generations.save()
        with board.lock:
            board.closed = True
        os.close(board.event)
        self._folder.close()

    def _wait_until_idle(self, deadline: float) -> bool:
        board = self._board
        return board.idle.wait_for(
            lambda: not board.saves and not board.loads, max(0.0, deadline - time.monotonic())
        )

    @property
    def descriptor(self) -> int:
        return self._board.event

    # Taking jobs in

    def save(self, job: SaveJob) -> None:
        count = len(job.keys)
        digests = digests_of(job.space, job.arena.part, job.keys)
        nbytes = count * job.arena.host.slot_bytes
        with self._board.lock:
            self._require_open(job.ticket)
            if self._board.off:
                self._board.report(
                    job.ticket, dict.fromkeys(range(count), _UNREADABLE), self._board.off
                )
            elif all(digest in self._board.pool.index for digest in digests):
                self._board.report(job.ticket, {})
            elif (
                self._board.in_hand_bytes and self._board.in_hand_bytes + nbytes > self._queue_bytes
            ):
                self._board.saves_dropped += count
                self._board.report(job.ticket, dict.fromkeys(range(count), _UNREADABLE))
            else:
                save = SaveInHand(job, digests, nbytes)
                self._board.saves[job.ticket] = save
                self._board.in_hand_bytes += nbytes
                self._board.tell_keeper(save)

    def load(self, job: LoadJob) -> None:
        digests = digests_of(job.space, job.arena.part, job.keys)
        with self._board.lock:
            self._require_open(job.ticket)
            load = LoadInHand(job, digests)
            if self._board.reads_off:
                everything = dict.fromkeys(range(len(digests)), _UNREADABLE)
                self._board.report(job.ticket, everything, self._board.off)
                return
            places = []
            for position, digest in enumerate(digests):
                place = self._board.pool.index.find(digest)
                if place is None:
                    load.faults[position] = BlockFault.MISSING
                else:
                    places.append((*place, position))
            if not places:
                self._board.report(job.ticket, load.faults)
                return
            self._board.loads[job.ticket] = load
            for read in self._reads_of(load, sorted(places)):
                read.segment.hits += len(read.positions)
                load.left += 1
                self._board.queue_read(read)

    def _reads_of(self, load: LoadInHand, places: list[tuple[int, int, int]]) -> list[RunToRead]:
        """Reads of neighbouring slots, as many as keep all threads busy."""
        segments = self._board.pool.segments
        step = self._board.run_slots(segments[places[0][0]], len(places))
        reads = []
        # Neighbours are as far from their position in the sorted list as each other.
        for (number, _), group in groupby(
            enumerate(places), key=lambda each: (each[1][0], each[1][1] - each[0])
        ):
            run = [place for _, place in group]
            for start in range(0, len(run), step):
                chunk = run[start : start + step]
                positions = [position for _, _, position in chunk]
                reads.append(RunToRead(load, segments[number], chunk[0][1], positions))
        return reads

    def cancel(self, ticket: int) -> None:
        with self._board.lock:
            load, save = self._board.loads.get(ticket), self._board.saves.get(ticket)
            if load is not None:
                load.cancelled = True
                self._board.drop_reads([read for read in self._board.reads if read.load is load])
            elif save is not None and not save.planned:
                save.faults = dict.fromkeys(range(len(save.digests)), _UNREADABLE)
                self._board.end_save(save)
            elif save is not None:
                queued = [each for each in self._board.writes if isinstance(each, RunToWrite)]
                self._board.drop_writes([write for write in queued if write.save is save])

    def _require_open(self, ticket: int) -> None:
        if self._board.closing:
            raise ValueError("the disk tier is closed")
        if ticket in self._board.saves or ticket in self._board.loads:
            raise ValueError(f"ticket is {ticket}, which is in hand already")

    # Answers

    def collect(self) -> list[EndedJob]:
        with self._board.lock:
            ended, self._board.ended = self._board.ended, []
            self._board.settle_event()
        return ended

    def take_gone(self) -> list[GoneBlocks]:
        with self._board.lock:
            gone = self._board.pool.take_gone()
            self._board.settle_event()
        return gone

    def find(self, space: Space, part: bytes, keys: Sequence[Key]) -> list[bool]:
        digests = digests_of(space, part, keys)
        with self._board.lock:
            if self._board.reads_off:
                return [False] * len(keys)
            return [digest in self._board.pool.index for digest in digests]

    def page(self, space: Space, part: bytes, cursor: int | None, limit: int) -> Page:
        try:
            return self._board.pool.page(space, part, cursor, limit)
        except OSError as error:
            with self._board.lock:
                self._board.fail_read(error)
            return Page([], [], None)

    def generation(self, name: bytes) -> int:
        """The generation of a space that counts now; a space that is new here begins one."""
        try:
            return self._generations.of(name)
        except OSError as error:
            # No row names it before it was written: the tier is off, and tries again.
            self._switch_off_generations(error)
            return self._generations.of(name)

    def void(self, name: bytes) -> int:
        try:
            return self._generations.begin(name)
        except OSError as error:
            raise UnavailableError(self._switch_off_generations(error)) from error

    def _switch_off_generations(self, error: OSError) -> str:
        why = f"generations cannot be written: {error.strerror}"
        with self._board.lock:
            self._board.switch_off(why, error)
        return why

    def expect(self, name: bytes, generation: int) -> None:
        """An engine knows of this generation of a space: none of before it counts again.

        The folder may be an older copy of what that engine used, with nothing in it to show it.
        """
        try:
            self._generations.expect(name, generation)
        except OSError as error:
            self._switch_off_generations(error)
        with self._board.lock:
            self._board.signal()

    def take_generations(self) -> list[NewGeneration]:
        return [NewGeneration(*changed) for changed in self._generations.take_changed()]

    def state(self) -> TierState:
        with self._board.lock:
            self._board.state_changed = False
            self._board.settle_event()
            pool = self._board.pool
            return TierState(
                on=not self._board.off,
                why=self._board.off,
                recovered=pool.rows_known / pool.rows_found if pool.rows_found else 1.0,
                blocks=len(pool.index),
                block_bytes=pool.block_bytes,
                capacity_bytes=min(pool.size_bytes, pool.room_bytes),
                saves_dropped=self._board.saves_dropped,
                blocks_corrupt=self._board.blocks_corrupt,
                blocks_reclaimed=pool.reclaimed,
                generations_lost=self._generations.times_lost,
            )


def _require_numbers(threads: int, size_bytes: int, queue_bytes: int) -> None:
    if not THREADS_MIN <= threads <= THREADS_MAX:
        raise ValueError(f"threads is {threads}, must be from {THREADS_MIN} to {THREADS_MAX}")
    for name, value in (("size_bytes", size_bytes), ("queue_bytes", queue_bytes)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
