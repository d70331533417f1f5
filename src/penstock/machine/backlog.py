"""Blocks that a stored tier missed while it was off, and that are still in the hub.

    save not made, or failed ─→ missed ──tier on──→ due ──written──→ in the tier
                                  ↑                  │
                                  └─────tier off─────┘      left the hub: dropped, and counted

`write_behind` writes them. The one rule: only what is in the hub is noted here, so it never is more
than the hub holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.nodes import NOWHERE
from penstock.cache.settings import HUB
from penstock.cache.states import LEAVING, READY

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.tier import Tier
    from penstock.machine.books import Books
    from penstock.vocabulary.ids import Key


@dataclass(slots=True)
class Backlog:
    """What one stored tier missed, in the order in which it would have been written."""

    missed: dict[Key, None] = field(default_factory=dict)
    """Is written when the tier comes on."""
    due: dict[Key, None] = field(default_factory=dict)
    """Is written now, some blocks at a time."""
    dropped: int = 0
    """Blocks that left the hub before they could be written, since the beginning."""

    def __len__(self) -> int:
        return len(self.missed) + len(self.due)

    def resume(self) -> None:
        """The tier came on."""
        self.due |= self.missed
        self.missed = {}

    def pause(self) -> None:
        """The tier went off."""
        self.missed = self.due | self.missed
        self.due = {}

    def give_up(self) -> None:
        """What is noted cannot be written any more."""
        self.dropped += len(self)
        self.clear()

    def clear(self) -> None:
        """What is noted must not be written any more: it is void."""
        self.missed.clear()
        self.due.clear()


def miss(books: Books, tier: Tier, nodes: NDArray[np.int32]) -> None:
    """Notes blocks that would be written into a tier now, if it could be used."""
    hub = books.tier(HUB)
    slots = hub.slot_of[nodes]
    state = hub.pool.state[slots]
    there = (slots != NOWHERE) & ((state == READY) | (state == LEAVING))
    there &= tier.slot_of[nodes] == NOWHERE
    backlog = books.backlogs[tier.index]
    backlog.missed |= dict.fromkeys(books.nodes.keys_of(nodes[there].tolist()))


def leave_hub(books: Books, numbers: Sequence[int], keys: Sequence[Key]) -> None:
    """Blocks leave the hub: what a tier should have been given of them is dropped."""
    for index, backlog in books.backlogs.items():
        if not backlog:
            continue
        slot_of = books.tier(index).slot_of
        for node, key in zip(numbers, keys, strict=True):
            if key in backlog.due or key in backlog.missed:
                backlog.due.pop(key, None)
                backlog.missed.pop(key, None)
                backlog.dropped += int(slot_of[node] == NOWHERE)
