"""What the threads of a tier in a shared store have in common: jobs, questions, generations.

A *generation* is a random number that is part of every value's name, so a new one voids all values
of before. A record of the store says which one counts, and names its ancestors:

    record = sum (8 bytes), generation that counts (8 bytes), ancestors (8 bytes each, newest first)

A store can go back in time: a replica that was behind becomes the master, a backup is restored, an
old version of an object comes back. Its record is sound then, and old. So a process remembers the
last generation that it followed, and engines remember it for the process when it is restarted.

The lock guards all of it; methods want it held. A job is a save or a load; it becomes runs of
blocks, each for one call of the client, and the last one that ends reports it. A question is
answered once, by the worker that asked or by the keeper when its time is over.

The rules:

- A record is followed only if it descends from every generation that is known here. Another one is
  answered by a new generation, which descends from both. Ancestors beyond `ANCESTORS_MAX` are
  forgotten: who missed that many resets begins one more, and finds nothing old.
- A job is reported once, and after its last run.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from penstock.cache.operations import BlockFault
from penstock.store.base import EndedJob, FoundBlocks, LoadJob, NewGeneration, SaveJob, Space
from penstock.store.shared.io import SumsOfArenas
from penstock.store.shared.values import EngineGeometry, gather, piece_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.store.base import FindJob, MappedArena
    from penstock.store.clients.blobs import BlobStoreError
    from penstock.store.shared.values import Gathering
    from penstock.vocabulary.keys import Key


NUMBER_BYTES = 8
ANCESTORS_MAX = 511
"""A record of 4 KiB. Of machines that all reset at once, each may add two."""
LINEAGES_MAX = 256
"""Spaces of which generations are remembered: models and versions of their weights."""


class Lineage(NamedTuple):
    """A generation and those before it."""

    current: int
    ancestors: tuple[int, ...] = ()
    """Newest first."""

    def descends_from(self, generation: int) -> bool:
        """Whether it is that generation, or came after it."""
        return generation == self.current or generation in self.ancestors

    def to_record(self, space: bytes) -> bytes:
        """As it is stored for a space."""
        numbers = (self.current, *self.ancestors)
        body = b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in numbers)
        return _sum_of(space, body) + body

    @classmethod
    def from_record(cls, space: bytes, record: bytes) -> Lineage | None:
        """What `to_record` wrote for this space; `None`: it is something else, or damaged."""
        body = record[NUMBER_BYTES:]
        count, rest = divmod(len(body), NUMBER_BYTES)
        sound = record[:NUMBER_BYTES] == _sum_of(space, body)
        if not sound or rest or not 1 <= count <= 1 + ANCESTORS_MAX:
            return None
        numbers = [
            int.from_bytes(body[at : at + NUMBER_BYTES], "little")
            for at in range(0, len(body), NUMBER_BYTES)
        ]
        return cls(numbers[0], tuple(numbers[1:]))


class KnownGenerations:
    """What a process knows of the generations of each space; whoever has it guards it."""

    def __init__(self) -> None:
        self._followed: OrderedDict[bytes, Lineage] = OrderedDict()
        self._told: OrderedDict[bytes, dict[int, None]] = OrderedDict()
        """Generations that engines know of, and that no record which was read descends from."""

    def expect(self, space: bytes, generation: int) -> bool:
        """An engine knows of a generation; whether what is followed here descends from it.

        If not, it may be an old one: it must not be used before the record was read again.
        """
        followed = self._followed.get(space)
        if followed is not None and followed.descends_from(generation):
            return True
        told = self._told.setdefault(space, {})
        told[generation] = None
        if len(told) > ANCESTORS_MAX // 2:
            del told[next(iter(told))]
        _bound(self._told)
        return False

    def accepts(self, space: bytes, lineage: Lineage) -> bool:
        """Whether a record that was read descends from all that is known."""
        followed = self._followed.get(space)
        known = [*self._told.get(space, ()), *([] if followed is None else [followed.current])]
        return all(map(lineage.descends_from, known))

    def follow(self, space: bytes, lineage: Lineage) -> None:
        """A record that was read and accepted, or written here."""
        self._followed[space] = lineage
        self._followed.move_to_end(space)
        _bound(self._followed)
        told = self._told.pop(space, {})
        left = {each: None for each in told if not lineage.descends_from(each)}
        if left:
            self._told[space] = left

    def successor(self, space: bytes, fresh: int, read: Lineage | None) -> Lineage:
        """A new generation, which descends from what was read and from all that is known."""
        parents = [each for each in (read, self._followed.get(space)) if each is not None]
        before = [each.current for each in parents]
        before += self._told.get(space, ())
        before += [ancestor for each in parents for ancestor in each.ancestors]
        return Lineage(fresh, tuple(dict.fromkeys(before))[:ANCESTORS_MAX])


def _sum_of(space: bytes, body: bytes) -> bytes:
    return xxh3_64_intdigest(space + body).to_bytes(NUMBER_BYTES, "little")


def _bound(spaces: OrderedDict[bytes, Lineage] | OrderedDict[bytes, dict[int, None]]) -> None:
    while len(spaces) > LINEAGES_MAX:
        spaces.popitem(last=False)


logger = logging.getLogger(__name__)

PRESENT_S = 10.0
"""How long what was there is not asked for again."""
UNREADABLE_S = 600.0
"""How long a value that cannot be decoded here is not read again: the codec comes with another
process, and a value written anew in the meantime is a miss more."""
USED_S = 60.0
"""A space that nobody used for so long is not read any more."""
RUN_BYTES = 8 << 20
"""Of one call that reads or writes, as far as a job allows."""
FAILURES_MAX = 3
"""Calls in a row that fail before the tier is off."""
RETRY_S, RETRY_MAX_S = 1.0, 60.0
"""Before a store that does not answer is asked again; the pause doubles each time."""
SPACES_MAX = 64
KNOWN_MAX = 200_000
"""Blocks of which is remembered whether they are there."""
_UNREADABLE = BlockFault.UNREADABLE

Known = tuple["Space", tuple[bytes, ...], "Key"]
"""A block for an engine with these pieces."""


class Where(NamedTuple):
    """In which values a block lies."""

    pieces: tuple[bytes, ...]
    """Of the engine that wrote them."""
    readable: bool = True
    """Whether it can be decoded here, as far as is known."""


@dataclass(slots=True, eq=False)
class JobInHand:
    """A save or a load in hand."""

    job: SaveJob | LoadJob
    nbytes: int
    left: int = 0
    faults: dict[int, BlockFault] = field(default_factory=dict)
    failure: str = ""


@dataclass(slots=True, eq=False)
class RunOfBlocks:
    """Neighbouring blocks of a job, for one call."""

    job: JobInHand
    positions: list[int]


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


@dataclass(slots=True, eq=False)
class SpaceUse:
    """What is known of one space."""

    name: bytes
    used_at: float
    read_at: float = -math.inf
    generation: int | None = None
    geometries: list[EngineGeometry] = field(default_factory=list)
    own: dict[tuple[bytes, ...], list[MappedArena]] = field(default_factory=dict)
    """The ranks of engines here, by the names of their pieces."""
    gathered: dict[tuple[tuple[bytes, ...], tuple[bytes, ...]], dict[bytes, Gathering] | str] = (
        field(default_factory=dict)
    )
    """How blocks of the first pieces are made of the second, or why they cannot be."""

    @property
    def space(self) -> Space:
        assert self.generation is not None
        return Space(self.name, self.generation)


@dataclass(slots=True, eq=False)
class VoidInHand:
    """A new generation of a space that somebody has asked for."""

    written: Lineage | None = None
    """Once it is: it counts from then on."""
    kept: bool = False
    """Whether it is there for good."""
    retry_at: float = -math.inf
    """When it is to be written, or written again to be kept."""
    pause_s: float = RETRY_S


class SharedBoard:
    """All that the threads of a tier share; `lock` guards it."""

    def __init__(
        self,
        *,
        copiers: int,
        ask_s: float,
        timeout_s: float,
        poll_s: float,
        absent_s: float,
        retry_s: float,
        queue_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.copiers = copiers
        """Threads that read; all but one also write, so that reads do not wait for writes."""
        self.ask_s, self.timeout_s, self.poll_s = ask_s, timeout_s, poll_s
        self.absent_s = absent_s
        self.queue_bytes = queue_bytes
        self.clock = clock
        self.lock = threading.Lock()
        self.work_ready = threading.Condition(self.lock)
        self.keeper_ready = threading.Condition(self.lock)
        self.idle = threading.Condition(self.lock)
        """Of who waits for a job, or for a block that another one writes."""
        self.event = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.questions: deque[Question] = deque()
        self.asked: list[Question] = []
        """All that are not answered, the oldest first."""
        self.reads: deque[RunOfBlocks] = deque()
        self.writes: deque[RunOfBlocks] = deque()
        self.jobs: dict[int, JobInHand] = {}
        self.saving_bytes = 0
        self.being_written: set[str] = set()
        self.ended: list[EndedJob] = []
        self.found: list[FoundBlocks] = []
        self.changed: dict[bytes, NewGeneration] = {}
        """Spaces whose generation is news."""
        self.voiding: dict[bytes, VoidInHand] = {}
        """Spaces that are to be voided."""
        self.generations = KnownGenerations()
        self.spaces: OrderedDict[bytes, SpaceUse] = OrderedDict()
        self.known: OrderedDict[Known, tuple[float, Where | None]] = OrderedDict()
        """Until when it is believed, and where the block is; `None`: nowhere."""
        self.sums = SumsOfArenas()
        self.registered: dict[int, MappedArena] = {}
        self.off = ""
        """Why no jobs are taken, if so."""
        self.failures = 0
        self.retry_s = self.pause_s = retry_s
        self.retry_at = 0.0
        self.state_changed = True
        self.saves_dropped = self.blocks_corrupt = self.blocks_written = self.bytes_written = 0
        self.closing = self.stopped = self.closed = False

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

    def take(self, job: SaveJob | LoadJob, nbytes: int) -> JobInHand | None:
        """Takes a job in hand, or reports at once why not."""
        use = self.use(job.space.name)
        why = self.off or ("the tier was closed" if self.closing else "")
        if not why and use.generation != job.space.generation:
            why = "its generation does not count any more"
        if why or not job.keys:
            self.ended.append(EndedJob(job.ticket, failure=why))
            self.signal()
            return None
        taken = self.jobs[job.ticket] = JobInHand(job, nbytes)
        return taken

    def runs(self, taken: JobInHand, block_bytes: int) -> list[RunOfBlocks]:
        count = len(taken.job.keys)
        at_once = max(1, RUN_BYTES // block_bytes)
        # A small job is dealt out, so that no thread is idle while another has all of it.
        size = min(at_once, max(1, -(-count // self.copiers)))
        runs = [
            RunOfBlocks(taken, list(range(at, min(at + size, count))))
            for at in range(0, count, size)
        ]
        taken.left = len(runs)
        return runs

    def next_task(self, may_read: bool, may_write: bool) -> Question | RunOfBlocks | None:  # noqa: FBT001
        if self.questions:
            return self.questions.popleft()
        if may_read and self.reads:
            return self.reads.popleft()
        return self.writes.popleft() if may_write and self.writes else None

    def end_run(self, run: RunOfBlocks, faults: dict[int, BlockFault], failure: str = "") -> None:
        """A run is over; `faults` are by position in it."""
        job = run.job
        job.faults |= {run.positions[place]: fault for place, fault in faults.items()}
        job.failure = job.failure or failure
        job.left -= 1
        if job.left:
            return
        del self.jobs[job.job.ticket]
        self.saving_bytes -= job.nbytes
        all_failed = len(job.faults) == len(job.job.keys)
        failure = job.failure if all_failed else ""
        self.ended.append(EndedJob(job.job.ticket, tuple(sorted(job.faults.items())), failure))
        self.signal()
        self.idle.notify_all()

    def drop_runs(self, runs: Sequence[RunOfBlocks], queue: deque[RunOfBlocks]) -> None:
        for run in runs:
            queue.remove(run)
            self.end_run(run, dict.fromkeys(range(len(run.positions)), _UNREADABLE))

    def report_all(self, job: SaveJob | LoadJob, fault: BlockFault) -> None:
        faults = tuple((position, fault) for position in range(len(job.keys)))
        self.ended.append(EndedJob(job.ticket, faults))
        self.signal()

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

    def is_known(self, space: Space, own: tuple[bytes, ...], key: Key, now: float) -> bool:
        until, where = self.known.get((space, own, key), (0.0, None))
        return now < until and where is not None and where.readable

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
            self.off = why
            self.retry_at = self.clock() + self.pause_s
            logger.error("shared tier is off: cause=%s; next try after %g s", why, self.pause_s)
            self.pause_s = min(2 * self.pause_s, RETRY_MAX_S)
            self.state_changed = True
            for question in self.asked:
                self.answer(question)
            self.drop_runs(list(self.reads), self.reads)
            self.drop_runs(list(self.writes), self.writes)
            self.signal()
            self.keeper_ready.notify()

    def succeed(self) -> None:
        self.failures = 0
        if self.off:
            logger.info("shared tier is on again")
            self.off = ""
            self.pause_s = self.retry_s
            self.state_changed = True
            self.signal()

    def signal(self) -> None:
        if not self.closed:
            os.eventfd_write(self.event, 1)

    def settle(self) -> None:
        news = self.ended or self.found or self.changed or self.state_changed
        voided = any(each is not None for each in self.voiding.values())
        if self.closed or news or voided:
            return
        try:
            os.eventfd_read(self.event)
        except BlockingIOError:
            return
