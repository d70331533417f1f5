"""Why blocks are not there: the memory behind "why did this request miss?".

Of blocks that left, the reason is kept, by key, up to a bound; the oldest go first. A block
that comes back is no longer departed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.ids import Key


class MissReason(Enum):
    """Why the first block that was not found was not found."""

    NONE = "none"
    """Nothing that could be reused was missing."""
    NEVER_SEEN = "never seen"
    """No request computed it, or so long ago that even its departure is forgotten."""
    EVICTED = "evicted"
    """It made room for others."""
    FILLING = "still filling"
    """Another request is computing it, or its copy is on the way."""
    FORM = "form"
    """The only copies lie in a form that this engine cannot read."""
    NAMESPACE = "namespace"
    """The same tokens are known in another namespace: adapter, tenant or weights differ."""
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

    def freeze(self) -> tuple[tuple[Key, str, str], ...]:
        """The memory as a tuple."""
        return tuple((key, left.reason.value, left.tier) for key, left in self._by_key.items())
