"""A store process, its disks, and the messages between it and the engine's driver.

Each rank's part of the blocks lies on a disk of its own: places for payloads, a row for each that
says what lies there, and segments of places that are reclaimed as a whole. A save goes step by step
(`SAVE_STEPS`), and the process may die between any two of them.

| trouble          | what is left                                                               |
|------------------|----------------------------------------------------------------------------|
| killed           | everything that was written: what was acknowledged is found again           |
| power lost       | of what was written since the last barrier any part: lost, torn, reordered   |
| stopped, slow    | everything; answers come late, perhaps after the deadline                    |
| full             | saves are refused                                                            |
| reset            | rows of earlier generations, which must never be found again                 |

Answers name the life of the process and a ticket, which begins anew with each life: the driver
must recognise those that are late.

The one rule that must not break: a block that the store calls saved is on every disk that was
asked for it, and what it delivers is what was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lab.explore.world import Violation
from penstock.cache.operations import BlockFault
from penstock.machine import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.sim.conditions import StoreConditions
    from lab.sim.ranks import Cell, Job
    from lab.sim.world import World
    from penstock.vocabulary.keys import Key

SAVE_STEPS = ("tombstone", "payload", "row", "answer")
TORN: Cell = ("torn",)
_PAGE_KEYS = 3


class Row(NamedTuple):
    """What the table of a segment says about one place."""

    key: Key
    parent: Key | None
    generation: int
    sum: Cell
    """Of the payload; a content stands for its own sum."""


class Payload(NamedTuple):
    """What was written to a place, and in which generation."""

    content: Cell
    generation: int


class Disk:
    """Where one rank's parts lie."""

    def __init__(self, segment_count: int, segment_places: int) -> None:
        self.segment_places = segment_places
        count = segment_count * segment_places
        self.rows: list[Row | None] = [None] * count
        self.payloads: list[Payload | None] = [None] * count
        self.index: dict[Key, int] = {}
        """What the process knows to be there, in the current generation; gone with it."""
        self.taken: set[int] = set()
        """Places that a save writes to, or that were written in this or an earlier life."""
        self.readers: dict[int, int] = {}
        """Places that are being read, and how often."""
        self.writing: set[int] = set()
        self.spoilt: set[int] = set()
        """Places whose bytes changed by themselves, or were torn when power was lost."""
        self.order = list(range(segment_count))
        """Segments, the one that was written longest ago first."""
        self._unsynced: list[tuple[int, Row | Payload | None]] = []
        """Places that were written since the last barrier: the row before, or the payload now."""

    def write_row(self, place: int, row: Row | None) -> None:
        self._unsynced.append((place, self.rows[place]))
        self.rows[place] = row

    def write_payload(self, place: int, payload: Payload) -> None:
        self._unsynced.append((place, payload))
        self.payloads[place] = payload
        self.spoilt.discard(place)

    def sync(self) -> None:
        """A barrier: what was written so far stays."""
        self._unsynced.clear()

    def lose_power(self, lost: Callable[[], bool]) -> None:
        """Any part of what was written since the barrier is lost, whatever the order."""
        kept: set[tuple[int, bool]] = set()
        for place, what in reversed(self._unsynced):
            is_payload = isinstance(what, Payload)
            if (place, is_payload) in kept:
                continue  # A later write of the same sectors is there.
            if not lost():
                kept.add((place, is_payload))
                continue
            self.spoilt.add(place)
            if isinstance(what, Payload):
                # Some sectors are old and some are new.
                self.payloads[place] = Payload(TORN, what.generation)
            else:
                self.rows[place] = what
        self._unsynced.clear()

    def places_of(self, segment: int) -> range:
        first = segment * self.segment_places
        return range(first, first + self.segment_places)

    def holds(self, key: Key, generation: int) -> bool:
        """Whether a row says that a block is here."""
        return any(
            row is not None and row.key == key and row.generation == generation for row in self.rows
        )


class Reading(NamedTuple):
    """A block that is being read: what its first half came from."""

    rank: int
    key: Key
    place: int
    row: Row
    first_half: Payload | None


