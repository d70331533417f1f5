"""The disk tier: blocks in preallocated segments of a folder, found again after any end.

Who does what:

    caller's thread    takes jobs in, looks loads up, reports (`DiskTier`)
    I/O threads        read and write runs of neighbouring slots (`DiskThreads`)
    keeper             gives saves their slots, writes rows, opens and gives up segments
    recovery           finds the blocks of the tables that were there at the start

The lock of the tier guards the index as well. A segment counts the operations under way in it, and
begins a new life only when there are none.

A save is reported after its row was written: from then on the block outlives the process. Whether
it outlives a power loss is up to the next sync of its segment; sums find what did not.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.operations import BlockFault
from penstock.errors import PenstockError, UnavailableError
from penstock.store.base import FoundBlocks, GoneBlocks, NewGeneration, Page, SaveJob, TierState
from penstock.store.disk.folder import DiskFolder, Generations
from penstock.store.disk.index import digests_of
from penstock.store.disk.io import (
    RUN_BYTES_MAX,
    RUN_BYTES_MIN,
    RUN_SLOTS_MAX,
    DiskCalls,
    probe_direct,
)
from penstock.store.disk.segments import SegmentPool
from penstock.store.disk.threads import (
    GONE_ERRORS,
    DiskTask,
    DiskThreads,
    ForKeeper,
    LoadInHand,
    RowToBury,
    RunToRead,
    RunToWrite,
    SaveInHand,
)
from penstock.store.stored_tier import FAILURES_MAX, RETRY_S, UNREADABLE, StoredTier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.store.base import FindJob, LoadJob, Space
    from penstock.store.disk.format import DiskCipher
    from penstock.store.disk.index import DiskSegment
    from penstock.store.disk.threads import SegmentToSync
    from penstock.store.stored_tier import JobInHand, RunOfBlocks

logger = logging.getLogger(__name__)

THREADS_MIN, THREADS_MAX = 4, 8
SlotsT = TypeVar("SlotsT", RunToRead, RunToWrite)
QUEUE_BYTES = 1 << 30
"""Of saves in hand: about a second of writing."""


class DiskTier(StoredTier[DiskTask]):
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
        self._cipher = cipher
        self._ignore_other_versions = ignore_other_versions
        self._wants_direct = direct
        self._calls = calls or DiskCalls()
        self.lock = threading.Lock()
        self.folder = DiskFolder(folder, self._calls)
        self._generations = Generations(self.folder)
        self.pool = self._take_folder_first()
        super().__init__(
            f"the disk tier in {folder}",
            lock=self.lock,
            workers=threads,
            queue_bytes=queue_bytes,
            retry_s=retry_s,
            clock=self._calls.clock,
        )
        self.read_ready = threading.Condition(self.lock)
        """For the thread that only reads: a write would wake it in vain."""
        self.inbox: deque[ForKeeper] = deque()
        """Of the keeper."""
        self.pending: dict[int, list[tuple[SaveInHand, int]]] = {}
        """By digest of a block that is being written, the other saves that wait for it."""
        self.reads_off = False
        self._threads = DiskThreads(self, cipher=cipher, calls=self._calls)
        if not stepped:
            self._threads.start(threads)

    def _take_folder_first(self) -> SegmentPool:
        try:
            return self.take_folder()
        except OSError as error:
            self.folder.close()
            raise UnavailableError(
                f"folder {self.folder.path} cannot be used: {error.strerror}"
            ) from error
        except PenstockError:
            self.folder.close()
            raise

    def take_folder(self) -> SegmentPool:
        """Reads the heads of what is there; at the start, and if the folder was exchanged."""
        direct = self._wants_direct and probe_direct(self.folder.fd, self._calls)
        if self._wants_direct and not direct:
            logger.warning(
                "folder %s has no direct I/O: reads and writes go through the page cache, which is "
                "slower",
                self.folder.path,
            )
        pool = SegmentPool(
            self.folder,
            self._size_bytes,
            generations=self._generations,
            lock=self.lock,
            cipher=self._cipher,
            calls=self._calls,
            flags=os.O_DIRECT if direct else 0,
            ignore_other_versions=self._ignore_other_versions,
        )
        if pool.foreign_count:
            logger.warning(
                "%d segments of folder %s are of another encryption key: they are neither read "
                "nor reclaimed",
                *(pool.foreign_count, self.folder.path),
            )
        return pool

    def drop_rest(self) -> None:
        for job in list(self.jobs.values()):
            if isinstance(job, SaveInHand) and not job.planned:
                job.fail()
                self.end_job(job)
        self.read_ready.notify_all()

    def is_over(self) -> bool:
        """Whether nothing comes back to the keeper any more."""
        in_hand = (isinstance(job, SaveInHand) for job in self.jobs.values())
        return self.stopped and not self.inbox and not any(in_hand)

    def release(self, deadline: float, *, in_call: bool) -> None:
        if in_call:
            logger.warning("%s was closed during I/O", self.name)
        for segment in list(self.pool.segments.values()):
            if segment.dirty and time.monotonic() < deadline:
                self._threads.sync(segment)
        with suppress(OSError):
            # An older copy may have been put in its place meanwhile.
            self._generations.save()
        self.folder.close()

    # Taking jobs in

    def save(self, job: SaveJob) -> None:
        digests = digests_of(job.space, job.arena.part, job.keys)
        nbytes = len(job.keys) * job.arena.host.slot_bytes
        with self.lock:
            self._require_open(job.ticket)
            if self.off:
                self.refuse(job, self.off)
            elif all(digest in self.pool.index for digest in digests):
                self.report(job.ticket, {})
            elif self.has_room(job, nbytes):
                save = SaveInHand(job, nbytes, digests=digests)
                self.take_in_hand(save)
                self.tell_keeper(save)

    def load(self, job: LoadJob) -> None:
        digests = digests_of(job.space, job.arena.part, job.keys)
        with self.lock:
            self._require_open(job.ticket)
            if self.reads_off:
                self.refuse(job, self.off)
                return
            load = LoadInHand(job, digests=digests)
            places = []
            for position, digest in enumerate(digests):
                place = self.pool.index.find(digest)
                if place is None:
                    load.faults[position] = BlockFault.MISSING
                else:
                    places.append((*place, position))
            if not places:
                self.report(job.ticket, load.faults)
                return
            self.take_in_hand(load)
            for read in self._reads_of(load, sorted(places)):
                read.segment.hits += len(read.positions)
                load.left += 1
                self._queue_read(read)

    def _reads_of(self, load: LoadInHand, places: list[tuple[int, int, int]]) -> list[RunToRead]:
        """Reads of neighbouring slots, as many as keep all threads busy."""
        segments = self.pool.segments
        step = self.run_slots(segments[places[0][0]], len(places))
        reads = []
        # Neighbours are as far from their position in the sorted list as each other.
        for (number, _), group in groupby(
            enumerate(places), key=lambda each: (each[1][0], each[1][1] - each[0])
        ):
            run = [place for _, place in group]
            for start in range(0, len(run), step):
                chunk = run[start : start + step]
                positions = [position for _, _, position in chunk]
                reads.append(RunToRead(load, positions, segments[number], chunk[0][1]))
        return reads

    def cancel(self, ticket: int) -> None:
        with self.lock:
            job = self.jobs.get(ticket)
            if isinstance(job, SaveInHand) and not job.planned:
                job.fail()
                self.end_job(job)
            elif job is not None:
                if isinstance(job, LoadInHand):
                    job.cancelled = True
                self.drop_runs(job)

    def _require_open(self, ticket: int) -> None:
        if self.closing:
            raise ValueError("the disk tier is closed")
        if ticket in self.jobs:
            raise ValueError(f"ticket is {ticket}, which is in hand already")

    # Runs; these methods want the lock held

    def _queue_read(self, read: RunToRead) -> None:
        read.segment.busy += 1
        self.reads.append(read)
        self.work_ready.notify()
        self.read_ready.notify()

    def queue_write(self, write: RunToWrite | SegmentToSync) -> None:
        write.segment.busy += 1
        self.writes.append(write)
        self.work_ready.notify()

    def run_slots(self, segment: DiskSegment, count: int) -> int:
        """How many slots a run of `count` blocks has: enough to keep idle threads busy.

        Longer runs cost less a byte, so jobs are not split while all threads have work.
        """
        assert segment.geometry is not None
        slot_bytes = segment.geometry.slot_bytes
        pieces = max(1, self.idle_workers - len(self.reads) - len(self.writes))
        wanted = min(max(count * slot_bytes // pieces, RUN_BYTES_MIN), RUN_BYTES_MAX)
        return min(max(1, -(-wanted // slot_bytes)), RUN_SLOTS_MAX)

    def take_along(self, task: SlotsT, queue: deque[DiskTask]) -> list[SlotsT]:
        """A task and others from its queue for the same call: as many as idle threads would get.

        So blocks without neighbours cost little more than those of one job. Takes the lock.
        """
        taken, size = [task], task.job.job.arena.host.slot_bytes
        nbytes = len(task.positions) * size
        with self.lock:
            for _ in range(len(queue) // (self.idle_workers + 1)):
                each = queue[0]
                if not isinstance(each, type(task)) or not each.is_like(task):
                    break
                nbytes += len(each.positions) * size
                if nbytes > RUN_BYTES_MIN:
                    break
                queue.popleft()
                taken.append(each)
        return taken

    def tell_keeper(self, message: ForKeeper) -> None:
        self.inbox.append(message)
        self.keeper_ready.notify()

    def drop_run(self, run: RunOfBlocks) -> None:
        """Ends a read; of a write the keeper does it."""
        if isinstance(run, RunToWrite):
            run.failure = "cancelled"
            self.tell_keeper(run)
        else:
            super().drop_run(run)

    def end_run(self, run: RunOfBlocks, faults: dict[int, BlockFault], failure: str = "") -> None:
        """A read is done; `faults` are by position in it."""
        assert isinstance(run, RunToRead)
        segment = run.segment
        segment.busy -= 1
        for place, fault in faults.items():
            if fault is BlockFault.CORRUPT:
                self.blocks_corrupt += 1
                slot = run.first + place
                digest = run.job.digests[run.positions[place]]
                if self.is_current(segment) and self.pool.index.forget(digest, segment, slot):
                    self.tell_keeper(RowToBury(segment, segment.life, slot))
        for place, parent in enumerate(run.parents):
            if place not in faults:
                run.job.cold[run.positions[place]] = parent
        super().end_run(run, faults, failure)

    def end_job(self, job: JobInHand) -> None:
        if isinstance(job, LoadInHand) and job.cold and not job.cancelled and self._may_rewrite():
            self._rewrite(job)
        else:
            super().end_job(job)

    def end_blocks(self, save: SaveInHand, positions: Sequence[int], failure: str) -> None:
        """Blocks that this save was to write are written, or failed; others may wait for them."""
        for position in positions:
            waiting = self.pending.pop(save.digests[position])
            for each, own_position in ((save, position), *waiting):
                if failure:
                    each.faults[own_position] = UNREADABLE
                each.left -= 1
                if each.left == 0:
                    self.end_job(each)

    def is_current(self, segment: DiskSegment) -> bool:
        """Whether it is one of the pool; if not, the folder was exchanged meanwhile."""
        return self.pool.segments.get(segment.number) is segment

    def _may_rewrite(self) -> bool:
        """Whether nobody would wait for it."""
        return not (self.off or self.closing or self.reads or self.writes)

    def _rewrite(self, load: LoadInHand) -> None:
        """Writes blocks again that are asked for, and that would be given up soon."""
        positions = sorted(load.cold)
        job = load.job
        again = SaveJob(
            job.ticket,
            job.arena,
            job.space,
            [job.keys[position] for position in positions],
            [load.cold[position] for position in positions],
            [job.slots[position] for position in positions],
            job.salt,
        )
        digests = [load.digests[position] for position in positions]
        save = SaveInHand(again, digests=digests, load=load)
        self.take_in_hand(save)
        self.tell_keeper(save)

    # Whether it is on; these methods want the lock held

    def switch_off(self, why: str, error: OSError | None = None) -> None:
        """Takes no jobs until a probe succeeds; reads go on if only writes fail."""
        if error is not None and error.errno in GONE_ERRORS:
            self.reads_off = True
        super().switch_off(why)

    def fail_read(self, error: OSError) -> None:
        self.failures += 1
        if error.errno in GONE_ERRORS or self.failures >= FAILURES_MAX:
            self.reads_off = True
            self.switch_off(f"reading failed: {error.strerror}", error)

    def has_news(self) -> bool:
        return super().has_news() or self.pool.has_gone()

    # Answers

    def take_gone(self) -> list[GoneBlocks]:
        with self.lock:
            gone = self.pool.take_gone()
            self.settle()
        return gone

    def find(self, job: FindJob) -> FoundBlocks:
        digests = [digests_of(job.space, arena.part, job.keys) for arena in job.arenas]
        with self.lock:
            if self.reads_off:
                return FoundBlocks(job.ticket, [False] * len(job.keys))
            index = self.pool.index
            there = [[digest in index for digest in each] for each in digests]
        # Most engines have one rank, or ranks with equal bytes.
        present = there[0] if len(there) == 1 else list(map(all, zip(*there, strict=True)))
        return FoundBlocks(job.ticket, present)

    def page(self, space: Space, part: bytes, cursor: int | None, limit: int) -> Page:
        try:
            return self.pool.page(space, part, cursor, limit)
        except OSError as error:
            with self.lock:
                self.fail_read(error)
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
        with self.lock:
            self.switch_off(why, error)
        return why

    def expect(self, name: bytes, generation: int) -> None:
        """An engine knows of this generation of a space: none of before it counts again.

        The folder may be an older copy of what that engine used, with nothing in it to show it.
        """
        try:
            self._generations.expect(name, generation)
        except OSError as error:
            self._switch_off_generations(error)
        with self.lock:
            self.signal()

    def take_generations(self) -> list[NewGeneration]:
        return [NewGeneration(*changed) for changed in self._generations.take_changed()]

    def state(self) -> TierState:
        with self.lock:
            self.state_changed = False
            self.settle()
            pool = self.pool
            return TierState(
                on=not self.off,
                why=self.off,
                recovered=pool.rows_known / pool.rows_found if pool.rows_found else 1.0,
                blocks=len(pool.index),
                block_bytes=pool.block_bytes,
                capacity_bytes=min(pool.size_bytes, pool.room_bytes),
                saves_dropped=self.saves_dropped,
                blocks_corrupt=self.blocks_corrupt,
                blocks_reclaimed=pool.reclaimed,
                generations_lost=self._generations.times_lost,
            )


def _require_numbers(threads: int, size_bytes: int, queue_bytes: int) -> None:
    if not THREADS_MIN <= threads <= THREADS_MAX:
        raise ValueError(f"threads is {threads}, must be from {THREADS_MIN} to {THREADS_MAX}")
    for name, value in (("size_bytes", size_bytes), ("queue_bytes", queue_bytes)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
