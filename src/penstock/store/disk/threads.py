"""The threads of a disk tier: I/O, the keeper, and recovery.

A save or load becomes runs of slots, each of which an I/O thread reads or writes.

    I/O         reads and writes runs of slots; reads go first, and one thread does nothing else
    keeper      gives saves their slots, writes rows, opens and gives up segments, tries again
    recovery    finds the blocks that were there at the start, newest segment first; then ends

The order of a save is kept by the keeper: block and trailer were written when a run comes back to
it, then it writes the rows, several at once, then it names the blocks in the index and reports.

Each thread repeats one step (`do_task`, `keep`, `recover_next`); without `start`, a simulator takes
them instead, in any order.

The one rule: no error of a step leaves a job in hand, or ends a thread.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.errors import ConfigError, PenstockError
from penstock.store.disk.format import ROW, ROW_BYTES, Geometry, seal_rows
from penstock.store.disk.index import Stretch, make_rows, parents_of, read_rows
from penstock.store.disk.io import (
    AlignedMemory,
    Run,
    probe_direct,
    read_run,
    write_all,
    write_run,
)
from penstock.store.disk.segments import NoRoomError
from penstock.store.stored_tier import UNREADABLE, JobInHand, RunOfBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import EndedJob, LoadJob, SaveJob, Space
    from penstock.store.disk.format import DiskCipher
    from penstock.store.disk.index import DiskSegment
    from penstock.store.disk.io import DiskCalls
    from penstock.store.disk.segments import SegmentPool
    from penstock.store.disk.tier import DiskTier
    from penstock.vocabulary.keys import Key


logger = logging.getLogger(__name__)

GONE_ERRORS = frozenset({errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTDIR})
"""The folder is not there any more, so there is nothing to read either."""
NEWS_OF_RECOVERY = 64
"""How often recovery says how far it is."""


@dataclass(slots=True, eq=False)
class LoadInHand(JobInHand):
    """A load in hand."""

    job: LoadJob
    digests: list[int] = field(kw_only=True)
    cancelled: bool = False
    cold: dict[int, Key | None] = field(default_factory=dict)
    """Positions of blocks from segments that are given up next, with their parents."""


@dataclass(slots=True, eq=False)
class SaveInHand(JobInHand):
    """A save in hand. Blocks of a load that are written again are one too."""

    job: SaveJob
    digests: list[int] = field(kw_only=True)
    planned: bool = False
    load: LoadInHand | None = None
    """The load that ends with it: its blocks are written again."""

    def report(self) -> EndedJob:
        if self.load is not None:
            return self.load.report()
        return JobInHand.report(self)._replace(failure=self.failure)


@dataclass(slots=True, eq=False)
class RunToRead(RunOfBlocks):
    """Neighbouring slots that a load asks for."""

    job: LoadInHand
    segment: DiskSegment
    first: int
    parents: list[Key | None] = field(default_factory=list)
    """Of blocks that are to be written again."""


@dataclass(slots=True, eq=False)
class RunToWrite(RunOfBlocks):
    """Neighbouring slots that a save fills."""

    job: SaveInHand
    segment: DiskSegment
    first: int
    trailer_sums: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    failure: str = ""
    ended: bool = False


@dataclass(slots=True, eq=False)
class SegmentToSync:
    """A segment that is full."""

    segment: DiskSegment


@dataclass(slots=True, eq=False)
class RowToBury:
    """The row of a block that is forgotten: it is filled with zeros, if its life still lasts."""

    segment: DiskSegment
    life: int
    slot: int


DiskTask = RunToRead | RunToWrite | SegmentToSync
ForKeeper = SaveInHand | RunToWrite | RowToBury


class DiskThreads:
    """What the threads of a `DiskTier` do."""

    def __init__(self, tier: DiskTier, *, cipher: DiskCipher | None, calls: DiskCalls) -> None:
        self._tier = tier
        self._cipher = cipher
        self._calls = calls

    def start(self, io_count: int) -> None:
        start = self._tier.start
        start(lambda: self._tier.keep_on(self.keep, self.keeper_due_at), "penstock-disk-keeper")
        start(self._recover, "penstock-disk-recovery")
        start(lambda: self._do_io(may_write=False), "penstock-disk-reads")
        for number in range(1, io_count):
            start(lambda: self._do_io(may_write=True), f"penstock-disk-io-{number}")

    # I/O

    def _do_io(self, *, may_write: bool) -> None:
        scratch = AlignedMemory()
        ready = self._tier.work_ready if may_write else self._tier.read_ready
        self._tier.work(lambda task: self.do_task(task, scratch), ready, may_write=may_write)

    def do_task(self, task: DiskTask, scratch: AlignedMemory) -> None:
        """Reads, writes or syncs; the result is recorded in the tier."""
        match task:
            case RunToRead():
                self._read(self._tier.take_along(task, self._tier.reads), scratch)
            case RunToWrite():
                self._write(self._tier.take_along(task, self._tier.writes), scratch)
            case SegmentToSync():
                self.sync(task.segment)
                with self._tier.lock:
                    task.segment.busy -= 1

    def _run_of(self, tasks: Sequence[RunToRead] | Sequence[RunToWrite]) -> Run:
        job = tasks[0].job.job
        return Run(
            list(_stretches_of(tasks)),
            self._tier.pool.flags,
            job.arena,
            job.space,
            [key for each in tasks for key in each.keys],
            np.concatenate([each.slots for each in tasks]),
            job.salt,
            self._cipher,
        )

    def _read(self, reads: Sequence[RunToRead], scratch: AlignedMemory) -> None:
        """Reads in one call; if that fails, each by itself, to know whose failure it is."""
        tier, arena = self._tier, reads[0].job.job.arena
        fault, failure = UNREADABLE, ""
        found: dict[int, BlockFault] | None = None
        try:
            sums = tier.sums.of(arena, arena.form.checksum)
            bad = read_run(self._run_of(reads), sums, self._calls, scratch)
            for each in reads:
                if tier.pool.is_cold(each.segment):
                    each.parents = self._parents_of(each)
        except OSError as error:
            if len(reads) > 1:
                for each in reads:
                    self._read([each], scratch)
                return
            if tier.pool.forget_if_removed(reads[0].segment):
                fault = BlockFault.MISSING
            else:
                failure = f"reading failed: {error.strerror}"
                with tier.lock:
                    tier.fail_read(error)
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses jobs
            with tier.lock:
                failure = tier.break_down(error)
        else:
            found = bad
        with tier.lock:
            self._end_reads(reads, found, fault, failure)

    def _end_reads(
        self,
        reads: Sequence[RunToRead],
        found: dict[int, BlockFault] | None,
        fault: BlockFault,
        failure: str,
    ) -> None:
        """`found` are the faults over all of them; without it none was read, and `fault` is why."""
        if found is not None:
            self._tier.failures = 0
        done = 0
        for read in reads:
            places = range(len(read.positions))
            if found is None:
                faults = dict.fromkeys(places, fault)
            else:
                faults = {at: found[done + at] for at in places if done + at in found}
            self._tier.end_run(read, faults, failure)
            done += len(places)

    def _parents_of(self, read: RunToRead) -> list[Key | None]:
        """What the rows of a read say, for blocks that are written again."""
        with read.segment.open(os.O_RDONLY, self._calls) as fd:
            return parents_of(read_rows(fd, read.first, len(read.positions), self._calls))

    def _write(self, writes: Sequence[RunToWrite], scratch: AlignedMemory) -> None:
        """Writes in one call; if that fails, each by itself, to know whose failure it is."""
        failure = ""
        try:
            trailer_sums = write_run(self._run_of(writes), self._calls, scratch)
        except OSError as error:
            if len(writes) > 1:
                for each in writes:
                    self._write([each], scratch)
                return
            failure = f"writing failed: {error.strerror}"
            self._switch_off(writes[0].segment, failure, error)
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses jobs
            with self._tier.lock:
                failure = self._tier.break_down(error)
        else:
            ends = np.cumsum([len(each.positions) for each in writes])[:-1]
            for each, its_sums in zip(writes, np.split(trailer_sums, ends), strict=True):
                each.trailer_sums = its_sums
        with self._tier.lock:
            for each in writes:
                each.failure = failure
                self._tier.tell_keeper(each)

    def sync(self, segment: DiskSegment) -> None:
        """Makes what was written to a segment outlive a power loss."""
        try:
            with segment.open(os.O_RDWR, self._calls) as fd:
                segment.dirty = False
                self._calls.sync(fd)
        except OSError as error:
            self._switch_off(segment, f"syncing failed: {error.strerror}", error)

    def _switch_off(self, segment: DiskSegment, why: str, error: OSError) -> None:
        """The disk refuses something; but a file that was removed concerns its blocks alone."""
        if not self._tier.pool.forget_if_removed(segment):
            with self._tier.lock:
                self._tier.switch_off(why, error)

    # Keeper

    def keeper_due_at(self) -> float:
        """When `keep` has something to do; wants the lock held."""
        return -math.inf if self._tier.inbox else self._tier.retry_at

    def is_keeper_due(self) -> bool:
        """Whether `keep` has something to do."""
        return self._tier.clock() >= self.keeper_due_at()

    def keep(self) -> None:
        """What the keeper does with all that waits for it, and when it is time to try again."""
        tier = self._tier
        with tier.lock:
            messages = list(tier.inbox)
            tier.inbox.clear()
            retry = tier.clock() >= tier.retry_at
        try:
            # Rows wait for the disk: threads with nothing to write would wait with them.
            for each in messages:
                if isinstance(each, SaveInHand):
                    self._plan(each)
            self._write_rows([each for each in messages if isinstance(each, RunToWrite)])
            for each in messages:
                if isinstance(each, RowToBury):
                    self._bury(each)
            if retry:
                self._try_again()
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses jobs
            with tier.lock:
                self._fail(messages, tier.break_down(error))

    def _fail(self, messages: Sequence[ForKeeper], why: str) -> None:
        """Ends what an error of ours left in hand."""
        for each in messages:
            if isinstance(each, RunToWrite) and not each.ended:
                each.failure = why
                self._end_writes([each])
            elif isinstance(each, SaveInHand) and not each.planned:
                self._end_unplanned(each, why)

    def _plan(self, save: SaveInHand) -> None:
        """Gives the blocks of a save their slots, and queues the writes."""
        tier, job = self._tier, save.job
        with tier.lock:
            if tier.jobs.get(job.ticket) is not save:
                return  # It was cancelled.
            if tier.off:
                self._end_unplanned(save, tier.off)
                return
            fresh = self._take_pending(save)
        try:
            stretches = tier.pool.take_slots(job.arena, len(fresh))
        except (ConfigError, NoRoomError, OSError) as error:
            with tier.lock:
                if isinstance(error, NoRoomError):
                    tier.saves_dropped += len(fresh)
                elif isinstance(error, OSError):
                    save.failure = f"no segment can be begun: {error.strerror}"
                    tier.switch_off(save.failure, error)
                else:
                    save.failure = str(error)
                tier.end_blocks(save, fresh, "no room")
                self._let_go(save)
            return
        with tier.lock:
            for write in self._writes_of(save, fresh, stretches):
                write.segment.writes += 1
                tier.queue_write(write)
            if tier.stopped:  # Nobody may be left to write it.
                tier.drop_runs(save)
            self._let_go(save)
            if tier.pool.has_gone():
                tier.signal()
        tier.pool.give_back(stretches)

    def _end_unplanned(self, save: SaveInHand, why: str) -> None:
        save.failure = why
        save.fail()
        self._tier.end_job(save)

    def _take_pending(self, save: SaveInHand) -> list[int]:
        """The positions that this save has to write; for others it waits, or they are there."""
        tier = self._tier
        save.planned = True
        save.left = 1  # Until all of it is planned.
        fresh = []
        for position, digest in enumerate(save.digests):
            waiting = tier.pending.get(digest)
            if waiting is not None:
                waiting.append((save, position))
            elif save.load is None and digest in tier.pool.index:
                continue
            else:
                tier.pending[digest] = []
                fresh.append(position)
            save.left += 1
        return fresh

    def _let_go(self, save: SaveInHand) -> None:
        save.left -= 1
        if save.left == 0:
            self._tier.end_job(save)

    def _writes_of(
        self, save: SaveInHand, fresh: list[int], stretches: Sequence[Stretch]
    ) -> list[RunToWrite]:
        writes = []
        done = 0
        for segment, first, count in stretches:
            step = self._tier.run_slots(segment, len(fresh))
            for start in range(0, count, step):
                taken = fresh[done : done + min(step, count - start)]
                writes.append(RunToWrite(save, taken, segment, first + start))
                done += len(taken)
        return writes

    def _write_rows(self, writes: list[RunToWrite]) -> None:
        """Writes the rows of blocks that were written, then says that they are there."""
        tier = self._tier
        good = [write for write in writes if not write.failure]
        good.sort(key=lambda write: (write.segment.number, write.first))
        for segment, group in groupby(good, key=lambda write: write.segment):
            its_writes = list(group)
            try:
                self._write_rows_of(segment, its_writes)
            except OSError as error:
                why = f"writing rows failed: {error.strerror}"
                self._switch_off(segment, why, error)
                for write in its_writes:
                    write.failure = why
        with tier.lock:
            self._end_writes(writes)

    def _write_rows_of(self, segment: DiskSegment, writes: list[RunToWrite]) -> None:
        """One write for rows that follow each other."""
        # As bytes: NumPy compares the fields of records with each other, which takes far longer.
        made = [
            _rows_of(segment, space, list(group)).view(np.uint8)
            for space, group in groupby(writes, key=lambda write: write.job.job.space)
        ]
        rows = seal_rows(np.concatenate(made).view(ROW))
        gaps = np.flatnonzero(np.diff(rows["slot"].astype(np.int64)) != 1) + 1
        with segment.open(os.O_WRONLY, self._calls) as fd:
            for each in np.split(rows, gaps):
                offset = Geometry.row_offset(int(each["slot"][0]))
                write_all(fd, [each.view(np.uint8).data], offset, self._calls)
        if not self._tier.pool.is_in_place():
            raise OSError(errno.ESTALE, "the folder was exchanged")
        segment.dirty = True

    def _end_writes(self, writes: Sequence[RunToWrite]) -> None:
        tier = self._tier
        for write in writes:
            if not tier.is_current(write.segment):
                write.failure = write.failure or "the folder was exchanged"
        good = [write for write in writes if not write.failure]
        for segment, group in groupby(good, key=lambda write: write.segment):
            tier.pause_s = tier.retry_s
            its_writes = list(group)
            digests = [write.job.digests[at] for write in its_writes for at in write.positions]
            tier.pool.index.add(segment, _slots_of(its_writes), digests, tier.pool.segments)
        for write in writes:
            write.ended = True
            write.segment.busy -= 1
            if write.failure and not write.job.failure and tier.off:
                write.job.failure = write.failure
            tier.end_blocks(write.job, write.positions, write.failure)
            write.segment.writes -= 1
            if write.segment.is_full and not write.segment.writes and write.segment.dirty:
                tier.queue_write(SegmentToSync(write.segment))

    def _bury(self, row: RowToBury) -> None:
        """A block that failed its sums is not found again after a restart."""
        with self._tier.lock:
            if row.segment.life != row.life or not self._tier.is_current(row.segment):
                return
        try:
            with row.segment.open(os.O_WRONLY, self._calls) as fd:
                zeros = memoryview(bytes(ROW_BYTES))
                write_all(fd, [zeros], Geometry.row_offset(row.slot), self._calls)
        except OSError as error:
            self._switch_off(row.segment, f"writing rows failed: {error.strerror}", error)

    def _try_again(self) -> None:
        """Whether the folder can be written again; if it was exchanged, it is read anew."""
        tier = self._tier
        try:
            if tier.pool.is_in_place():
                pool = tier.pool
                probe_direct(tier.folder.fd, self._calls)
            else:
                if not tier.folder.is_ours():
                    tier.folder.lock_again()
                pool = tier.take_folder()
            pool.generations.save()
        except (OSError, PenstockError):
            with tier.lock:
                tier.put_off_retry()
            return
        with tier.lock:
            exchanged = pool is not tier.pool
            tier.pool, tier.reads_off = pool, False
            tier.switch_on()
            if not tier.off:  # Something may have broken it meanwhile.
                logger.warning("%s is on again", tier.name)
        if exchanged and tier.running:
            tier.start(self._recover, "penstock-disk-recovery")

    # Recovery

    def _recover(self) -> None:
        tier = self._tier
        pool = tier.pool
        more, told = True, 0
        while more and not tier.stopped:
            more = self.recover_next(pool)
            if not more or (pool.rows_known - told) * NEWS_OF_RECOVERY >= pool.rows_found:
                told = pool.rows_known
                with tier.lock:
                    tier.change_state()

    def recover_next(self, pool: SegmentPool) -> bool:
        """Finds the blocks of one more table; false if there is none."""
        try:
            return pool.recover_next()
        except OSError as error:
            with self._tier.lock:
                self._tier.fail_read(error)
            return True
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses blocks
            with self._tier.lock:
                self._tier.break_down(error)
            return False


def _stretches_of(tasks: Sequence[RunToRead] | Sequence[RunToWrite]) -> Iterator[Stretch]:
    """Where their blocks lie; neighbours together."""
    segment, first, end = tasks[0].segment, tasks[0].first, tasks[0].first
    for each in tasks:
        if each.segment is not segment or each.first != end:
            yield Stretch(segment, first, end - first)
            segment, first, end = each.segment, each.first, each.first
        end += len(each.positions)
    yield Stretch(segment, first, end - first)


def _slots_of(writes: Sequence[RunToWrite]) -> list[int]:
    return [write.first + number for write in writes for number in range(len(write.positions))]


def _rows_of(segment: DiskSegment, space: Space, writes: Sequence[RunToWrite]) -> NDArray[np.void]:
    return make_rows(
        segment,
        _slots_of(writes),
        space,
        [key for write in writes for key in write.keys],
        [write.job.job.parents[position] for write in writes for position in write.positions],
        np.concatenate([write.trailer_sums for write in writes]),
        now=time.time(),
    )
