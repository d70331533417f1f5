"""What happened lately, so that a block or a request can tell its story.

One entry an event, not one a block: an entry keeps the list of keys it concerned, which
exists anyway. The memory is bounded by entries and by keys.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.ids import Key

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
        keys = f" [{len(self.keys)} blocks]" if self.keys else ""
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
        """The story of a block."""
        return tuple(str(entry) for entry in self._entries if key in entry.keys)

    def of_request(self, request: str) -> tuple[str, ...]:
        """The story of a request."""
        return tuple(str(entry) for entry in self._entries if entry.cause == request)

    def lately(self, count: int) -> tuple[str, ...]:
        """The last few happenings, whatever they concern."""
        return tuple(str(entry) for entry in list(self._entries)[-count:])
