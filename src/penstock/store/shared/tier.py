"""A tier in a store that many engines share.

Blocks are values of that store (`values`), read and written by a client (`blobs`). Who does
what:

    caller's thread    takes jobs and questions in, and reports (`SharedTier`)
    workers            ask, read and write (`workers`)
    keeper             knows which values count (`generations`)

Nothing that the store says is believed: bytes are verified, and a value that is not what it should
be is a miss, counted and removed. A store that is slow or away costs a question `ask_s` and a copy
its deadline; after some failures in a row the tier is off, and costs nothing until the store
answers again.

The one rule: a question is answered once, by the worker that asked or by the keeper when its time
is over.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.store.base import FoundBlocks, NewGeneration, TierState
from penstock.store.shared.generations import (
    USED_S,
    KnownGenerations,
    SharedKeeper,
    SpaceUse,
    VoidInHand,
)
from penstock.store.shared.values import EngineGeometry, gather, piece_of
from penstock.store.shared.workers import Known, Question, SharedWorkers, Where
from penstock.store.stored_tier import (
    FAILURES_MAX,
    RETRY_S,
    JobInHand,
    RunOfBlocks,
    StoredTier,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.store.base import FindJob, LoadJob, MappedArena, SaveJob, Space
    from penstock.store.clients.blobs import BlobStore, BlobStoreError
    from penstock.store.shared.values import Gathering
    from penstock.vocabulary.keys import Key


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
PRESENT_S = 10.0
"""How long what was there is not asked for again."""
UNREADABLE_S = 600.0
"""How long a value that cannot be decoded here is not read again: the codec comes with another
process, and a value written anew in the meantime is a miss more."""
RUN_BYTES = 8 << 20
"""Of one call that reads or writes, as far as a job allows."""
SPACES_MAX = 64
KNOWN_MAX = 200_000
"""Blocks of which is remembered whether they are there."""


class SharedTier(StoredTier[Question | RunOfBlocks]):
    """A `StoreTier` over a client of a shared store. `close` it, or its threads stay."""

    off_line = "%s is off: cause=%s; next try after %s"

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
        self.copiers = max(2, blobs.threads)
        """Threads that read; all but one also write, so that reads do not wait for writes."""
        super().__init__(
            "shared tier",
            lock=threading.Lock(),
            workers=1 + self.copiers,
            queue_bytes=queue_bytes,
            retry_s=retry_s,
            clock=clock,
        )
        self._blobs = blobs
        self.ask_s, self.timeout_s, self.poll_s = ask_s, timeout_s, poll_s
        self.absent_s = absent_s
        self.questions: deque[Question] = deque()
        self.asked: list[Question] = []
        """All that are not answered, the oldest first."""
        self.being_written: set[str] = set()
        self.found: list[FoundBlocks] = []
        self.changed: dict[bytes, NewGeneration] = {}
        """Spaces whose generation is news."""
        self.voiding: dict[bytes, VoidInHand] = {}
        """Spaces that are to be voided."""
        self.generations = KnownGenerations()
        self.spaces: OrderedDict[bytes, SpaceUse] = OrderedDict()
        self.known: OrderedDict[Known, tuple[float, Where | None]] = OrderedDict()
        """Until when it is believed, and where the block is; `None`: nowhere."""
        self.registered: dict[int, MappedArena] = {}
        self.blocks_written = self.bytes_written = 0
        self._keeper = SharedKeeper(self, blobs)
        self._workers = SharedWorkers(self, blobs, compress=compress)
        keep = lambda: self.keep_on(self._keeper.turn, self._keeper.due_at)  # noqa: E731
        for body in () if stepped else (keep, *self._workers.bodies()):
            self.start(body, "shared tier")

    # What the process calls; these methods take the lock

    def attach(self, name: bytes, arenas: Sequence[MappedArena]) -> None:
        own = EngineGeometry.of(arenas).names
        with self.lock:
            use = self.use(name)
            use.own[own] = list(arenas)
            use.gathered = {at: each for at, each in use.gathered.items() if at[0] != own}
            use.read_at = -math.inf
            fresh = [each for each in arenas if id(each) not in self.registered]
            self.registered |= {id(each): each for each in fresh}
            self.keeper_ready.notify()
        for arena in fresh:
            self._blobs.register(arena.host.arena.bytes.data)

    def detach(self, arena: MappedArena) -> None:
        with self.lock:
            known = self.registered.pop(id(arena), None)
            for use in self.spaces.values():
                gone = [at for at, arenas in use.own.items() if arena in arenas]
                for at in gone:
                    del use.own[at]
                use.gathered = {at: each for at, each in use.gathered.items() if at[0] not in gone}
            self.sums.forget(arena)
        if known is not None:
            self._blobs.unregister(arena.host.arena.bytes.data)

    def save(self, job: SaveJob) -> None:
        block_bytes = job.arena.host.layout.block_bytes
        nbytes = len(job.keys) * block_bytes
        with self.lock:
            if self.has_room(job, nbytes):
                self.writes += self._runs_of(job, nbytes, block_bytes)
                self.work_ready.notify_all()

    def load(self, job: LoadJob) -> None:
        with self.lock:
            self.reads += self._runs_of(job, 0, job.arena.host.layout.block_bytes)
            self.work_ready.notify_all()

    def cancel(self, ticket: int) -> None:
        with self.lock:
            job = self.jobs.get(ticket)
            if job is not None:
                self.drop_runs(job)

    def find(self, job: FindJob) -> None:
        own = EngineGeometry.of(job.arenas).names
        now = self.clock()
        with self.lock:
            use = self.use(job.space.name)
            use.own.setdefault(own, list(job.arenas))
            question = Question(job, own, now + self.ask_s, 0)
            there = self.walk(question, now)
            counts = use.generation == job.space.generation
            if self.off or self.closing or not counts:
                question.start, question.foreign, there = 0, False, False
            if not there:
                self.answer(question)
                return
            self.asked.append(question)
            self.questions.append(question)
            self.work_ready.notify_all()
            self.keeper_ready.notify()

    def take_found(self) -> list[FoundBlocks]:
        with self.lock:
            found, self.found = self.found, []
            self.settle()
            return found

    def take_generations(self) -> list[NewGeneration]:
        with self.lock:
            changed, self.changed = self.changed, {}
            self.settle()
            return list(changed.values())

    def generation(self, name: bytes) -> int | None:
        with self.lock:
            return self.use(name).generation

    def void(self, name: bytes) -> int | None:
        with self.lock:
            void = self.voiding.get(name)
            if void is not None and void.kept and void.written is not None:
                del self.voiding[name]
                return void.written.current
            if self.off:
                raise UnavailableError(f"the generation cannot be written: {self.off}")
            if void is None:
                self._begin_void(name)
            return None

    def void_anew(self, name: bytes) -> None:
        with self.lock:
            void = self.voiding.get(name)
            if void is not None and void.written is not None:
                self._begin_void(name)

    def _begin_void(self, name: bytes) -> None:
        changed = self.changed.get(name)
        if changed is not None and changed.unkept:
            del self.changed[name]  # By the reset before this one.
        self.voiding[name] = VoidInHand()
        self.keeper_ready.notify()

    def expect(self, name: bytes, generation: int) -> None:
        with self.lock:
            if not self.generations.expect(name, generation):
                use = self.use(name)
                use.generation, use.read_at = None, -math.inf
                self.changed.pop(name, None)
                self.keeper_ready.notify()

    def state(self) -> TierState:
        with self.lock:
            self.state_changed = False
            self.settle()
            return TierState(
                on=not self.off,
                why=self.off,
                blocks=self.blocks_written,
                block_bytes=self.bytes_written,
                saves_dropped=self.saves_dropped,
                blocks_corrupt=self.blocks_corrupt,
            )

    # The end

    def begin_end(self) -> None:
        for question in self.asked:
            self.answer(question)

    def release(self, deadline: float, *, in_call: bool) -> None:  # noqa: ARG002
        if in_call:
            logger.warning("a shared tier was closed during a call of its client")
        else:
            self._blobs.close()

    # Jobs and questions; these methods want the lock held

    def use(self, name: bytes) -> SpaceUse:
        now = self.clock()
        use = self.spaces.get(name)
        if use is None:
            if len(self.spaces) >= SPACES_MAX:
                self.spaces.popitem(last=False)
            use = self.spaces[name] = SpaceUse(name, now)
            self.keeper_ready.notify()
        elif now > use.used_at + USED_S:
            self.keeper_ready.notify()
        use.used_at = now
        self.spaces.move_to_end(name)
        return use

    def _runs_of(self, job: SaveJob | LoadJob, nbytes: int, block_bytes: int) -> list[RunOfBlocks]:
        """Takes a job in hand, in runs; none if it is reported at once, with why."""
        use, count = self.use(job.space.name), len(job.keys)
        why = self.off or ("the tier was closed" if self.closing else "")
        if not why and use.generation != job.space.generation:
            why = "its generation does not count any more"
        if why or not count:
            self.report(job.ticket, {}, why)
            return []
        taken = JobInHand(job, nbytes)
        self.take_in_hand(taken)
        at_once = max(1, RUN_BYTES // block_bytes)
        # A small job is dealt out, so that no thread is idle while another has all of it.
        size = min(at_once, max(1, -(-count // self.copiers)))
        runs = [
            RunOfBlocks(taken, list(range(at, min(at + size, count))))
            for at in range(0, count, size)
        ]
        taken.left = len(runs)
        return runs

    def next_task(
        self, *, may_read: bool = True, may_write: bool = True
    ) -> Question | RunOfBlocks | None:
        if self.questions:
            return self.questions.popleft()
        return super().next_task(may_read=may_read, may_write=may_write)

    def walk(self, question: Question, now: float) -> bool:
        """Counts leading blocks that are known to be there; whether asking may find more."""
        job = question.job
        while question.start < len(job.keys):
            at = (job.space, question.own, job.keys[question.start])
            until, where = self.known.get(at, (0.0, None))
            if now >= until:
                return True
            if where is None or not where.readable:
                question.foreign = where is not None
                return False
            question.start += 1
        return False

    def readable(self, question: Question, found: Mapping[Key, Where]) -> dict[Key, Where]:
        """What was found, up to the first block that is known to be unreadable here."""
        job = question.job
        for count, key in enumerate(found):
            if self._is_unreadable((job.space, question.own, key)):
                question.foreign = True
                return dict(islice(found.items(), count))
        return dict(found)

    def _is_unreadable(self, at: Known) -> bool:
        until, where = self.known.get(at, (0.0, None))
        return where is not None and not where.readable and self.clock() < until

    def answer(self, question: Question) -> None:
        if not question.answered:
            question.answered = True
            count = len(question.job.keys)
            present = [number < question.start for number in range(count)]
            foreign = question.foreign and question.start < count
            self.found.append(FoundBlocks(question.job.ticket, present, foreign))
            self.signal()

    def forget_question(self, question: Question) -> None:
        if question in self.asked:
            self.asked.remove(question)

    def note(self, space: Space, own: tuple[bytes, ...], found: Mapping[Key, Where | None]) -> None:
        """Remembers for a while where blocks are, for an engine with the pieces `own`.

        What cannot be read stays so for its time, also if the store still has it.
        """
        now = self.clock()
        for key, where in found.items():
            at = (space, own, key)
            if self._is_unreadable(at):
                continue
            self.known.pop(at, None)
            if where is None:
                believed_s = self.absent_s
            else:
                believed_s = PRESENT_S if where.readable else UNREADABLE_S
            self.known[at] = (now + believed_s, where)
        while len(self.known) > KNOWN_MAX:
            self.known.popitem(last=False)

    def own_of(self, use: SpaceUse | None, arena: MappedArena) -> tuple[bytes, ...]:
        """The pieces of the engine that an arena is of."""
        if use is not None:
            for own, arenas in use.own.items():
                if any(each is arena for each in arenas):
                    return own
            use.own.setdefault((piece_of(arena).name,), [arena])
        return (piece_of(arena).name,)

    def gathered(
        self, use: SpaceUse, own: tuple[bytes, ...], pieces: tuple[bytes, ...]
    ) -> dict[bytes, Gathering] | str:
        """How blocks of an engine here are made of some pieces, or why they cannot be."""
        found = use.gathered.get((own, pieces))
        if found is None:
            arenas = use.own.get(own)
            geometry = next((each for each in use.geometries if each.names == pieces), None)
            if arenas is None or (geometry is None and own != pieces):
                return "its pieces are not known"
            try:
                found = gather(geometry or EngineGeometry.of(arenas), arenas)
            except ValueError as error:
                logger.info("shared tier: blocks of another engine are of no use here: %s", error)
                found = str(error)
            use.gathered[own, pieces] = found
        return found

    def fail(self, error: BlobStoreError) -> None:
        """The store did not answer: after some times in a row the tier is off."""
        self.failures += 1
        if self.failures >= FAILURES_MAX:
            self.switch_off(str(error))

    def switch_off(self, why: str) -> None:
        if not self.off:
            super().switch_off(why)
            for question in self.asked:
                self.answer(question)
            self.drop_runs()

    def succeed(self) -> None:
        """The store has answered."""
        if self.off and not self.broken:
            logger.info("shared tier is on again")
            self.pause_s = self.retry_s
            self.switch_on()
        self.failures = 0

    def has_news(self) -> bool:
        return super().has_news() or bool(self.found or self.changed or self.voiding)
