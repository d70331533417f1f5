"""KV events with the engine's own block hashes, so that a router can follow both caches.

A router knows blocks by the engine's hashes, from the events of the engine's device cache. Events
from here carry the same hashes and the same description of each block, with host memory as the
medium. Penstock's own keys never leave the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.connectors.base.keys import EngineRequest
    from penstock.machine.kv_events import KvEvent
    from penstock.vocabulary.ids import Key

    Describe = Callable[[EngineRequest, int], "AnnouncedBlock"]

HELD_MAX = 1 << 20
"""Blocks whose engine hashes are kept; beyond it further ones are not announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncedBlock:
    """A block as a router knows it."""

    hash: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    adapter: str | None = None
    adapter_id: int | None = None
    extra_keys: tuple[object, ...] | None = None
    """What beside tokens is in the hash, as the engine keeps it."""
    session: str | None = None
    """The session of the request that saved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """A block is now in host memory."""

    block: AnnouncedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedEvent:
    """Blocks are no longer in host memory."""

    hashes: list[bytes]


class EventAnnouncer:
    """Turns events of one tier into events that the engine publishes."""

    def __init__(self, tier: str, *, describe: Describe) -> None:
        """Announces nothing yet.

        Args:
            tier: The tier whose blocks are announced.
            describe: The engine's own description of a block of a request, by its number.
        """
        self._tier = tier
        self._describe = describe
        self._expected: dict[Key, AnnouncedBlock] = {}
        self._stored: dict[Key, bytes] = {}
        self._events: list[StoredEvent | RemovedEvent] = []

    def expect(self, request: EngineRequest, blocks: Iterable[tuple[int, Key]]) -> None:
        """These blocks of a request, by number and key, are being written."""
        for number, key in blocks:
            if len(self._expected) + len(self._stored) >= HELD_MAX or key in self._stored:
                continue
            self._expected[key] = self._describe(request, number)

    def forget(self, keys: Iterable[Key]) -> None:
        """The saves of these blocks have ended: those not stored by now never will be."""
        for key in keys:
            self._expected.pop(key, None)

    def note(self, events: Iterable[KvEvent]) -> None:
        """Takes in what happened in the tiers since the last call."""
        for event in events:
            match event:
                case BlocksStored() if event.tier == self._tier:
                    self._note_stored(event.keys)
                case BlocksRemoved() if event.tier == self._tier:
                    self._note_removed(event.keys)
                case AllCleared():
                    # The engine's own "all cleared" event would cover its device cache as well.
                    self._note_removed(list(self._stored))
                case _:
                    pass

    def take(self) -> list[StoredEvent | RemovedEvent]:
        """The events to publish."""
        events, self._events = self._events, []
        return events

    def _note_stored(self, keys: Iterable[Key]) -> None:
        for key in keys:
            block = self._expected.pop(key, None)
            if block is not None:
                self._stored[key] = block.hash
                self._events.append(StoredEvent(block=block))

    def _note_removed(self, keys: Iterable[Key]) -> None:
        hashes = [self._stored.pop(key) for key in keys if key in self._stored]
        if hashes:
            self._events.append(RemovedEvent(hashes=hashes))