class Ticket(NamedTuple):
    """One rank's part of an operation, as the store is asked for it."""

    number: int
    job: Job
    rank: int
    generation: int
    parents: Sequence[Key | None]


class Store:
    """The store process of one tier."""

    def __init__(self, world: World, tier: int, conditions: StoreConditions) -> None:
        self.tier = tier
        self._world = world
        self._rng = world.rng
        self._conditions = conditions
        self._right = world.library.right
        self.disks = [
            Disk(conditions.segment_count, conditions.segment_places)
            for _ in range(world.conditions.settings.rank_count)
        ]
        self.alive = True
        self.life = 0
        self.generation = 0
        """As the disks say; it survives everything."""
        self.full = False
        self.well = False
        self._tickets: dict[int, Ticket] = {}
        """Of this life, as the driver knows them."""
        self._next_ticket = 0
        self._acknowledged: set[tuple[int, Key]] = set()
        """Rank and key of what this generation was told to be saved, and was not given up."""
        self._excused: set[tuple[int, Key]] = set()
        """What was given up, or spoilt by something that no store can help."""
        self._delivery_at = 0.0

    # ---------------------------------------------------------------- the driver's side

    def start(self, job: Job, parents: Sequence[Key | None]) -> None:
        """The driver asks for the parts of all ranks."""
        library = self._world.library
        if job.target == self.tier and any(
            library.weights_of[key] != library.weights for key in job.keys
        ):
            raise Violation("store", f"{job} saves blocks of other weights")
        for rank in sorted(job.left):
            ticket = Ticket(self._next_ticket, job, rank, self._world.era, parents)
            self._next_ticket += 1
            self._tickets[ticket.number] = ticket
            if self.alive:
                step = self._load if job.source == self.tier else self._save
                self._later(self._hang_s(), step, ticket)

    def void(self) -> None:
        """The engine was reset: no block of an earlier generation is found again.

        A process that is dead is told when it comes back, before anything else.
        """
        if self.alive:
            self._begin_generation()

    def _begin_generation(self) -> None:
        self.generation = self._world.era
        self._acknowledged.clear()
        self._excused.clear()
        for disk in self.disks:
            disk.index.clear()

    def is_current(self, life: int, generation: int) -> bool:
        """Whether an answer is of this life of the process and of this generation."""
        return life == self.life and generation == self._world.era

    def _deliver(self, action: Callable[..., None], *arguments: object) -> None:
        """A message to the driver; messages of one life stay in order, also if one is stuck."""
        pause = self._hang_s() + self._rng.random() * self._conditions.delay_s
        self._delivery_at = max(self._delivery_at, self._world.now + pause)
        self._world.after(self._delivery_at - self._world.now, action, *arguments)

    def _take_answer(
        self, life: int, number: int, faults: list[tuple[int, BlockFault]], failure: str
    ) -> None:
        world = self._world
        if life != self.life:
            world.note("store answers from an earlier life")
        # A reset does not end the life of a job: its answer gives slots back.
        if not self.is_current(life, world.era) or number not in self._tickets:
            return
        ticket = self._tickets[number]
        world.ranks.hear_store(ticket.job, ticket.rank, faults, failure)

    def _take_page(
        self, life: int, generation: int, keys: list[Key], parents: list[Key | None]
    ) -> None:
        if not self.is_current(life, generation):
            self._world.note("store page is late")
            return
        self._world.note("store page")
        self._world.send(ev.Discovered(tier=self.tier, keys=keys, parents=parents))

    def _take_gone(self, life: int, generation: int, keys: list[Key]) -> None:
        if self.is_current(life, generation):
            self._world.note("store reclaims")
            self._world.send(ev.Vanished(tier=self.tier, keys=keys))

    # ---------------------------------------------------------------- saves

    def _save(self, ticket: Ticket) -> None:
        """Reads the arena; what is there already is not written."""
        job, rank = ticket.job, ticket.rank
        if rank in job.skip:
            self._answer(ticket, {}, "cancelled")
            return
        contents, faults = self._world.ranks.read_arena(job, rank)
        disk = self.disks[rank]
        places: dict[int, int] = {}
        for position, key in enumerate(job.keys):
            if position in faults or (key in disk.index and ticket.generation == self.generation):
                continue
            place = None if self.full else self._take_place(rank)
            if place is None:
                self._world.note("store is full")
                faults[position] = BlockFault.UNREADABLE
            else:
                places[position] = place
        self._save_step(ticket, contents, faults, places, 0)

    def _save_step(
        self,
        ticket: Ticket,
        contents: list[Cell],
        faults: dict[int, BlockFault],
        places: dict[int, int],
        step: int,
    ) -> None:
        job, disk = ticket.job, self.disks[ticket.rank]
        what = SAVE_STEPS[step]
        for position, place in places.items():
            key = job.keys[position]
            if what == "tombstone":
                disk.write_row(place, None)
            elif what == "payload":
                disk.write_payload(place, Payload(contents[position], ticket.generation))
            elif what == "row":
                parent = ticket.parents[position]
                disk.write_row(place, Row(key, parent, ticket.generation, contents[position]))
                if ticket.generation == self.generation:
                    disk.index[key] = place
        if what == "answer":
            self._acknowledge(ticket, faults, places)
            self._answer(ticket, faults, "")
        if step + 1 < len(SAVE_STEPS):
            self._later(0.0, self._save_step, ticket, contents, faults, places, step + 1)
            return
        disk.writing.difference_update(places.values())
        if self._rng.random() < 0.3:
            disk.sync()

    def _acknowledge(
        self, ticket: Ticket, faults: dict[int, BlockFault], places: dict[int, int]
    ) -> None:
        index = self.disks[ticket.rank].index
        if ticket.generation != self.generation:
            return
        for position, key in enumerate(ticket.job.keys):
            # One that was there already may have been given up since.
            if position in places or (position not in faults and key in index):
                self._acknowledged.add((ticket.rank, key))
                self._excused.discard((ticket.rank, key))

    def _take_place(self, rank: int) -> int | None:
        """A place to write to; the oldest segment is given up if there is none."""
        disk = self.disks[rank]
        for _ in range(2):
            for segment in disk.order[::-1]:
                for place in disk.places_of(segment):
                    if place not in disk.taken:
                        disk.taken.add(place)
                        disk.writing.add(place)
                        return place
            if not self._reclaim(rank):
                return None
        return None

    def may_reclaim(self, disk: Disk, segment: int) -> bool:
        """Whether nobody writes to a segment or reads from it."""
        places = disk.places_of(segment)
        return not any(place in disk.writing or place in disk.readers for place in places)

    def _reclaim(self, rank: int) -> bool:
        """Gives the segment up that was written longest ago."""
        disk = self.disks[rank]
        for segment in disk.order:
            if self.may_reclaim(disk, segment):
                break
        else:
            return False
        disk.order.remove(segment)
        disk.order.append(segment)
        gone: list[Key] = []
        for place in disk.places_of(segment):
            row = disk.rows[place]
            disk.taken.discard(place)
            if row is not None and disk.index.get(row.key) == place:
                del disk.index[row.key]
                self._give_up(rank, row.key)
                gone.append(row.key)
            disk.write_row(place, None)
        if gone:
            self._deliver(self._take_gone, self.life, self.generation, gone)
        return True

    def _give_up(self, rank: int, key: Key) -> None:
        self._acknowledged.discard((rank, key))
        self._excused.add((rank, key))

    # ---------------------------------------------------------------- loads

    def _load(self, ticket: Ticket) -> None:
        """Looks blocks up and begins to read them."""
        job, disk = ticket.job, self.disks[ticket.rank]
        if ticket.rank in job.skip:
            self._answer(ticket, {}, "cancelled")
            return
        faults: dict[int, BlockFault] = {}
        reading: dict[int, Reading] = {}
        for position, key in enumerate(job.keys):
            if ticket.generation != self.generation or key not in disk.index:
                faults[position] = BlockFault.MISSING
            else:
                reading[position] = self._begin_read(ticket.rank, key)
        self._later(0.0, self._load_rest, ticket, faults, reading)

    def _load_rest(
        self, ticket: Ticket, faults: dict[int, BlockFault], reading: dict[int, Reading]
    ) -> None:
        """The rest of the bytes has come; they are verified and put into the arena."""
        job = ticket.job
        contents: dict[int, Cell] = {}
        for position, begun in reading.items():
            content = self._end_read(begun, ticket.generation)
            if content is None:
                faults[position] = BlockFault.CORRUPT
            else:
                contents[position] = content
        if not self.well and self._rng.random() < self._conditions.unreadable:
            position = self._rng.randrange(len(job.keys))
            contents.pop(position, None)
            faults.setdefault(position, BlockFault.UNREADABLE)
        if ticket.rank not in job.skip:
            self._world.ranks.write_arena(job, ticket.rank, contents)
        self._answer(ticket, faults, "")

    def _begin_read(self, rank: int, key: Key) -> Reading:
        disk = self.disks[rank]
        place = disk.index[key]
        row = disk.rows[place]
        if row is None:
            raise Violation("store", f"{key.hex()[:4]} is known, but has no row")
        disk.readers[place] = disk.readers.get(place, 0) + 1
        return Reading(rank, key, place, row, disk.payloads[place])

    def _end_read(self, begun: Reading, generation: int) -> Cell:
        """What was read, if it is what was asked for; what is spoilt is forgotten."""
        rank, key, place, row, first_half = begun
        disk = self.disks[rank]
        disk.readers[place] -= 1
        if not disk.readers[place]:
            del disk.readers[place]
        payload = disk.payloads[place]
        if payload is None or payload is not first_half or payload.content != row.sum:
            if place not in disk.spoilt:
                raise Violation("store", f"{key.hex()[:4]} fails its sums on rank {rank}")
            if disk.index.get(key) == place:
                del disk.index[key]
            self._give_up(rank, key)
            return None
        if payload.generation != generation or payload.content != self._right[key]:
            raise Violation("bytes", f"the store delivers another block than {key.hex()[:4]}")
        return payload.content

    def read_for_neighbour(self) -> None:
        """Another engine reads a block."""
        rank = self._rng.randrange(len(self.disks))
        index = self.disks[rank].index
        if self.alive and index:
            key = self._rng.choice(list(index))
            begun = self._begin_read(rank, key)
            self._later(self._conditions.pace_s, self._end_read, begun, self.generation)

    # ---------------------------------------------------------------- answers

    def _answer(self, ticket: Ticket, faults: dict[int, BlockFault], failure: str) -> None:
        reported = sorted(faults.items(), key=lambda item: item[0])
        repeats = not self.well and self._rng.random() < self._conditions.repeat
        for _ in range(1 + repeats):
            self._deliver(self._take_answer, self.life, ticket.number, reported, failure)

    def _hang_s(self) -> float:
        """A disk that is slow may be slower than the deadline of what it is asked for."""
        if self.well or self._rng.random() >= self._conditions.hang:
            return 0.0
        self._world.note("store is slow")
        return self._world.conditions.settings.operation_timeout_s * self._rng.uniform(0.5, 1.5)

    def _later(self, pause: float, action: Callable[..., object], *arguments: object) -> None:
        pause += self._rng.random() * self._conditions.pace_s
        self._world.after(pause, self._if_alive, self.life, action, arguments)

    def _if_alive(
        self, life: int, action: Callable[..., object], arguments: tuple[object, ...]
    ) -> None:
        if self.alive and life == self.life:
            action(*arguments)

    # ---------------------------------------------------------------- what befalls it

    def die(self, *, power: bool) -> None:
        """The process is gone at once, between any two steps of what it does."""
        self.alive = False
        for rank, disk in enumerate(self.disks):
            if power:
                disk.lose_power(lambda: self._rng.random() < 0.5)
                for key in disk.index:
                    if not disk.holds(key, self.generation):
                        self._give_up(rank, key)
            disk.index.clear()
            disk.readers.clear()
            disk.writing.clear()

    def restart(self) -> None:
        """A new life begins with what the disks say; the generation is read first."""
        for number in list(self._tickets)[:2] if self._conditions.repeat else ():
            # An answer of the old life is still on its way.
            pause = self._rng.random() * self._world.conditions.settings.operation_timeout_s
            self._world.after(pause, self._take_answer, self.life, number, [], "")
        self.life += 1
        self.alive = True
        self._tickets.clear()
        self._next_ticket = 0
        self._delivery_at = 0.0
        for disk in self.disks:
            disk.taken = {place for place, row in enumerate(disk.rows) if row is not None}
            for place in sorted(disk.taken):
                row = disk.rows[place]
                if row is not None and self.recovers(row):
                    disk.index[row.key] = place
        if self.generation != self._world.era:
            self._begin_generation()
        self._check_recovered()

    def recovers(self, row: Row) -> bool:
        """Whether what a row says counts."""
        return row.generation == self.generation == self._world.era

    def _check_recovered(self) -> None:
        """What was called saved is there, and whatever has a row has its bytes."""
        for disk in self.disks:
            for key, place in disk.index.items():
                row, payload = disk.rows[place], disk.payloads[place]
                assert row is not None
                whole = payload is not None and payload.content == row.sum
                if not whole and place not in disk.spoilt:
                    raise Violation("store", f"{key.hex()[:4]} has a row, but no bytes")
        for rank, key in sorted(self._acknowledged):
            if key not in self.disks[rank].index:
                raise Violation(
                    "store", f"{key.hex()[:4]} was saved on rank {rank}, and is gone after a kill"
                )

    def tell_pages(self) -> None:
        """Says what is there, page by page: a block whose parts lie on every disk."""
        rows = [
            (row.key, row.parent)
            for segment in self.disks[0].order[::-1]
            for place in self.disks[0].places_of(segment)
            if (row := self.disks[0].rows[place]) is not None
            and self.disks[0].index.get(row.key) == place
            and all(row.key in disk.index for disk in self.disks)
        ]
        for first in range(0, len(rows), _PAGE_KEYS):
            keys, parents = zip(*rows[first : first + _PAGE_KEYS], strict=True)
            page = (list(keys), list(parents))
            self._deliver(self._take_page, self.life, self._world.era, *page)

    def take_in(self, keys: Sequence[Key], before: Key | None) -> None:
        """Another engine writes blocks, or an earlier life of this one did; we are told."""
        if not self.alive or not keys:
            return
        parents = [before, *keys[:-1]]
        there: list[int] = []
        for position, key in enumerate(keys):
            for rank, disk in enumerate(self.disks):
                if key in disk.index:
                    continue
                place = self._take_place(rank)
                if place is None:
                    break
                content = self._right[key]
                disk.write_payload(place, Payload(content, self.generation))
                disk.write_row(place, Row(key, parents[position], self.generation, content))
                disk.index[key] = place
                disk.writing.discard(place)
            else:
                there.append(position)
        found = [keys[position] for position in there]
        befores = [parents[position] for position in there]
        self._deliver(self._take_page, self.life, self.generation, found, befores)

    def rot(self, rank: int) -> bool:
        """The bytes of a place change by themselves; False if nothing lies there."""
        disk = self.disks[rank]
        used = [place for place, payload in enumerate(disk.payloads) if payload is not None]
        if not used:
            return False
        place = self._rng.choice(used)
        payload = disk.payloads[place]
        assert payload is not None
        disk.payloads[place] = Payload(TORN, payload.generation)
        disk.spoilt.add(place)
        return True

    def check_listed(self, key: Key) -> None:
        """What the directory lists is there, unless the store gave it up since."""
        for rank, disk in enumerate(self.disks):
            listed = disk.holds(key, self._world.era)
            if not listed and (rank, key) not in self._excused:
                raise Violation(
                    "store", f"{key.hex()[:4]} is listed, but is not on the disk of rank {rank}"
                )
