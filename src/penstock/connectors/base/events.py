"""KV events with the engine's own block hashes, so that a router can follow all caches.

A router knows blocks by the engine's hashes, from the events of the engine's device cache. Events
from here carry the same hashes and the same description of each block, with the medium that it
came to or left: host memory, or what is below it. Penstock's own keys never leave the process.

A block is announced when a request has described it. What lies on a disk since an earlier life, or
was stored by another engine, is announced when the first request that it is loaded for comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Mapping

    from penstock.connectors.base.keys import EngineRequest
    from penstock.machine.kv_events import KvEvent, Snapshot
    from penstock.vocabulary.ids import Key

    Describe = Callable[[EngineRequest, int], "AnnouncedBlock"]

HELD_MAX = 1 << 20
"""Blocks that are remembered, about 440 bytes each. Beyond it, blocks of host memory take the
places of those that lie below it only; further ones are not announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedBlock:
    """A block as a router knows it."""

    hash: bytes
    parent: bytes | None
    tokens: array[int]
    """Four bytes each: they are kept for as long as the block is."""
    adapter: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[object, ...] | None = None
    """What beside tokens is in the hash, as the engine keeps it."""
    session: str | None = None
    """The session of the request that saved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """A block is now in a medium."""

    block: AnnouncedBlock
    medium: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedEvent:
    """Blocks are no longer in a medium."""

    hashes: list[bytes]
    medium: str


@dataclass(slots=True)
class _Entry:
    """A block that lies in some tiers."""

    block: AnnouncedBlock | None
    """`None`: no request has described it yet."""
    tiers: int = 0
    """A bit for each tier that has it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tier whose blocks are announced."""

    bit: int
    medium: str
    same_medium: int
    """The bits of all tiers that routers know by the same name."""


class EventAnnouncer:
    """Turns events of the tiers into events that the engine publishes."""

    def __init__(
        self, media: Mapping[str, str], *, describe: Describe, held_max: int = HELD_MAX
    ) -> None:
        """Announces nothing yet."""
        bits = {tier: 1 << number for number, tier in enumerate(media)}
        same = {
            name: sum(bits[tier] for tier in media if media[tier] == name)
            for name in media.values()
        }
        self._places = {
            tier: _Place(bits[tier], medium, same[medium]) for tier, medium in media.items()
        }
        self._same_medium = same
        self._hub = 1
        self._describe = describe
        self._held_max = held_max
        self._expected: dict[Key, AnnouncedBlock] = {}
        self._entries: dict[Key, _Entry] = {}
        self._below: dict[Key, None] = {}
        """The blocks that are not in host memory, those that left it first at the front."""
        self._sequence = 0
        """The number of the last event that was taken in."""
        self._events: list[StoredEvent | RemovedEvent] = []

    def expect(self, request: EngineRequest, blocks: Iterable[tuple[int, Key]]) -> None:
        """These blocks of a request, by number and key, are being saved."""
        for number, key in blocks:
            entry = self._entries.get(key)
            if entry is None:
                if self._make_room():
                    self._expected[key] = self._describe(request, number)
            else:
                self._name(entry, request, number)

    def describe(self, request: EngineRequest, blocks: Iterable[tuple[int, Key]]) -> None:
        """A request has these blocks: announces those in the tiers that nobody has described."""
        for number, key in blocks:
            entry = self._entries.get(key)
            if entry is not None:
                self._name(entry, request, number)

    def forget(self, keys: Iterable[Key]) -> None:
        """The saves of these blocks have ended: those not stored by now never will be."""
        for key in keys:
            self._expected.pop(key, None)

    def note(self, events: Iterable[KvEvent], snapshot: Callable[[], Snapshot]) -> None:
        """Takes in what happened in the tiers since the last call."""
        for event in events:
            if event.sequence <= self._sequence:
                continue  # The snapshot has it.
            if event.sequence != self._sequence + 1:
                self._catch_up(snapshot())
                continue
            self._sequence = event.sequence
            match event:
                case BlocksStored() if event.tier in self._places:
                    self._note_stored(self._places[event.tier], event.keys)
                case BlocksRemoved() if event.tier in self._places:
                    self._note_removed(self._places[event.tier], event.keys)
                case AllCleared():
                    self._clear()
                case _:
                    pass

    def take(self) -> list[StoredEvent | RemovedEvent]:
        """The events to publish."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- what the tiers have

    def _note_stored(self, place: _Place, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._entries.get(key) or self._add(key)
            if entry is None:
                continue
            if place.bit == self._hub:
                self._expected.pop(key, None)
                self._below.pop(key, None)
            elif not entry.tiers:
                self._below[key] = None
            before, entry.tiers = entry.tiers, entry.tiers | place.bit
            if entry.block is not None and not before & place.same_medium:
                self._events.append(StoredEvent(block=entry.block, medium=place.medium))

    def _add(self, key: Key) -> _Entry | None:
        """An entry for a block that was nowhere; what nobody has described displaces nothing."""
        block = self._expected.get(key)
        if block is None and self._full:
            return None
        entry = self._entries[key] = _Entry(block)
        return entry

    def _note_removed(self, place: _Place, keys: Iterable[Key]) -> None:
        hashes: list[bytes] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.tiers & place.bit:
                continue
            entry.tiers &= ~place.bit
            if not entry.tiers:
                self._drop(key)
            elif place.bit == self._hub:
                self._below[key] = None
            if entry.block is not None and not entry.tiers & place.same_medium:
                hashes.append(entry.block.hash)
        if hashes:
            self._events.append(RemovedEvent(hashes=hashes, medium=place.medium))

    def _clear(self) -> None:
        # The engine's own "all cleared" event would cover its device cache as well.
        for place in self._places.values():
            self._note_removed(place, [*self._entries])

    def _catch_up(self, snapshot: Snapshot) -> None:
        """Events were dropped: announces what is different from what was announced."""
        self._sequence = snapshot.sequence
        there = {tier: dict(snapshot.blocks.get(tier, [])) for tier in self._places}
        # First what has come: what went down is then not forgotten where it was.
        for tier, place in self._places.items():
            self._note_stored(place, there[tier])
        for tier, place in self._places.items():
            self._note_removed(place, [key for key in self._entries if key not in there[tier]])

    # ---------------------------------------------------------------- the bound

    @property
    def _full(self) -> bool:
        return len(self._expected) + len(self._entries) >= self._held_max

    def _make_room(self) -> bool:
        """Whether one more can be remembered: instead of one that is not in host memory."""
        if self._full and self._below:
            key = next(iter(self._below))
            entry = self._entries[key]
            self._drop(key)
            if entry.block is not None:
                self._events += [
                    RemovedEvent(hashes=[entry.block.hash], medium=medium)
                    for medium, tiers in self._same_medium.items()
                    if entry.tiers & tiers
                ]
        return not self._full

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._below.pop(key, None)

    def _name(self, entry: _Entry, request: EngineRequest, number: int) -> None:
        """Announces a block in all media that have it, unless it was."""
        if entry.block is None:
            block = entry.block = self._describe(request, number)
            self._events += [
                StoredEvent(block=block, medium=medium)
                for medium, tiers in self._same_medium.items()
                if entry.tiers & tiers
            ]
