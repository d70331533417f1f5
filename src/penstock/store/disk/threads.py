"""The jobs of a disk tier, and the threads that carry them out: I/O, the keeper, and recovery.

A job is in hand from `save` or `load` to its report. It becomes runs of slots, each of which an I/O
thread reads or writes; the last one that ends reports the job.

    I/O         reads and writes runs of slots; reads go first, and one thread does nothing else
    keeper      gives saves their slots, writes rows, opens and gives up segments, tries again
    recovery    finds the blocks that were there at the start, newest segment first; then ends

The order of a save is kept by the keeper: block and trailer were written when a run comes back to
it, then it writes the rows, several at once, then it names the blocks in the index and reports.

Each thread repeats one step (`do_task`, `keep`, `recover_next`); without `start`, a simulator takes
them instead, in any order.

The rules:

- A job is reported once, and after its last run.
- No error ends a thread. What the kernel refuses switches the tier off for a while; anything else
  is an error of ours, is logged, and switches it off for good.
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
from penstock.errors import ConfigError, PenstockError
from penstock.movers.packing import PackedSums
from penstock.store.base import EndedJob, SaveJob
from penstock.store.disk.format import ROW, ROW_BYTES, Geometry, seal_rows
from penstock.store.disk.index import make_rows
from penstock.store.disk.io import (
    RUN_BYTES_MAX,
    RUN_BYTES_MIN,
    RUN_SLOTS_MAX,
    AlignedMemory,
    Run,
    probe_direct,
    read_all,
    read_run,
    write_all,
    write_run,
)
from penstock.store.disk.segments import NoRoomError
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import LoadJob, MappedArena
    from penstock.store.disk.folder import DiskFolder
    from penstock.store.disk.format import DiskCipher
    from penstock.store.disk.index import DiskSegment
    from penstock.store.disk.io import DiskCalls
    from penstock.store.disk.segments import SegmentPool, Stretch
    from penstock.vocabulary.keys import Key


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


ARENAS_KEPT = 64
"""Arenas whose tables for compiled sums are kept."""
GIB = 1 << 30
NEWS_OF_RECOVERY = 64
"""How often recovery says how far it is."""


class DiskThreads:
    """The threads that work on a `JobBoard`."""

    def __init__(
        self,
        board: JobBoard,
        *,
        count: int,
        take_folder: Callable[[], SegmentPool],
        cipher: DiskCipher | None,
        calls: DiskCalls,
    ) -> None:
        self._board = board
        self._count = board.idle_threads = count
        self._take_folder = take_folder
        self._cipher = cipher
        self._calls = calls
        self._sums: dict[int, tuple[MappedArena, PackedSums]] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._start(self._keep, "keeper")
        self._start(self._recover, "recovery")
        self._start(lambda: self._do_io(may_write=False), "reads")
        for number in range(1, self._count):
            self._start(lambda: self._do_io(may_write=True), f"io-{number}")

    def _start(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=body, daemon=True, name=f"penstock-disk-{name}")
        self._threads.append(thread)
        thread.start()

    def join(self, *, deadline: float) -> bool:
        """Waits for their end; whether all ended by the deadline."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # I/O

    def _do_io(self, *, may_write: bool) -> None:
        board, scratch = self._board, AlignedMemory()
        ready = board.io_ready if may_write else board.read_ready
        while True:
            with board.lock:
                ready.wait_for(lambda: board.stopped or board.reads or (may_write and board.writes))
                task = board.take_task(may_write=may_write)
                board.idle_threads -= 1
            if task is None:
                return
            self.do_task(task, scratch)
            with board.lock:
                board.idle_threads += 1

    def do_task(self, task: RunToRead | RunToWrite | SegmentToSync, scratch: AlignedMemory) -> None:
        """Reads, writes or syncs; what comes of it is on the board afterwards."""
        match task:
            case RunToRead():
                self._read(task, scratch)
            case RunToWrite():
                self._write(task, scratch)
            case SegmentToSync():
                self.sync(task.segment)
                with self._board.lock:
                    task.segment.busy -= 1

    def _run_of(self, task: RunToRead | RunToWrite, job: SaveJob | LoadJob) -> Run:
        geometry = task.segment.geometry
        assert geometry is not None
        return Run(
            task.segment,
            self._board.pool.flags,
            geometry,
            task.segment.life,
            task.first,
            job.arena,
            job.space,
            [job.keys[position] for position in task.positions],
            np.array([job.slots[position] for position in task.positions], dtype=np.int32),
            job.salt,
            self._cipher,
        )

    def _read(self, read: RunToRead, scratch: AlignedMemory) -> None:
        job = read.load.job
        everything = dict.fromkeys(range(len(read.positions)), _UNREADABLE)
        try:
            sums = self._sums_of(job.arena)
            faults = read_run(self._run_of(read, job), sums, self._calls, scratch)
            parents = self._parents_of(read) if self._board.pool.is_cold(read.segment) else []
        except OSError as error:
            removed = self._board.pool.forget_if_removed(read.segment)
            with self._board.lock:
                if removed:
                    missing = dict.fromkeys(everything, BlockFault.MISSING)
                    self._board.end_read(read, missing)
                    return
                self._board.fail_read(error)
                read.load.failure = f"reading failed: {error.strerror}"
                self._board.end_read(read, everything)
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses jobs
            with self._board.lock:
                read.load.failure = self._board.break_down(error)
                self._board.end_read(read, everything)
        else:
            with self._board.lock:
                self._board.read_failures = 0
                read.parents = parents
                self._board.end_read(read, faults)

    def _parents_of(self, read: RunToRead) -> list[Key | None]:
        """What the rows of a read say, for blocks that are written again."""
        rows = np.zeros(len(read.positions), dtype=ROW)
        fd = read.segment.open(os.O_RDONLY, self._calls)
        try:
            read_all(fd, [rows.view(np.uint8).data], Geometry.row_offset(read.first), self._calls)
        finally:
            os.close(fd)
        parents = (row["parent"].tobytes()[:KEY_BYTES] for row in rows)
        return [parent if any(parent) else None for parent in parents]

    def _sums_of(self, arena: MappedArena) -> PackedSums:
        with self._board.lock:
            found = self._sums.get(id(arena))
            if found is not None:
                return found[1]
        made = PackedSums(arena.host.layout, arena.form.checksum)
        with self._board.lock:
            if len(self._sums) >= ARENAS_KEPT:
                self._sums.clear()
            self._sums[id(arena)] = (arena, made)
        return made

    def _write(self, write: RunToWrite, scratch: AlignedMemory) -> None:
        try:
            run = self._run_of(write, write.save.job)
            write.trailer_sums = write_run(run, self._calls, scratch)
        except OSError as error:
            write.failure = f"writing failed: {error.strerror}"
            self._switch_off(write.segment, write.failure, error)
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses jobs
            with self._board.lock:
                write.failure = self._board.break_down(error)
        with self._board.lock:
            self._board.tell_keeper(write)

    def sync(self, segment: DiskSegment) -> None:
        """Makes what was written to a segment outlive a power loss."""
        try:
            fd = segment.open(os.O_RDWR, self._calls)
            try:
                segment.dirty = False
                self._calls.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            self._switch_off(segment, f"syncing failed: {error.strerror}", error)

    def _switch_off(self, segment: DiskSegment, why: str, error: OSError) -> None:
        """The disk refuses something; but a file that was removed concerns its blocks alone."""
        if not self._board.pool.forget_if_removed(segment):
            with self._board.lock:
                self._board.switch_off(why, error)

    # Keeper

    def _keep(self) -> None:
        board = self._board
        while True:
            with board.lock:
                # How long to wait changes while it waits: when the tier goes off.
                while not (self.is_keeper_due() or self._is_over()):
                    board.keeper_ready.wait(self._retry_in_s())
                if self._is_over():
                    return
            self.keep()

    def is_keeper_due(self) -> bool:
        """Whether `keep` has something to do."""
        board = self._board
        return bool(board.inbox) or self._retry_is_due()

    def keep(self) -> None:
        """What the keeper does with all that waits for it, and when it is time to try again."""
        board = self._board
        with board.lock:
            messages = list(board.inbox)
            board.inbox.clear()
            retry = self._retry_is_due()
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
            with board.lock:
                self._fail(messages, board.break_down(error))

    def _fail(self, messages: Sequence[SaveInHand | RunToWrite | RowToBury], why: str) -> None:
        """Ends what an error of ours left in hand."""
        for each in messages:
            if isinstance(each, RunToWrite) and not each.ended:
                each.failure = why
                self._end_writes([each])
            elif isinstance(each, SaveInHand) and not each.planned:
                self._end_unplanned(each, why)

    def _is_over(self) -> bool:
        """Whether nothing comes back any more."""
        return self._board.stopped and not self._board.inbox and not self._board.saves

    def _retry_is_due(self) -> bool:
        board = self._board
        return bool(board.off) and not board.broken and board.clock() >= board.retry_at

    def _retry_in_s(self) -> float | None:
        board = self._board
        if not board.off or board.broken:
            return None
        return max(0.0, board.retry_at - board.clock())

    def _plan(self, save: SaveInHand) -> None:
        """Gives the blocks of a save their slots, and queues the writes."""
        board, job = self._board, save.job
        with board.lock:
            if save.ended:
                return
            if board.off:
                self._end_unplanned(save, board.off)
                return
            fresh = self._take_pending(save)
        try:
            stretches = board.pool.take_slots(job.arena, len(fresh))
        except (ConfigError, NoRoomError, OSError) as error:
            with board.lock:
                if isinstance(error, NoRoomError):
                    board.saves_dropped += len(fresh)
                elif isinstance(error, OSError):
                    save.failure = f"no segment can be begun: {error.strerror}"
                    board.switch_off(save.failure, error)
                else:
                    save.failure = str(error)
                board.end_blocks(save, fresh, "no room")
                self._let_go(save)
            return
        with board.lock:
            for write in self._writes_of(save, fresh, stretches):
                write.segment.writes += 1
                board.queue_write(write)
                if board.stopped:  # Nobody may be left to write it.
                    board.drop_writes([write])
            self._let_go(save)
            if board.pool.has_gone():
                board.signal()
        board.pool.give_back(stretches)

    def _end_unplanned(self, save: SaveInHand, why: str) -> None:
        save.failure = why
        save.faults = dict.fromkeys(range(len(save.digests)), _UNREADABLE)
        self._board.end_save(save)

    def _take_pending(self, save: SaveInHand) -> list[int]:
        """The positions that this save has to write; for others it waits, or they are there."""
        board = self._board
        save.planned = True
        save.left = 1  # Until all of it is planned.
        fresh = []
        for position, digest in enumerate(save.digests):
            waiting = board.pending.get(digest)
            if waiting is not None:
                waiting.append((save, position))
            elif save.load is None and digest in board.pool.index:
                continue
            else:
                board.pending[digest] = []
                fresh.append(position)
            save.left += 1
        return fresh

    def _let_go(self, save: SaveInHand) -> None:
        save.left -= 1
        if save.left == 0:
            self._board.end_save(save)

    def _writes_of(
        self, save: SaveInHand, fresh: list[int], stretches: Sequence[Stretch]
    ) -> list[RunToWrite]:
        writes = []
        done = 0
        for segment, first, count in stretches:
            step = self._board.run_slots(segment, len(fresh))
            for start in range(0, count, step):
                taken = fresh[done : done + min(step, count - start)]
                writes.append(RunToWrite(save, segment, first + start, taken))
                done += len(taken)
        return writes

    def _write_rows(self, writes: list[RunToWrite]) -> None:
        """Writes the rows of blocks that were written, then says that they are there."""
        board = self._board
        good = [write for write in writes if not write.failure]
        good.sort(key=lambda write: (write.segment.number, write.first))
        at = 0
        while at < len(good):
            segment = good[at].segment
            end = at
            while end < len(good) and good[end].segment is segment:
                end += 1
            try:
                self._write_rows_of(segment, good[at:end])
            except OSError as error:
                why = f"writing rows failed: {error.strerror}"
                self._switch_off(segment, why, error)
                for write in good[at:end]:
                    write.failure = why
            at = end
        with board.lock:
            self._end_writes(writes)

    def _write_rows_of(self, segment: DiskSegment, writes: list[RunToWrite]) -> None:
        """One write for rows that follow each other."""
        rows = seal_rows(np.concatenate([_rows_of(segment, write) for write in writes]))
        gaps = np.flatnonzero(np.diff(rows["slot"].astype(np.int64)) != 1) + 1
        fd = segment.open(os.O_WRONLY, self._calls)
        try:
            for each in np.split(rows, gaps):
                offset = Geometry.row_offset(int(each["slot"][0]))
                write_all(fd, [each.view(np.uint8).data], offset, self._calls)
        finally:
            os.close(fd)
        if not self._board.folder.is_ours():
            raise OSError(errno.ESTALE, "the folder was exchanged")
        segment.dirty = True

    def _end_writes(self, writes: Sequence[RunToWrite]) -> None:
        board = self._board
        for write in writes:
            write.ended = True
            write.segment.busy -= 1
            if not board.is_current(write.segment):
                write.failure = write.failure or "the folder was exchanged"
            if not write.failure:
                board.pause_s = board.retry_s
                digests = [write.save.digests[position] for position in write.positions]
                slots = range(write.first, write.first + len(digests))
                board.pool.index.add(write.segment, slots, digests, board.pool.segments)
            elif not write.save.failure and board.off:
                write.save.failure = write.failure
            board.end_blocks(write.save, write.positions, write.failure)
            write.segment.writes -= 1
            if write.segment.is_full and not write.segment.writes and write.segment.dirty:
                board.queue_write(SegmentToSync(write.segment))

    def _bury(self, row: RowToBury) -> None:
        """A block that failed its sums is not found again after a restart."""
        with self._board.lock:
            if row.segment.life != row.life or not self._board.is_current(row.segment):
                return
        try:
            fd = row.segment.open(os.O_WRONLY, self._calls)
            try:
                zeros = memoryview(bytes(ROW_BYTES))
                write_all(fd, [zeros], Geometry.row_offset(row.slot), self._calls)
            finally:
                os.close(fd)
        except OSError as error:
            self._switch_off(row.segment, f"writing rows failed: {error.strerror}", error)

    def _try_again(self) -> None:
        """Whether the folder can be written again; if it was exchanged, it is read anew."""
        board = self._board
        try:
            if board.folder.is_ours():
                pool = board.pool
                probe_direct(board.folder.fd, self._calls)
            else:
                board.folder.lock_again()
                pool = self._take_folder()
            pool.generations.save()
        except (OSError, PenstockError):
            with board.lock:
                board.retry_at = board.clock() + board.pause_s
                board.pause_s = min(2 * board.pause_s, PAUSE_MAX_S)
            return
        with board.lock:
            exchanged = pool is not board.pool
            board.pool = pool
            board.off, board.reads_off, board.read_failures = "", False, 0
            logger.warning("the disk tier in %s is on again", board.folder.path)
            board.change_state()
        if exchanged and self._threads:
            self._start(self._recover, "recovery")

    # Recovery

    def _recover(self) -> None:
        board = self._board
        pool = board.pool
        more, told = True, 0
        while more and not board.stopped:
            more = self.recover_next(pool)
            if not more or (pool.rows_known - told) * NEWS_OF_RECOVERY >= pool.rows_found:
                told = pool.rows_known
                with board.lock:
                    board.change_state()

    def recover_next(self, pool: SegmentPool) -> bool:
        """Finds the blocks of one more table; false if there is none."""
        try:
            return pool.recover_next()
        except OSError as error:
            with self._board.lock:
                self._board.fail_read(error)
            return True
        except Exception as error:  # noqa: BLE001 - a thread that ends silently loses blocks
            with self._board.lock:
                self._board.break_down(error)
            return False


def _rows_of(segment: DiskSegment, write: RunToWrite) -> NDArray[np.void]:
    job, first = write.save.job, write.first
    return make_rows(
        segment,
        range(first, first + len(write.positions)),
        job.space,
        [job.keys[position] for position in write.positions],
        [job.parents[position] for position in write.positions],
        write.trailer_sums,
        now=time.time(),
    )
