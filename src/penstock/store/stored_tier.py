"""What disk and shared tiers have in common: jobs in hand, their threads, and whether they are on.

A job is a save or a load. It is in hand from the call that brings it to its report. It becomes
runs of blocks, each of which a thread reads or writes; the last one that ends reports the job.

    caller's thread    takes jobs in, looks blocks up, reports
    workers            take runs from the queues, reads first (`work`)
    keeper             does what time or others ask for, and tries again while it is off

`lock` guards all records; methods want it held unless they say that they take it. Nobody holds it
during I/O. Without threads (`stepped`), a simulator takes their steps instead, in any order.

The rules:

- A job is reported once, and after its last run.
- An arena slot is touched only by a run that its job waits for.
- No error leaves a job in hand. What the disk or the store refuses switches the tier off for a
  while; anything else is an error of ours, is logged, and switches it off for good.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.movers.packing import PackedSums
from penstock.store.base import EndedJob, StoreTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.store.base import LoadJob, MappedArena, SaveJob
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import Key

logger = logging.getLogger(__name__)

RETRY_S, PAUSE_MAX_S = 1.0, 60.0
"""Before a tier that is off is tried again; the pause doubles each time."""
FAILURES_MAX = 3
"""Failures one after the other before the tier goes off; one alone is no reason."""
THREADS_END_S = 0.5
"""What `close` keeps of its time for calls that are under way at its deadline."""
UNREADABLE = BlockFault.UNREADABLE


@dataclass(slots=True, eq=False)
class JobInHand:
    """A save or a load in hand."""

    job: SaveJob | LoadJob
    nbytes: int = 0
    """That it adds to those in hand."""
    left: int = 0
    """What it waits for: its runs, or its blocks that are not written."""
    faults: dict[int, BlockFault] = field(default_factory=dict)
    failure: str = ""

    def fail(self) -> None:
        """None of its blocks is read or written."""
        self.faults = dict.fromkeys(range(len(self.job.keys)), UNREADABLE)

    def report(self) -> EndedJob:
        all_failed = len(self.faults) == len(self.job.keys)
        return _ended(self.job.ticket, self.faults, self.failure if all_failed else "")


def _ended(ticket: int, faults: dict[int, BlockFault], failure: str) -> EndedJob:
    return EndedJob(ticket, tuple(sorted(faults.items())), failure)


@dataclass(slots=True, eq=False)
class RunOfBlocks:
    """Blocks of a job, for one call."""

    job: JobInHand
    positions: list[int]

    @property
    def keys(self) -> list[Key]:
        return [self.job.job.keys[position] for position in self.positions]

    @property
    def slots(self) -> NDArray[np.int32]:
        """Of the arena."""
        slots = self.job.job.slots
        return np.array([slots[position] for position in self.positions], dtype=np.int32)

    def is_like(self, other: RunOfBlocks) -> bool:
        """Whether one call could move both: they differ in keys and slots alone."""
        one, two = self.job.job, other.job.job
        return one.arena is two.arena and (one.space, one.salt) == (two.space, two.salt)

    @property
    def all_unreadable(self) -> dict[int, BlockFault]:
        """The faults of a run of which nothing was done, by position in it."""
        return dict.fromkeys(range(len(self.positions)), UNREADABLE)


class SumsOfArenas:
    """What computes the sums of blocks in an arena; made once for each and algorithm."""

    KEPT = 64

    def __init__(self) -> None:
        self._made: dict[tuple[int, Algorithm], tuple[MappedArena, PackedSums]] = {}

    def of(self, arena: MappedArena, algorithm: Algorithm) -> PackedSums:
        """Several threads may ask; the worst is that it is made twice."""
        found = self._made.get((id(arena), algorithm))
        if found is not None:
            return found[1]
        made = PackedSums(arena.host.layout, algorithm)
        if len(self._made) >= self.KEPT:
            self._made = {}
        self._made[id(arena), algorithm] = (arena, made)
        return made

    def forget(self, arena: MappedArena) -> None:
        self._made = {at: each for at, each in self._made.items() if each[0] is not arena}


TaskT = TypeVar("TaskT")


class StoredTier(StoreTier, Generic[TaskT]):
    """The jobs, threads and state of a tier, whatever it is stored in."""

    off_line = "%s is off: %s; next try after %s"
    """How the log says that it is off."""

    def __init__(
        self,
        name: str,
        *,
        lock: threading.Lock,
        workers: int,
        queue_bytes: int,
        retry_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        """What the log calls it."""
        self.lock = lock
        self.clock = clock
        self.work_ready = threading.Condition(lock)
        self.keeper_ready = threading.Condition(lock)
        self.idle = threading.Condition(lock)
        """Of who waits for a job, or for a block that another one writes."""
        self.idle_workers = workers
        self.descriptor = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = True
        self.jobs: dict[int, JobInHand] = {}
        self.reads: deque[TaskT] = deque()
        self.writes: deque[TaskT] = deque()
        self.queue_bytes = queue_bytes
        self.in_hand_bytes = 0
        self.ended: list[EndedJob] = []
        self.sums = SumsOfArenas()
        self.state_changed = True
        self.closing = self.stopped = self.closed = False
        self.off = ""
        """Why no jobs are taken, if so."""
        self.broken = False
        """After an error of ours: it does not come on again."""
        self.failures = 0
        """Those one after the other."""
        self.retry_s = self.pause_s = retry_s
        self._retry_at = 0.0
        self.saves_dropped = self.blocks_corrupt = 0
        self.running: list[threading.Thread] = []

    # Jobs

    def has_room(self, job: SaveJob, nbytes: int) -> bool:
        """Whether a save is not too much beside those in hand; if it is, it is reported so."""
        if not self.in_hand_bytes or self.in_hand_bytes + nbytes <= self.queue_bytes:
            return True
        self.saves_dropped += len(job.keys)
        self.refuse(job)
        return False

    def take_in_hand(self, job: JobInHand) -> None:
        self.jobs[job.job.ticket] = job
        self.in_hand_bytes += job.nbytes

    def refuse(self, job: SaveJob | LoadJob, failure: str = "") -> None:
        """Reports a job of which nothing is done."""
        self.report(job.ticket, dict.fromkeys(range(len(job.keys)), UNREADABLE), failure)

    def report(self, ticket: int, faults: dict[int, BlockFault], failure: str = "") -> None:
        self.ended.append(_ended(ticket, faults, failure))
        self.signal()

    def end_run(self, run: RunOfBlocks, faults: dict[int, BlockFault], failure: str = "") -> None:
        """A run is over; `faults` are by position in it."""
        job = run.job
        job.faults |= {run.positions[place]: fault for place, fault in faults.items()}
        job.failure = job.failure or failure
        job.left -= 1
        if job.left == 0:
            self.end_job(job)

    def end_job(self, job: JobInHand) -> None:
        del self.jobs[job.job.ticket]
        self.in_hand_bytes -= job.nbytes
        self.ended.append(job.report())
        self.signal()
        self.idle.notify_all()

    def drop_runs(self, job: JobInHand | None = None) -> None:
        """Ends runs that no thread has begun: those of a job, or all."""
        for queue in (self.reads, self.writes):
            for each in list(queue):
                if isinstance(each, RunOfBlocks) and job in (None, each.job):
                    queue.remove(each)
                    self.drop_run(each)

    def drop_run(self, run: RunOfBlocks) -> None:
        """Ends a run that was taken out of its queue."""
        self.end_run(run, run.all_unreadable)

    def collect(self) -> list[EndedJob]:
        """The jobs that have ended since the last call; takes the lock."""
        with self.lock:
            ended, self.ended = self.ended, []
            self.settle()
        return ended

    # News

    def change_state(self) -> None:
        self.state_changed = True
        self.signal()

    def signal(self) -> None:
        # Each call of the kernel gives away the interpreter's lock while others wait for ours.
        if not (self.closed or self._signalled):
            self._signalled = True
            os.eventfd_write(self.descriptor, 1)

    def has_news(self) -> bool:
        return bool(self.ended or self.state_changed)

    def settle(self) -> None:
        """Makes `descriptor` silent if all news was taken."""
        if self._signalled and not (self.closed or self.has_news()):
            self._signalled = False
            os.eventfd_read(self.descriptor)

    # Whether it is on

    @property
    def retry_at(self) -> float:
        """When it is tried again; never, if it is on or broken."""
        return self._retry_at if self.off and not self.broken else math.inf

    def switch_off(self, why: str) -> None:
        """Takes no jobs until it was tried again with success."""
        if self.off:
            return
        self.off = why
        after = "that" if self.broken else f"{self.pause_s:g} s"
        logger.error(self.off_line, self.name, why, after)
        self.put_off_retry()
        self.change_state()
        self.keeper_ready.notify()

    def put_off_retry(self) -> None:
        self._retry_at = self.clock() + self.pause_s
        self.pause_s = min(2 * self.pause_s, PAUSE_MAX_S)

    def switch_on(self) -> None:
        """It was tried again with success."""
        self.failures = 0
        if not self.broken:
            self.off = ""
            self.change_state()

    def break_down(self, error: Exception) -> str:
        """An error of ours: off for good."""
        what = f"unexpected {type(error).__name__}: {error}"
        why = f"{what}; off until process {os.getpid()} is restarted"
        logger.error("%s fails", self.name, exc_info=error)
        if not self.broken:
            self.off = ""  # It may be off for something after which it would be tried again.
        self.broken = True
        self.switch_off(why)
        return why

    # Threads; these methods take the lock

    def start(self, body: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._run, args=(body,), daemon=True, name=name)
        self.running.append(thread)
        thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            # A thread that ends silently leaves its jobs in hand for ever.
            with self.lock:
                self.break_down(error)
            raise

    def next_task(self, *, may_read: bool = True, may_write: bool = True) -> TaskT | None:
        """What a worker does next: reads go first."""
        if may_read and self.reads:
            return self.reads.popleft()
        return self.writes.popleft() if may_write and self.writes else None

    def work(
        self,
        do: Callable[[TaskT], None],
        ready: threading.Condition,
        *,
        may_read: bool = True,
        may_write: bool = True,
    ) -> None:
        """Does tasks until all is over; `ready` is notified of those that it may do."""
        while True:
            with self.lock:
                while not (task := self.next_task(may_read=may_read, may_write=may_write)):
                    if self.stopped:
                        return
                    ready.wait()
                self.idle_workers -= 1
            do(task)
            with self.lock:
                self.idle_workers += 1

    def is_over(self) -> bool:
        """Whether the keeper has nothing to do any more."""
        return self.stopped

    def keep_on(self, turn: Callable[[], None], due_at: Callable[[], float]) -> None:
        """Takes the keeper's turn whenever one is due, until all is over."""
        while True:
            with self.lock:
                # How long to wait changes while it waits: when the tier goes off.
                while not self.is_over() and (wait_s := due_at() - self.clock()) > 0:
                    self.keeper_ready.wait(min(wait_s, threading.TIMEOUT_MAX))
                if self.is_over():
                    return
            turn()

    # The end; takes the lock

    def close(self, *, deadline: float) -> None:
        """Ends what is in hand and gives everything back by `deadline`."""
        with self.lock:
            if self.closing:
                return
            self.closing = True
            self.begin_end()
            left_s = deadline - THREADS_END_S - time.monotonic()
            self.idle.wait_for(lambda: not self.jobs, max(0.0, left_s))
            self.drop_runs()
            self.drop_rest()
            self.stopped = True
            self.work_ready.notify_all()
            self.keeper_ready.notify_all()
        for thread in self.running:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.release(deadline, in_call=any(thread.is_alive() for thread in self.running))
        with self.lock:
            self.closed = True
        os.close(self.descriptor)

    def begin_end(self) -> None:
        """What `close` does first."""

    def drop_rest(self) -> None:
        """Ends what is in hand without a run, and wakes threads that wait for it to end."""

    def release(self, deadline: float, *, in_call: bool) -> None:
        """Gives back what it is stored in; `in_call`: a thread has not come back in time."""
        raise NotImplementedError
