"""Which values of a shared store count: the generations of spaces, and the keeper that reads them.

A *generation* is a random number that is part of every value's name, so a new one voids all values
of before. A record of the store says which one counts, and names its ancestors:

    record = sum (8 bytes), generation that counts (8 bytes), ancestors (8 bytes each, newest first)

A store can go back in time: a replica that was behind becomes the master, a backup is restored, an
old version of an object comes back. Its record is sound then, and old. So a process remembers the
last generation that it followed, and engines remember it for the process when it is restarted.

The keeper reads the generation of each space in use and the geometries of the engines that write
there, ends questions that take too long, and asks a store that did not answer whether it does now.
Where a record was lost, or is one of earlier, whoever sees it draws another generation, and no
block of before is found: that is a reset, never the undoing of one.

The one rule: a record is followed only if it descends from every generation that is known here.
Another one is answered by a new generation, which descends from both. Ancestors beyond
`ANCESTORS_MAX` are forgotten: who missed that many resets begins one more, and finds nothing old.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_intdigest

from penstock.store.base import DIGEST_BYTES, NewGeneration, Space
from penstock.store.clients.blobs import BlobStoreError, NotKeptError
from penstock.store.shared.values import (
    RECORD_BYTES_MAX,
    EngineGeometry,
    generation_name,
    geometry_name,
)
from penstock.store.stored_tier import RETRY_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.store.base import MappedArena
    from penstock.store.clients.blobs import BlobStore
    from penstock.store.shared.tier import SharedTier
    from penstock.store.shared.values import Gathering

logger = logging.getLogger(__name__)

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


USED_S = 60.0
"""A space that nobody used for so long is not read any more."""
GEOMETRIES_MAX = 16
"""Ways to cut the blocks of one model that are known at a time."""
UNKEPT_RETRY_MAX_S = 5.0
"""Before a store is asked again whether a replica has a reset: one write each time."""


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


class SharedKeeper:
    """What the keeper does."""

    def __init__(self, tier: SharedTier, blobs: BlobStore) -> None:
        self._tier = tier
        self._blobs = blobs
        self.draw: Callable[[int], bytes] = secrets.token_bytes
        """Random bytes for generations; a simulator has its own."""
        self._parsed: dict[bytes, EngineGeometry] = {}
        """Records as they were read: they hardly change, and are read every second."""

    def turn(self) -> None:
        """Does what is due."""
        with self._tier.lock:
            now = self._tier.clock()
            for question in [each for each in self._tier.asked if now >= each.until]:
                # A worker may still be at it: what it finds is noted for the next one.
                self._tier.answer(question)
                self._tier.asked.remove(question)
            probes = now >= self._tier.retry_at
            due = [use for use in self._tier.spaces.values() if now >= self._due_at(use)]
            voids = [
                name
                for name, void in self._tier.voiding.items()
                if not void.kept and now >= void.retry_at
            ]
        if probes:
            self._probe()
        elif not self._tier.off:
            for use in due:
                self._refresh(use)
            for name in voids:
                self._write_generation(name)

    def due_at(self) -> float:
        """When the next turn is due; the lock is held."""
        at = min((each.until for each in self._tier.asked), default=math.inf)
        if self._tier.off:
            return min(at, self._tier.retry_at)
        voids = (each.retry_at for each in self._tier.voiding.values() if not each.kept)
        return min([at, *voids, *map(self._due_at, self._tier.spaces.values())])

    def _due_at(self, use: SpaceUse) -> float:
        """When a space is read again; never, if nobody uses it."""
        at = use.read_at + self._tier.poll_s
        return at if at <= use.used_at + USED_S else math.inf

    def _probe(self) -> None:
        """Asks a store that did not answer whether it does now.

        It may have lost what it had, so it counts as back when it was asked which generations do.
        """
        tier = self._tier
        with tier.lock:
            used = [use for use in tier.spaces.values() if self._due_at(use) < math.inf]
        try:
            for use in used:
                self._read_space(use)
            if not used:
                self._blobs.get(generation_name(bytes(DIGEST_BYTES)), timeout_s=tier.timeout_s)
        except BlobStoreError as error:
            with tier.lock:
                if tier.off:
                    tier.off = str(error)
                    tier.put_off_retry()
                else:  # A call of earlier has come back meanwhile, and has switched it on.
                    tier.fail(error)
        else:
            with tier.lock:
                tier.succeed()

    def _refresh(self, use: SpaceUse) -> None:
        try:
            self._read_space(use)
        except BlobStoreError as error:
            with self._tier.lock:
                use.read_at = self._tier.clock()
                self._tier.fail(error)
        else:
            with self._tier.lock:
                self._tier.succeed()

    def _read_space(self, use: SpaceUse) -> None:
        """Reads which generation counts and who writes how; announces the engines here."""
        lineage = self._read_generation(use.name)
        with self._tier.lock:
            if not self._take_generation(use, lineage):
                return  # An engine has just told of a later one: it is read again at once.
            space, owns = use.space, list(use.own.values())
        geometries = self._read_geometries(space, [EngineGeometry.of(arenas) for arenas in owns])
        with self._tier.lock:
            use.read_at = self._tier.clock()
            if use.generation == space.generation:
                use.geometries = geometries

    def _read_generation(self, name: bytes) -> Lineage:
        """The generation that counts: that of the record, or a new one where that is of no use."""
        record_name, timeout_s = generation_name(name), self._tier.timeout_s
        record = self._blobs.get(record_name, timeout_s=timeout_s)
        if record is None:
            fresh = self._draw(name, None)
            if self._blobs.create(record_name, fresh.to_record(name), timeout_s=timeout_s):
                return fresh
            record = self._blobs.get(record_name, timeout_s=timeout_s)
        read = None if record is None else Lineage.from_record(name, record)
        with self._tier.lock:
            if read is not None and self._tier.generations.accepts(name, read):
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
        record, timeout_s = lineage.to_record(name), self._tier.timeout_s
        try:
            self._blobs.replace(generation_name(name), record, timeout_s=timeout_s)
        except NotKeptError as error:
            return str(error)
        return ""

    def _draw(self, name: bytes, read: Lineage | None) -> Lineage:
        """A generation that comes after all that are known."""
        # One bit less: messages of the store process have signed numbers.
        number = int.from_bytes(self.draw(NUMBER_BYTES), "little") >> 1
        with self._tier.lock:
            return self._tier.generations.successor(name, number, read)

    def _take_generation(self, use: SpaceUse, lineage: Lineage, unkept: str = "") -> bool:
        """Follows a generation, unless one is known that it does not come after."""
        if not self._tier.generations.accepts(use.name, lineage):
            use.read_at = -math.inf
            return False
        self._tier.generations.follow(use.name, lineage)
        if use.generation != lineage.current:
            use.generation = lineage.current
            use.geometries, use.gathered = [], {}
            self._tier.changed[use.name] = NewGeneration(use.name, lineage.current, unkept)
            self._tier.signal()
        return True

    def _write_generation(self, name: bytes) -> None:
        """Begins a new generation, or has the store keep the one that was begun."""
        timeout_s = self._tier.timeout_s
        with self._tier.lock:
            void = self._tier.voiding[name]
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
            with self._tier.lock:
                self._tier.fail(error)
            return
        with self._tier.lock:
            self._note_written(name, void, lineage, unkept)

    def _note_written(self, name: bytes, void: VoidInHand, lineage: Lineage, unkept: str) -> None:
        tier = self._tier
        use = tier.use(name)
        use.read_at = -math.inf
        if tier.voiding.get(name) is not void:
            self._take_generation(use, lineage)
            return  # Another reset came meanwhile: this one does not do.
        if not self._take_generation(use, lineage, unkept):
            return  # It is drawn again, after what an engine has told meanwhile.
        if unkept and void.written is None:
            logger.warning("shared tier: a reset is not kept yet: %s", unkept)
        void.written, void.kept = lineage, not unkept
        if unkept:
            void.retry_at = tier.clock() + void.pause_s
            void.pause_s = min(2 * void.pause_s, UNKEPT_RETRY_MAX_S)
        else:
            tier.changed.pop(name, None)
        tier.signal()

    def _read_geometries(
        self, space: Space, owns: Sequence[EngineGeometry]
    ) -> list[EngineGeometry]:
        """The ways in which engines cut their blocks; those of engines here are announced."""
        found: dict[int, EngineGeometry] = {}
        free: list[int] = []
        for number in range(GEOMETRIES_MAX):
            record = self._blobs.get(geometry_name(space, number), timeout_s=self._tier.timeout_s)
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
                self._blobs.forget([geometry_name(space, number)], timeout_s=self._tier.timeout_s)
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
            if self._blobs.create(name, record, timeout_s=self._tier.timeout_s):
                return
        logger.warning(
            "shared tier: %d geometries are announced, which is the most: only engines with equal "
            "ranks find the blocks of this one",
            GEOMETRIES_MAX,
        )
