"""The threads of a tier in a shared store that ask, read and write.

Each has one call of the client under way. One only asks, so that nobody waits for a copy to learn
what is there; one asks and reads; the others write as well.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.operations import BlockFault
from penstock.store.base import LoadJob, SaveJob
from penstock.store.clients.blobs import BlobStoreError
from penstock.store.shared.io import FrontMemory, ValueRun, read_values, write_values
from penstock.store.shared.values import piece_of, value_name
from penstock.store.stored_tier import UNREADABLE, RunOfBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import FindJob, Space
    from penstock.store.clients.blobs import BlobStore
    from penstock.store.shared.tier import SharedTier
    from penstock.store.shared.values import EngineGeometry, Gathering
    from penstock.vocabulary.keys import Key


logger = logging.getLogger(__name__)

Known = tuple["Space", tuple[bytes, ...], "Key"]
"""A block for an engine with these pieces."""


class Where(NamedTuple):
    """In which values a block lies."""

    pieces: tuple[bytes, ...]
    """Of the engine that wrote them."""
    readable: bool = True
    """Whether it can be decoded here, as far as is known."""


@dataclass(slots=True, eq=False)
class Question:
    """A question in hand; answered once, by whoever is first."""

    job: FindJob
    own: tuple[bytes, ...]
    until: float
    start: int
    """How many leading blocks are known to be there."""
    answered: bool = False
    foreign: bool = False
    """Whether the next one was written in a form that cannot be read here."""


def find_leading(
    job: FindJob, start: int, plan: dict[bytes, Gathering], blobs: BlobStore, timeout_s: float
) -> list[Key]:
    """The blocks from `start` on that are there without a gap, each with all pieces of a plan.

    Raises `BlobStoreError`: the store does not answer.
    """
    parts = (part for each in plan.values() for part in each.parts)
    pieces = list({part.piece.name: part.piece for part in parts}.values())
    keys = job.keys[start:]
    names = [value_name(job.space, piece, key) for key in keys for piece in pieces]
    there = iter(blobs.exists(names, timeout_s=timeout_s) if names else ())
    for count in range(len(keys)):
        present = [next(there) for _ in pieces]
        if not all(present):
            return list(keys[:count])
    return list(keys)


def is_there(
    job: FindJob, start: int, geometry: EngineGeometry, blobs: BlobStore, timeout_s: float
) -> bool:
    """Whether a prefix with the block at `start` in it was written in the pieces of an engine.

    Known only where a block of both ends: a key names a prefix, whatever the size of the blocks.
    Raises `BlobStoreError`: the store does not answer.
    """
    here, there = job.arenas[0].form.block_tokens, geometry.block_tokens
    for number in range(start, len(job.keys)):
        if (job.first + number + 1) * here % there == 0:
            key = job.keys[number]
            names = [value_name(job.space, piece, key) for piece in geometry.pieces]
            return all(blobs.exists(names, timeout_s=timeout_s))
    return False


class SharedWorkers:
    """What the workers do."""

    def __init__(self, tier: SharedTier, blobs: BlobStore, *, compress: bool) -> None:
        self._tier = tier
        self._blobs = blobs
        self._compress = compress
        self._compressed = compress
        """Whether the last run that was read had compressed values; any thread may say so."""

    def bodies(self) -> list[Callable[[], None]]:
        """What the threads are to run, one each."""
        return [
            lambda: self._work(may_read=False, may_write=False),
            lambda: self._work(may_read=True, may_write=False),
            *[lambda: self._work(may_read=True, may_write=True)] * (self._tier.copiers - 1),
        ]

    def _work(self, *, may_read: bool, may_write: bool) -> None:
        memory, tier = FrontMemory(self._blobs), self._tier
        try:
            tier.work(
                lambda task: self.do(task, memory),
                tier.work_ready,
                may_read=may_read,
                may_write=may_write,
            )
        finally:
            memory.close()

    def do(self, task: Question | RunOfBlocks, memory: FrontMemory) -> None:
        """Does a task of the tier; `memory` is of the thread that does."""
        if isinstance(task, Question):
            self._ask(task)
        elif isinstance(task.job.job, LoadJob):
            self._read(task, task.job.job, memory)
        else:
            self._write(task, task.job.job, memory)

    def _ask(self, question: Question) -> None:
        """Asks for the pieces of this engine first, then for those of others."""
        job = question.job
        with self._tier.lock:
            use = self._tier.spaces.get(job.space.name)
            if question.answered or use is None:
                self._tier.forget_question(question)
                return
            order = [question.own, *(each.names for each in use.geometries)]
            order = list(dict.fromkeys(order))
            plans = [(each, self._tier.gathered(use, question.own, each)) for each in order]
            unusable = [
                each
                for each in use.geometries
                if isinstance(self._tier.gathered(use, question.own, each.names), str)
            ]
        try:
            for pieces, plan in plans:
                if isinstance(plan, dict) and question.start < len(job.keys):
                    self._ask_for(question, pieces, plan)
            self._ask_for_foreign(question, unusable)
        except BlobStoreError as error:
            with self._tier.lock:
                self._tier.fail(error)
        with self._tier.lock:
            if question.start < len(job.keys) and not question.answered:
                missing = job.keys[question.start]
                self._tier.note(job.space, question.own, {missing: None})
            self._tier.answer(question)
            self._tier.forget_question(question)

    def _ask_for(
        self, question: Question, pieces: tuple[bytes, ...], plan: dict[bytes, Gathering]
    ) -> None:
        """Asks which of the blocks, from the first unknown one on, are there in these pieces."""
        left_s = question.until - self._tier.clock()
        if left_s <= 0:
            return  # Too many ask at once; that is not the store's fault.
        there = find_leading(question.job, question.start, plan, self._blobs, left_s)
        found = dict.fromkeys(there, Where(pieces))
        with self._tier.lock:
            self._tier.succeed()
            found = self._tier.readable(question, found)
            self._tier.note(question.job.space, question.own, found)
            question.start += len(found)

    def _ask_for_foreign(self, question: Question, unusable: Sequence[EngineGeometry]) -> None:
        """Asks whether what was not found is there in a form that cannot be read here."""
        job = question.job
        for geometry in unusable if question.start < len(job.keys) else ():
            left_s = question.until - self._tier.clock()
            if left_s > 0 and not question.foreign:
                question.foreign = is_there(job, question.start, geometry, self._blobs, left_s)

    def _read(self, run: RunOfBlocks, job: LoadJob, memory: FrontMemory) -> None:
        faults = run.all_unreadable
        try:
            self._read_all(run, job, memory, faults)
        finally:
            # Also after an error of ours: a job that nobody reports keeps its slots for ever.
            with self._tier.lock:
                self._tier.end_run(run, faults)

    def _read_all(
        self, run: RunOfBlocks, job: LoadJob, memory: FrontMemory, faults: dict[int, BlockFault]
    ) -> None:
        """Reads the blocks of a run; takes those that arrived out of `faults`, by place."""
        for pieces, places in self._by_pieces(run, job).items():
            chosen = RunOfBlocks(run.job, [run.positions[place] for place in places])
            with self._tier.lock:
                use = self._tier.spaces.get(job.space.name)
                own = self._tier.own_of(use, job.arena)
                plan = self._tier.gathered(use, own, pieces) if use is not None and own else "gone"
            if isinstance(plan, str):
                faults.update(dict.fromkeys(places, BlockFault.MISSING))
                continue
            gathering, values = plan[job.arena.part], _value_run(chosen, job)
            means = (self._blobs, memory, self._tier.sums)
            timeout_s, compressed = self._tier.timeout_s, self._compressed
            try:
                result = read_values(
                    values, gathering, *means, whole=compressed, timeout_s=timeout_s
                )
            except BlobStoreError as error:
                with self._tier.lock:
                    self._tier.fail(error)
                    run.job.failure = str(error)
                continue
            self._compressed = result.compressed
            for place in places:
                del faults[place]
            for at, fault in result.faults.items():
                # The engine forgets what it lacks the codec for, and asks again: `_settle_read`
                # has the answer. Of a copy that may be fine it would try again at once.
                faults[places[at]] = BlockFault.MISSING if fault is UNREADABLE else fault
            self._settle_read(job, own, chosen, result.faults, result.wrong)

    def _settle_read(
        self,
        job: LoadJob,
        own: tuple[bytes, ...],
        run: RunOfBlocks,
        faults: dict[int, BlockFault],
        wrong: list[str],
    ) -> None:
        with self._tier.lock:
            self._tier.succeed()
            self._tier.blocks_corrupt += sum(each is BlockFault.CORRUPT for each in faults.values())
            for place, fault in faults.items():
                key = job.keys[run.positions[place]]
                unreadable = Where(own, readable=False)
                found = {key: unreadable if fault is UNREADABLE else None}
                self._tier.note(job.space, own, found)
        if wrong:
            logger.warning("shared tier: %d values are not what they should be", len(wrong))
            try:
                self._blobs.forget(wrong, timeout_s=self._tier.timeout_s)
            except BlobStoreError as error:
                with self._tier.lock:
                    self._tier.fail(error)

    def _by_pieces(self, run: RunOfBlocks, job: LoadJob) -> dict[tuple[bytes, ...], list[int]]:
        """In whose pieces the blocks of a run are, by place: its own, if nothing is known."""
        chosen: dict[tuple[bytes, ...], list[int]] = {}
        with self._tier.lock:
            own = self._tier.own_of(self._tier.spaces.get(job.space.name), job.arena)
            for place, key in enumerate(run.keys):
                _, where = self._tier.known.get((job.space, own, key), (0.0, None))
                chosen.setdefault(where.pieces if where else own, []).append(place)
        return chosen

    def _write(self, run: RunOfBlocks, job: SaveJob, memory: FrontMemory) -> None:
        names = names_of(run)
        with self._tier.lock:
            # Two engines of a machine compute one prompt: the second finds what the first wrote.
            while not self._tier.being_written.isdisjoint(names):
                # Who writes it ends within the time of its calls, and says so.
                self._tier.idle.wait(self._tier.timeout_s)
            self._tier.being_written.update(names)
        failure = ""
        sizes: list[int] = []
        faults = run.all_unreadable
        try:
            sizes, faults, failure = self._write_absent(run, job, names, memory)
            with self._tier.lock:
                self._tier.succeed()
        except BlobStoreError as error:
            failure = str(error)
            with self._tier.lock:
                self._tier.fail(error)
        finally:
            with self._tier.lock:
                self._tier.being_written.difference_update(names)
                self._tier.idle.notify_all()
                self._tier.blocks_written += len(sizes)
                self._tier.bytes_written += sum(sizes)
                self._note_saved(run, job, faults)
                self._tier.state_changed = True
                self._tier.end_run(run, faults, failure)

    def _write_absent(
        self, run: RunOfBlocks, job: SaveJob, names: Sequence[str], memory: FrontMemory
    ) -> tuple[list[int], dict[int, BlockFault], str]:
        """Writes what is not there; the bytes of each block, and what failed, by place and why."""
        there = self._blobs.exists(names, timeout_s=self._tier.timeout_s)
        absent = [place for place, is_there in enumerate(there) if not is_there]
        if not absent:
            return [], {}, ""
        chosen = RunOfBlocks(run.job, [run.positions[place] for place in absent])
        result = write_values(
            _value_run(chosen, job),
            [job.parents[position] for position in chosen.positions],
            self._blobs,
            memory,
            compress=self._compress,
            timeout_s=self._tier.timeout_s,
        )
        sizes, faults = [], {}
        with self._tier.lock:
            own = self._tier.own_of(self._tier.spaces.get(job.space.name), job.arena)
            for place, problem, size in zip(absent, *result, strict=True):
                if problem:
                    faults[place] = UNREADABLE
                else:
                    sizes.append(size)
                    # What was there before and could not be read is there no more.
                    self._tier.known.pop((job.space, own, job.keys[run.positions[place]]), None)
        return sizes, faults, next(filter(None, result.problems), "")

    def _note_saved(self, run: RunOfBlocks, job: SaveJob, faults: dict[int, BlockFault]) -> None:
        own = self._tier.own_of(self._tier.spaces.get(job.space.name), job.arena)
        keys = [key for place, key in enumerate(run.keys) if place not in faults]
        if len(own) == 1:
            self._tier.note(job.space, own, dict.fromkeys(keys, Where(own)))
        else:
            # Of what other ranks have written nothing is known here: the next one asks.
            for key in keys:
                self._tier.known.pop((job.space, own, key), None)


def names_of(run: RunOfBlocks) -> list[str]:
    """Of the values of an engine's own pieces."""
    job = run.job.job
    piece = piece_of(job.arena)
    return [value_name(job.space, piece, key) for key in run.keys]


def _value_run(run: RunOfBlocks, job: SaveJob | LoadJob) -> ValueRun:
    return ValueRun(job.arena, job.space, run.keys, run.slots, job.salt)
