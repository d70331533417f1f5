"""Eyes on the cache from outside: on the bytes and sums of a tier, and on the KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.machine.kv_events import AllCleared, BlocksRemoved, BlocksStored
from penstock.tiers.memory import MemoryTier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.runtime.cache import Cache
    from penstock.vocabulary.ids import Key
    from penstock.vocabulary.layout import Layout

FLIPPED_BIT = 0x10
"""Any bit would do: a checksum finds each."""


class WatchedTier(MemoryTier):
    """A memory tier that counts its checksums, and whose bytes can be damaged."""

    def __init__(self, layout: Layout, slot_count: int) -> None:
        super().__init__(layout, slot_count)
        self.sums_made = 0
        self.sums_checked = 0

    def sums(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Movers ask for the sums of a block once: to check the bytes they have read."""
        self.sums_checked += len(slots)
        return super().sums(slots)

    def keep_sums(self, slots: NDArray[np.int32], sums: NDArray[np.uint64]) -> None:
        """Counts the blocks that were written with their sums."""
        self.sums_made += len(slots)
        super().keep_sums(slots, sums)

    def damage(self, slot: int, byte: int) -> None:
        """Flips one bit of a block, as failing memory would."""
        blocks = self.blocks([slot])
        extent = self.layout.block_extents(slot)[0]
        blocks.buffers[extent.place][extent.offset + byte] ^= FLIPPED_BIT


class Router:
    """Knows what is cached where from KV events alone, as a router in front of engines would."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sequence = 0
        self.present: dict[str, set[Key]] = {}
        self.stored: dict[str, int] = {}
        self.removed: dict[str, int] = {}
        self.gaps = 0

    def listen(self) -> None:
        """Takes in what has happened since the last time."""
        for event in self._cache.take_kv_events():
            self.gaps += event.sequence != self._sequence + 1
            self._sequence = event.sequence
            if isinstance(event, BlocksStored):
                self.present.setdefault(event.tier, set()).update(event.keys)
                self.stored[event.tier] = self.stored.get(event.tier, 0) + len(event.keys)
            elif isinstance(event, BlocksRemoved):
                self.present[event.tier].difference_update(event.keys)
                self.removed[event.tier] = self.removed.get(event.tier, 0) + len(event.keys)
            elif isinstance(event, AllCleared):
                self.present.clear()
