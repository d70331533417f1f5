"""The jobs of a disk tier that are in hand, the queues of its threads, and whether it is on.

A job is in hand from `save` or `load` to its report. It becomes runs of slots, each of which an I/O
thread reads or writes; the last one that ends reports the job.

The one rule: a job is reported once, and after its last run.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.store.base import EndedJob, SaveJob
from penstock.store.disk_io import RUN_BYTES_MAX, RUN_BYTES_MIN, RUN_SLOTS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import LoadJob
    from penstock.store.disk_folder import DiskFolder
    from penstock.store.disk_index import DiskSegment
    from penstock.store.disk_segments import SegmentPool
    from penstock.vocabulary.ids import Key

logger = logging.getLogger(__name__)

PAUSE_MAX_S = 60.0
"""Before a tier that is off is tried again; the pause doubles each time."""
READ_FAILURES_MAX = 3
"""Reads that fail one after the other before the tier goes off; one bad sector is no reason."""
GONE_ERRORS = frozenset({errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTDIR})
"""The folder is not there any more, so there is nothing to read either."""
_UNREADABLE = BlockFault.UNREADABLE


@dataclass(slots=True, eq=False)
class SaveInHand:
    """A save in hand. Blocks of a load that are written again are one too."""

    job: SaveJob
    digests: list[int]
    nbytes: int
    left: int = 0
    """Blocks whose writes are not done, by this save or another."""
    faults: dict[int, BlockFault] = field(default_factory=dict)
    failure: str = ""
    planned: bool = False
    ended: bool = False
    load: LoadInHand | None = None
    """The load that ends with it: its blocks are written again."""


@dataclass(slots=True, eq=False)
class LoadInHand:
    """A load in hand."""

    job: LoadJob
    digests: list[int]
    left: int = 0
    """Reads that are not done."""
    faults: dict[int, BlockFault] = field(default_factory=dict)
    failure: str = ""
    cancelled: bool = False
    cold: dict[int, Key | None] = field(default_factory=dict)
    """Positions of blocks from segments that are given up next, with their parents."""


@dataclass(slots=True, eq=False)
class RunToRead:
    """Neighbouring slots that a load asks for."""

    load: LoadInHand
    segment: DiskSegment
    first: int
    positions: list[int]
    parents: list[Key | None] = field(default_factory=list)
    """Of blocks that are to be written again."""


@dataclass(slots=True, eq=False)
class RunToWrite:
    """Neighbouring slots that a save fills."""

    save: SaveInHand
    segment: DiskSegment
    first: int
    positions: list[int]
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


class JobBoard:
    """All that the threads of a tier share; `lock` guards it.

    Methods want the lock held. The tier takes jobs in, the I/O threads take runs out, and the
    keeper ends saves.
    """

    def __init__(
        self,
        folder: DiskFolder,
        pool: SegmentPool,
        *,
        lock: threading.Lock,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.pool = pool
        self.lock = lock
        self.clock = clock
        self.io_ready = threading.Condition(lock)
        self.read_ready = threading.Condition(lock)
        """For the thread that only reads: a write would wake it in vain."""
        self.idle_threads = 0
        self.keeper_ready = threading.Condition(lock)
        self.idle = threading.Condition(lock)
        self.reads: deque[RunToRead] = deque()
        self.writes: deque[RunToWrite | SegmentToSync] = deque()
        self.inbox: deque[SaveInHand | RunToWrite | RowToBury] = deque()
        """Of the keeper."""
        self.saves: dict[int, SaveInHand] = {}
        self.loads: dict[int, LoadInHand] = {}
        self.pending: dict[int, list[tuple[SaveInHand, int]]] = {}
        """By digest of a block that is being written, the other saves that wait for it."""
        self.in_hand_bytes = 0
        self.ended: list[EndedJob] = []
        self.event = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.state_changed = True
        self.closing = self.stopped = self.closed = False
        self.off = ""
        """Why no jobs are taken, if so."""
        self.reads_off = False
        self.broken = False
        """After an error of ours: it does not come on again."""
        self.retry_s = self.pause_s = retry_s
        self.retry_at = 0.0
        self.read_failures = 0
        self.saves_dropped = self.blocks_corrupt = 0

    def take_task(self, *, may_write: bool) -> RunToRead | RunToWrite | SegmentToSync | None:
        """What an I/O thread does next: reads go first."""
        if self.reads:
            return self.reads.popleft()
        return self.writes.popleft() if may_write and self.writes else None

    def queue_read(self, read: RunToRead) -> None:
        read.segment.busy += 1
        self.reads.append(read)
        self.io_ready.notify()
        self.read_ready.notify()

    def queue_write(self, write: RunToWrite | SegmentToSync) -> None:
        write.segment.busy += 1
        self.writes.append(write)
        self.io_ready.notify()

    def run_slots(self, segment: DiskSegment, count: int) -> int:
        """How many slots a run of `count` blocks has: enough to keep idle threads busy.

        Longer runs cost less a byte, so jobs are not split while all threads have work.
        """
        assert segment.geometry is not None
        slot_bytes = segment.geometry.slot_bytes
        pieces = max(1, self.idle_threads - len(self.reads) - len(self.writes))
        wanted = min(max(count * slot_bytes // pieces, RUN_BYTES_MIN), RUN_BYTES_MAX)
        return min(max(1, -(-wanted // slot_bytes)), RUN_SLOTS_MAX)

    def drop_reads(self, reads: list[RunToRead]) -> None:
        """Ends reads that are in the queue."""
        for read in reads:
            self.reads.remove(read)
            self.end_read(read, dict.fromkeys(range(len(read.positions)), _UNREADABLE))

    def drop_writes(self, writes: list[RunToWrite]) -> None:
        """Takes writes out of the queue; the keeper ends them."""
        for write in writes:
            self.writes.remove(write)
            write.failure = "cancelled"
            self.tell_keeper(write)

    def tell_keeper(self, message: SaveInHand | RunToWrite | RowToBury) -> None:
        self.inbox.append(message)
        self.keeper_ready.notify()

    def report(self, ticket: int, faults: dict[int, BlockFault], failure: str = "") -> None:
        self.ended.append(EndedJob(ticket, tuple(sorted(faults.items())), failure))
        self.signal()

    def change_state(self) -> None:
        self.state_changed = True
        self.signal()

    def signal(self) -> None:
        if not self.closed:
            os.eventfd_write(self.event, 1)

    def settle_event(self) -> None:
        if self.closed or self.ended or self.state_changed or self.pool.has_gone():
            return
        try:
            os.eventfd_read(self.event)
        except BlockingIOError:
            return

    def end_save(self, save: SaveInHand) -> None:
        save.ended = True
        del self.saves[save.job.ticket]
        self.in_hand_bytes -= save.nbytes
        if save.load is None:
            self.report(save.job.ticket, save.faults, save.failure)
        else:
            self._report_load(save.load)
        self.idle.notify_all()

    def end_blocks(self, save: SaveInHand, positions: Sequence[int], failure: str) -> None:
        """Blocks that this save was to write are written, or failed; others may wait for them."""
        for position in positions:
            waiting = self.pending.pop(save.digests[position])
            for each, own_position in ((save, position), *waiting):
                if failure:
                    each.faults[own_position] = _UNREADABLE
                each.left -= 1
                if each.left == 0:
                    self.end_save(each)

    def end_read(self, read: RunToRead, faults: dict[int, BlockFault]) -> None:
        """A read is done; `faults` are by position in it."""
        load, segment = read.load, read.segment
        segment.busy -= 1
        for place, fault in faults.items():
            position = read.positions[place]
            load.faults[position] = fault
            if fault is BlockFault.CORRUPT:
                self.blocks_corrupt += 1
                slot = read.first + place
                digest = load.digests[position]
                if self.is_current(segment) and self.pool.index.forget(digest, segment, slot):
                    self.tell_keeper(RowToBury(segment, segment.life, slot))
        for place, parent in enumerate(read.parents):
            if place not in faults:
                load.cold[read.positions[place]] = parent
        load.left -= 1
        if load.left == 0:
            del self.loads[load.job.ticket]
            if load.cold and not load.cancelled and self._may_rewrite():
                self._rewrite(load)
            else:
                self._report_load(load)
                self.idle.notify_all()

    def _report_load(self, load: LoadInHand) -> None:
        all_failed = len(load.faults) == len(load.digests)
        self.report(load.job.ticket, load.faults, load.failure if all_failed else "")

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
        save = SaveInHand(again, [load.digests[position] for position in positions], 0, load=load)
        self.saves[job.ticket] = save
        self.tell_keeper(save)

    def switch_off(self, why: str, error: OSError | None = None) -> None:
        """Takes no jobs any more until a probe succeeds; reads go on if only writes fail."""
        if error is not None and error.errno in GONE_ERRORS:
            self.reads_off = True
        if self.off:
            return
        self.off = why
        self.retry_at = self.clock() + self.pause_s
        after = "a restart" if self.broken else f"{self.pause_s:g} s"
        logger.error(
            "the disk tier in %s is off: %s; next try after %s", self.folder.path, why, after
        )
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)
        self.change_state()
        self.keeper_ready.notify()

    def fail_read(self, error: OSError) -> None:
        self.read_failures += 1
        if error.errno in GONE_ERRORS or self.read_failures >= READ_FAILURES_MAX:
            self.reads_off = True
            self.switch_off(f"reading failed: {error.strerror}", error)

    def break_down(self, error: Exception) -> str:
        """An error of ours: off for good."""
        why = f"unexpected {type(error).__name__}: {error}"
        logger.error("the disk tier in %s fails", self.folder.path, exc_info=error)
        self.broken = True
        self.switch_off(why)
        return why
