"""Why a request missed, and what last happened to a block or a request.

Both memories are bounded; the oldest entries go first. Of a block that left, the reason is kept by
its key until it comes back. The history has one entry for an event, not one for a block: an entry
keeps the list of keys it concerned, which exists anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.keys import Key


class MissReason(Enum):
    """Why the first block that was not found was not found."""

    NONE = "none"
    """Nothing that could be reused was missing."""
    NEVER_SEEN = "never seen"
    """No request computed it, or so long ago that even its departure is forgotten."""
    EVICTED = "evicted"
    """It made room for others."""
    REFUSED = "refused"
    """A full tier did not take it: what lies there was worth more."""
    FILLING = "still filling"
    """Another request is computing it, or its copy is on the way."""
    FORM = "form"
    """The only copies lie in a form that this engine cannot read."""
    NAMESPACE = "namespace"
    """The same tokens are known in another namespace: adapter, tenant or weights differ."""
    WEIGHTS = "weights changed"
    """It was cached for weights that the model had before."""
    TIER_OFF = "tier off"
    """The only copies lie in a tier that is off."""
    OVER_QUOTA = "over quota"
    """It was refused or evicted because its tenant was over its quota."""
    CORRUPT = "corrupt"
    """Its last copy failed its checksum."""
    RESET = "reset"
    """The cache was reset."""
    LOST = "lost"
    """The memory that held it went with its rank or tier."""
    NO_ROOM = "no room"
    """A copy exists below, but there was no slot in the hub to bring it up through."""
    FAILED = "load failed"
    """It was found, but could not be brought up: a copy failed, or took too long."""
    RECOMPUTE = "recompute is quicker"
    """Copies lie below, but to load them would take longer than to compute them again, or would
    save too few tokens."""
    OPTED_OUT = "opted out"
    """The request asked not to reuse anything."""


@dataclass(frozen=True, slots=True)
class Departure:
    """How a block left."""

    reason: MissReason
    tier: str
    policy: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why a request found no more than it did."""

    reason: MissReason
    block: int = 0
    """Position of the first block that was not found."""
    departure: Departure | None = None
    """When, from which tier and by which policy, where that is known."""

    def __str__(self) -> str:
        if self.reason is MissReason.NONE:
            return "complete"
        text = f"block {self.block}: {self.reason.value}"
        if self.departure is not None:
            left = self.departure
            text += f" (at {left.at:.3f}, tier {left.tier}, policy {left.policy})"
        return text


class Departed:
    """The last departures, by key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[Key, Departure] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, keys: Sequence[Key], departure: Departure) -> None:
        """These blocks have no copy left."""
        if not self._by_key.keys().isdisjoint(keys):
            # Their place is at the end now.
            for key in keys:
                self._by_key.pop(key, None)
        self._by_key.update(dict.fromkeys(keys, departure))
        excess = len(self._by_key) - self._limit
        for key in list(islice(self._by_key, max(0, excess))):
            del self._by_key[key]

    def discard(self, keys: Sequence[Key]) -> None:
        """These blocks are back."""
        if self._by_key and not self._by_key.keys().isdisjoint(keys):
            for key in keys:
                self._by_key.pop(key, None)

    def get(self, key: Key) -> Departure | None:
        """How a block left, if that is remembered."""
        return self._by_key.get(key)

    def refused_by(self, key: Key) -> str:
        """The tier that refused a block, if it has not been taken since; empty if none did."""
        left = self._by_key.get(key)
        return left.tier if left is not None and left.reason is MissReason.REFUSED else ""


_KEYS_PER_ENTRY = 64
"""On average; a few entries may hold thousands, if the others hold few."""


class Happening(NamedTuple):
    """One thing that happened."""

    at: float
    what: str
    cause: str
    keys: Sequence[Key]
    detail: str

    def __str__(self) -> str:
        keys = f" [{counted(len(self.keys), 'block')}]" if self.keys else ""
        detail = f" {self.detail}" if self.detail else ""
        return f"{self.at:.6f} {self.what} cause={self.cause}{keys}{detail}"


class History:
    """The last happenings, oldest first."""

    def __init__(self, limit: int) -> None:
        self._entries: deque[Happening] = deque(maxlen=limit)
        self._key_limit = limit * _KEYS_PER_ENTRY
        self._key_count = 0

    def add(
        self, at: float, what: str, cause: str, keys: Sequence[Key] = (), detail: str = ""
    ) -> None:
        """Remembers one thing, and forgets the oldest where the bound demands it."""
        entries = self._entries
        if len(entries) == entries.maxlen:
            self._key_count -= len(entries[0].keys)
        entries.append(Happening(at, what, cause, keys, detail))
        self._key_count += len(keys)
        while self._key_count > self._key_limit and len(entries) > 1:
            self._key_count -= len(entries.popleft().keys)

    def of_key(self, key: Key) -> tuple[str, ...]:
        return tuple(str(entry) for entry in self._entries if key in entry.keys)

    def of_request(self, request: str) -> tuple[str, ...]:
        return tuple(str(entry) for entry in self._entries if entry.cause == request)

    def lately(self, count: int) -> tuple[str, ...]:
        """The last few happenings, whatever they concern."""
        return tuple(str(entry) for entry in list(self._entries)[-count:])
