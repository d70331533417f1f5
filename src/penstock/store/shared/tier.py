"""A tier in a store that many engines share, and its thread that knows which values count.

It reads the generation of each space in use and the geometries of the engines that write there,
ends questions that take too long, and asks a store that did not answer whether it does now.

A *generation* is a random number in a record of the store (`generations`). Where the record was
lost, or is one of earlier, whoever sees it draws another one, and no block of before is found: that
is a reset, never the undoing of one.

Blocks are values of that store (`values`), read and written by a client (`blobs`). Who does
what:

    caller's thread    takes jobs and questions in, and reports (`SharedTier`)
    workers            ask, read and write (`workers`)
    keeper             knows what counts

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
import secrets
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache.operations import BlockFault
from penstock.errors import UnavailableError
from penstock.store.base import DIGEST_BYTES, EndedJob, FoundBlocks, NewGeneration, Page, TierState
from penstock.store.clients.blobs import BlobStoreError, NotKeptError
from penstock.store.shared.board import (
    NUMBER_BYTES,
    RETRY_MAX_S,
    RETRY_S,
    USED_S,
    Lineage,
    Question,
    SharedBoard,
    SpaceUse,
    VoidInHand,
)
from penstock.store.shared.values import (
    RECORD_BYTES_MAX,
    EngineGeometry,
    generation_name,
    geometry_name,
)
from penstock.store.shared.workers import SharedWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import FindJob, GoneBlocks, LoadJob, MappedArena, SaveJob, Space
    from penstock.store.clients.blobs import BlobStore
    from penstock.vocabulary.keys import Key


logger = logging.getLogger(__name__)

GEOMETRIES_MAX = 16
"""Ways to cut the blocks of one model that are known at a time."""
UNKEPT_RETRY_MAX_S = 5.0
"""Before a store is asked again whether a replica has a reset: one write each time."""


class SharedKeeper:
    """What the keeper does."""

    def __init__(self, board: SharedBoard, blobs: BlobStore) -> None:
        self._board = board
        self._blobs = blobs
        self.draw: Callable[[int], bytes] = secrets.token_bytes
        """Random bytes for generations; a simulator has its own."""
        self._parsed: dict[bytes, EngineGeometry] = {}
        """Records as they were read: they hardly change, and are read every second."""

    def keep(self) -> None:
        while True:
            with self._board.lock:
                while not self._board.stopped and (wait_s := self.wait_s()) > 0:
                    self._board.keeper_ready.wait(wait_s)
                if self._board.stopped:
                    return
            self.turn()

    def turn(self) -> None:
        """Does what is due."""
        with self._board.lock:
            now = self._board.clock()
            for question in [each for each in self._board.asked if now >= each.until]:
                # A worker may still be at it: what it finds is noted for the next one.
                self._board.answer(question)
                self._board.asked.remove(question)
            probes = bool(self._board.off) and now >= self._board.retry_at
            due = [use for use in self._board.spaces.values() if now >= self._due_at(use)]
            voids = [
                name
                for name, void in self._board.voiding.items()
                if not void.kept and now >= void.retry_at
            ]
        if probes:
            self._probe()
        elif not self._board.off:
            for use in due:
                self._refresh(use)
            for name in voids:
                self._write_generation(name)

    def wait_s(self) -> float:
        """How long nothing is due; the lock is held."""
        now = self._board.clock()
        at = min((each.until for each in self._board.asked), default=math.inf)
        if self._board.off:
            at = min(at, self._board.retry_at)
        else:
            voids = (each.retry_at for each in self._board.voiding.values() if not each.kept)
            at = min([at, *voids, *map(self._due_at, self._board.spaces.values())])
        return min(max(0.0, at - now), threading.TIMEOUT_MAX)

    def _due_at(self, use: SpaceUse) -> float:
        """When a space is read again; never, if nobody uses it."""
        at = use.read_at + self._board.poll_s
        return at if at <= use.used_at + USED_S else math.inf

    def _probe(self) -> None:
        """Asks a store that did not answer whether it does now.

        It may have lost what it had, so it counts as back when it was asked which generations do.
        """
        board = self._board
        with board.lock:
            used = [use for use in board.spaces.values() if self._due_at(use) < math.inf]
        try:
            for use in used:
                self._read_space(use)
            if not used:
                self._blobs.get(generation_name(bytes(DIGEST_BYTES)), timeout_s=board.timeout_s)
        except BlobStoreError as error:
            with board.lock:
                board.off = str(error)
                board.retry_at = board.clock() + board.pause_s
                board.pause_s = min(2 * board.pause_s, RETRY_MAX_S)
        else:
            with board.lock:
                board.succeed()

    def _refresh(self, use: SpaceUse) -> None:
        try:
            self._read_space(use)
        except BlobStoreError as error:
            with self._board.lock:
                use.read_at = self._board.clock()
                self._board.fail(error)
        else:
            with self._board.lock:
                self._board.succeed()

    def _read_space(self, use: SpaceUse) -> None:
        """Reads which generation counts and who writes how; announces the engines here."""
        lineage = self._read_generation(use.name)
        with self._board.lock:
            if not self._take_generation(use, lineage):
                return  # An engine has just told of a later one: it is read again at once.
            space, owns = use.space, list(use.own.values())
        geometries = self._read_geometries(space, [EngineGeometry.of(arenas) for arenas in owns])
        with self._board.lock:
            use.read_at = self._board.clock()
            if use.generation == space.generation:
                use.geometries = geometries

    def _read_generation(self, name: bytes) -> Lineage:
        """The generation that counts: that of the record, or a new one where that is of no use."""
        record_name, timeout_s = generation_name(name), self._board.timeout_s
        record = self._blobs.get(record_name, timeout_s=timeout_s)
        if record is None:
            fresh = self._draw(name, None)
            if self._blobs.create(record_name, fresh.to_record(name), timeout_s=timeout_s):
                return fresh
            record = self._blobs.get(record_name, timeout_s=timeout_s)
        read = None if record is None else Lineage.from_record(name, record)
        with self._board.lock:
            if read is not None and self._board.generations.accepts(name, read):
                return read
        logger.warning(
            "shared tier: the record of the generation %s; a new one is begun, and no block of "
            "before is found",
            "cannot be read" if read is None else "is not one that followed the last known here",
        )
        fresh = self._draw(name, read)
        self._replace(name, fresh)  # Nobody waits for it to be kept: if lost, it is begun anew.
        return fresh

    def _replace(self, name: bytes, lineage: Lineage) -> str:
        """Writes the record; why the store may still lose it, or an empty text."""
        record, timeout_s = lineage.to_record(name), self._board.timeout_s
        try:
            self._blobs.replace(generation_name(name), record, timeout_s=timeout_s)
        except NotKeptError as error:
            return str(error)
        return ""

    def _draw(self, name: bytes, read: Lineage | None) -> Lineage:
        """A generation that comes after all that are known."""
        # One bit less: messages of the store process have signed numbers.
        number = int.from_bytes(self.draw(NUMBER_BYTES), "little") >> 1
        with self._board.lock:
            return self._board.generations.successor(name, number, read)

    def _take_generation(self, use: SpaceUse, lineage: Lineage, unkept: str = "") -> bool:
        """Follows a generation, unless one is known that it does not come after."""
        if not self._board.generations.accepts(use.name, lineage):
            use.read_at = -math.inf
            return False
        self._board.generations.follow(use.name, lineage)
        if use.generation != lineage.current:
            use.generation = lineage.current
            use.geometries, use.gathered = [], {}
            self._board.changed[use.name] = NewGeneration(use.name, lineage.current, unkept)
            self._board.signal()
        return True

    def _write_generation(self, name: bytes) -> None:
        """Begins a new generation, or has the store keep the one that was begun."""
        timeout_s = self._board.timeout_s
        with self._board.lock:
            void = self._board.voiding[name]
            written = void.written
        try:
            record = self._blobs.get(generation_name(name), timeout_s=timeout_s)
            read = None if record is None else Lineage.from_record(name, record)
            if written is not None and read is not None and read.descends_from(written.current):
                lineage = read  # Written again: a store says only of what it just wrote who has it.
            else:
                lineage = self._draw(name, read)
            unkept = self._replace(name, lineage)
        except BlobStoreError as error:
            with self._board.lock:
                self._board.fail(error)
            return
        with self._board.lock:
            self._note_written(name, void, lineage, unkept)

    def _note_written(self, name: bytes, void: VoidInHand, lineage: Lineage, unkept: str) -> None:
        board = self._board
        use = board.use(name)
        use.read_at = -math.inf
        if board.voiding.get(name) is not void:
            self._take_generation(use, lineage)
            return  # Another reset came meanwhile: this one does not do.
        if not self._take_generation(use, lineage, unkept):
            return  # It is drawn again, after what an engine has told meanwhile.
        if unkept and void.written is None:
            logger.warning("shared tier: a reset is not kept yet: %s", unkept)
        void.written, void.kept = lineage, not unkept
        if unkept:
            void.retry_at = board.clock() + void.pause_s
            void.pause_s = min(2 * void.pause_s, UNKEPT_RETRY_MAX_S)
        else:
            board.changed.pop(name, None)
        board.signal()

    def _read_geometries(
        self, space: Space, owns: Sequence[EngineGeometry]
    ) -> list[EngineGeometry]:
        """The ways in which engines cut their blocks; those of engines here are announced."""
        found: dict[int, EngineGeometry] = {}
        free: list[int] = []
        for number in range(GEOMETRIES_MAX):
            record = self._blobs.get(geometry_name(space, number), timeout_s=self._board.timeout_s)
            if record is None:
                free.append(number)
                if len(free) > len(owns) + 1:
                    break
                continue
            try:
                found[number] = self._parse(record)
            except ValueError as error:
                logger.warning("shared tier: geometry %d cannot be read: %s", number, error)
                # Whose it was announces it again.
                self._blobs.forget([geometry_name(space, number)], timeout_s=self._board.timeout_s)
                free.append(number)
        known = {each.names for each in found.values()}
        for own in owns:
            if own.names not in known:
                self._announce(space, own, free)
        return list(found.values())

    def _parse(self, record: bytes) -> EngineGeometry:
        geometry = self._parsed.get(record)
        if geometry is None:
            geometry = EngineGeometry.from_record(record)
            if len(self._parsed) >= 2 * GEOMETRIES_MAX:
                self._parsed.clear()
            self._parsed[record] = geometry
        return geometry

    def _announce(self, space: Space, own: EngineGeometry, free: list[int]) -> None:
        record = own.to_record()
        if len(record) > RECORD_BYTES_MAX:
            logger.warning(
                "shared tier: a geometry takes %d bytes, at most %d can be announced: only engines "
                "with equal ranks find its blocks",
                *(len(record), RECORD_BYTES_MAX),
            )
            return
        while free:
            name = geometry_name(space, free.pop(0))
            if self._blobs.create(name, record, timeout_s=self._board.timeout_s):
                return
        logger.warning(
            "shared tier: %d geometries are announced, which is the most: only engines with equal "
            "ranks find the blocks of this one",
            GEOMETRIES_MAX,
        )


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
