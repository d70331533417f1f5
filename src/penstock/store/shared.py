"""A tier in a store that many engines share: Redis, Mooncake Store, S3 and their like.

Blocks are values of that store (`shared_value`), read and written by a client (`blobs`). Who does
what:

    caller's thread    takes jobs and questions in, and reports (`SharedTier`)
    workers            ask, read and write (`shared_workers`)
    keeper             knows what counts (`shared_keeper`)

Nothing that the store says is believed: bytes are verified, and a value that is not what it should
be is a miss, counted and removed. A store that is slow or away costs a question `ask_s` and a copy
its deadline; after some failures in a row the tier is off, and costs nothing until the store
answers again.

The one rule: an arena slot is touched only by a call that its job waits for.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.base import EndedJob, FoundBlocks, Page, TierState
from penstock.store.shared_board import RETRY_S, Question, SharedBoard, VoidInHand
from penstock.store.shared_geometry import EngineGeometry
from penstock.store.shared_keeper import SharedKeeper
from penstock.store.shared_workers import SharedWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import (
        FindJob,
        GoneBlocks,
        LoadJob,
        MappedArena,
        NewGeneration,
        SaveJob,
        Space,
    )
    from penstock.store.blobs import BlobStore
    from penstock.vocabulary.ids import Key

logger = logging.getLogger(__name__)

ASK_S = 0.05
"""How long a request waits for the answer to what is there."""
TIMEOUT_S = 2.0
"""Of one call of the client that reads or writes."""
POLL_S = 1.0
"""How often generations and geometries of spaces in use are read."""
ABSENT_S = 1.0
"""How long what was not there is not asked for again."""
QUEUE_BYTES = 256 << 20
"""Of saves in hand: more are dropped."""
THREADS_END_S = 0.5
"""What `close` keeps of its time for calls that are under way at its deadline."""
GIB = 1 << 30
_UNREADABLE = BlockFault.UNREADABLE


class SharedTier:
    """A `StoreTier` over a client of a shared store. `close` it, or its threads stay."""

    def __init__(
        self,
        blobs: BlobStore,
        *,
        ask_s: float = ASK_S,
        timeout_s: float = TIMEOUT_S,
        poll_s: float = POLL_S,
        absent_s: float = ABSENT_S,
        retry_s: float = RETRY_S,
        queue_bytes: int = QUEUE_BYTES,
        compress: bool = False,
        clock: Callable[[], float] = time.monotonic,
        stepped: bool = False,
    ) -> None:
        """Takes the client; it is closed with the tier."""
        self._blobs = blobs
        self._board = SharedBoard(
            copiers=max(2, blobs.threads),
            ask_s=ask_s,
            timeout_s=timeout_s,
            poll_s=poll_s,
            absent_s=absent_s,
            retry_s=retry_s,
            queue_bytes=queue_bytes,
            clock=clock,
        )
        self._keeper = SharedKeeper(self._board, blobs)
        self._workers = SharedWorkers(self._board, blobs, compress=compress)
        tasks = [] if stepped else [self._keeper.keep, *self._workers.tasks()]
        self._threads = [
            threading.Thread(target=self._run_thread, args=(task,), name="shared tier", daemon=True)
            for task in tasks
        ]
        for thread in self._threads:
            thread.start()

    def _run_thread(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            # A thread that ends silently leaves its jobs in hand for ever.
            logger.exception("shared tier fails")
            with self._board.lock:
                self._board.switch_off(f"unexpected {type(error).__name__}: {error}")
                self._board.retry_at = math.inf
            raise

    @property
    def descriptor(self) -> int:
        return self._board.event

    def attach(self, name: bytes, arenas: Sequence[MappedArena]) -> None:
        own = EngineGeometry.of(arenas).names
        with self._board.lock:
            use = self._board.use(name)
            use.own[own] = list(arenas)
            use.gathered = {at: each for at, each in use.gathered.items() if at[0] != own}
            use.read_at = -math.inf
            fresh = [each for each in arenas if id(each) not in self._board.registered]
            self._board.registered |= {id(each): each for each in fresh}
            self._board.keeper_ready.notify()
        for arena in fresh:
            self._blobs.register(arena.host.arena.bytes.data)

    def detach(self, arena: MappedArena) -> None:
        with self._board.lock:
            known = self._board.registered.pop(id(arena), None)
            for use in self._board.spaces.values():
                gone = [at for at, arenas in use.own.items() if arena in arenas]
                for at in gone:
                    del use.own[at]
                use.gathered = {at: each for at, each in use.gathered.items() if at[0] not in gone}
            self._board.sums.forget(arena)
        if known is not None:
            self._blobs.unregister(arena.host.arena.bytes.data)

    def save(self, job: SaveJob) -> None:
        nbytes = len(job.keys) * job.arena.host.layout.block_bytes
        with self._board.lock:
            if (
                self._board.saving_bytes
                and self._board.saving_bytes + nbytes > self._board.queue_bytes
            ):
                self._board.saves_dropped += len(job.keys)
                self._board.report_all(job, _UNREADABLE)
                return
            taken = self._board.take(job, nbytes)
            if taken is not None:
                self._board.saving_bytes += nbytes
                self._board.writes += self._board.runs(taken, job.arena.host.layout.block_bytes)
                self._board.work_ready.notify_all()

    def load(self, job: LoadJob) -> None:
        with self._board.lock:
            taken = self._board.take(job, 0)
            if taken is not None:
                self._board.reads += self._board.runs(taken, job.arena.host.layout.block_bytes)
                self._board.work_ready.notify_all()

    def cancel(self, ticket: int) -> None:
        with self._board.lock:
            job = self._board.jobs.get(ticket)
            if job is not None:
                self._board.drop_runs(
                    [run for run in self._board.reads if run.job is job], self._board.reads
                )
                self._board.drop_runs(
                    [run for run in self._board.writes if run.job is job], self._board.writes
                )

    def collect(self) -> list[EndedJob]:
        with self._board.lock:
            ended, self._board.ended = self._board.ended, []
            self._board.settle()
            return ended

    def seek(self, job: FindJob) -> None:
        own = EngineGeometry.of(job.arenas).names
        now = self._board.clock()
        with self._board.lock:
            use = self._board.use(job.space.name)
            use.own.setdefault(own, list(job.arenas))
            question = Question(job, own, now + self._board.ask_s, 0)
            there = self._board.walk(question, now)
            counts = use.generation == job.space.generation
            if self._board.off or self._board.closing or not counts:
                question.start, question.foreign, there = 0, False, False
            if not there:
                self._board.answer(question)
                return
            self._board.asked.append(question)
            self._board.questions.append(question)
            self._board.work_ready.notify_all()
            self._board.keeper_ready.notify()

    def take_found(self) -> list[FoundBlocks]:
        with self._board.lock:
            found, self._board.found = self._board.found, []
            self._board.settle()
            return found

    def take_generations(self) -> list[NewGeneration]:
        with self._board.lock:
            changed, self._board.changed = self._board.changed, {}
            self._board.settle()
            return list(changed.values())

    def find(self, space: Space, part: bytes, keys: Sequence[Key]) -> list[bool]:
        now = self._board.clock()
        with self._board.lock:
            use = self._board.spaces.get(space.name)
            owns = [
                own
                for own, arenas in (use.own.items() if use else ())
                if any(arena.part == part for arena in arenas)
            ]
            return [any(self._board.is_known(space, own, key, now) for own in owns) for key in keys]

    def page(
        self,
        space: Space,  # noqa: ARG002 - nothing is listed
        part: bytes,  # noqa: ARG002
        cursor: int | None,  # noqa: ARG002
        limit: int,  # noqa: ARG002
    ) -> Page:
        return Page([], [], None)

    def take_gone(self) -> list[GoneBlocks]:
        return []

    def generation(self, name: bytes) -> int | None:
        with self._board.lock:
            return self._board.use(name).generation

    def void(self, name: bytes) -> int | None:
        with self._board.lock:
            void = self._board.voiding.get(name)
            if void is not None and void.kept and void.written is not None:
                del self._board.voiding[name]
                return void.written.current
            if self._board.off:
                raise UnavailableError(f"the generation cannot be written: {self._board.off}")
            if void is None:
                self._begin_void(name)
            return None

    def void_anew(self, name: bytes) -> None:
        with self._board.lock:
            void = self._board.voiding.get(name)
            if void is not None and void.written is not None:
                self._begin_void(name)

    def _begin_void(self, name: bytes) -> None:
        changed = self._board.changed.get(name)
        if changed is not None and changed.unkept:
            del self._board.changed[name]  # By the reset before this one.
        self._board.voiding[name] = VoidInHand()
        self._board.keeper_ready.notify()

    def expect(self, name: bytes, generation: int) -> None:
        with self._board.lock:
            if not self._board.generations.expect(name, generation):
                use = self._board.use(name)
                use.generation, use.read_at = None, -math.inf
                self._board.changed.pop(name, None)
                self._board.keeper_ready.notify()

    def state(self) -> TierState:
        with self._board.lock:
            self._board.state_changed = False
            self._board.settle()
            return TierState(
                on=not self._board.off,
                why=self._board.off,
                blocks=self._board.blocks_written,
                block_bytes=self._board.bytes_written,
                saves_dropped=self._board.saves_dropped,
                blocks_corrupt=self._board.blocks_corrupt,
            )

    def close(self, *, deadline: float) -> None:
        with self._board.lock:
            if self._board.closing:
                return
            self._board.closing = True
            for question in self._board.asked:
                self._board.answer(question)
            end = deadline - THREADS_END_S
            while self._board.jobs and (left := end - time.monotonic()) > 0:
                self._board.idle.wait(left)
            self._board.drop_runs(list(self._board.reads), self._board.reads)
            self._board.drop_runs(list(self._board.writes), self._board.writes)
            self._board.stopped = True
            self._board.work_ready.notify_all()
            self._board.keeper_ready.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("a shared tier was closed during a call of its client")
        else:
            self._blobs.close()
        with self._board.lock:
            self._board.closed = True
        os.close(self._board.event)
