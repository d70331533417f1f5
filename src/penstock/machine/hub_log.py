"""Which blocks of the hub have come or gone: what a tier of peers lends to other engines.

The log has keys alone. What is true of a key is looked up when it is taken, so one that came and
went costs one entry, and nothing is said twice.

The one rule: a block is lent only if it may be written into the tier: not of before a reset that
another engine made, and not of other weights.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.states import LEAVING, READY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.cache.nodes import NodeTable
    from penstock.cache.tier import Tier
    from penstock.vocabulary.keys import Key


class HubChanges(NamedTuple):
    """What has changed in the hub."""

    keys: Sequence[Key]
    """Of blocks that can be read there, and"""
    slots: NDArray[np.int32]
    """where each lies."""
    gone: Sequence[Key]


class HubLog:
    """The keys that have changed since they were taken; nothing while nobody follows."""

    def __init__(self) -> None:
        self._changed: dict[Key, None] = {}
        self.followed = False

    @property
    def has_more(self) -> bool:
        return bool(self._changed)

    def follow(self, nodes: NodeTable, hub: Tier) -> None:
        """Begins anew: all that lies there now is a change."""
        self.followed = True
        self._changed = dict.fromkeys(nodes.keys_of(hub.ready_nodes().tolist()))

    def leave(self) -> None:
        self.followed = False
        self._changed = {}

    def note(self, keys: Sequence[Key]) -> None:
        if self.followed:
            self._changed.update(dict.fromkeys(keys))

    def take(self, nodes: NodeTable, hub: Tier, lent_in: int, limit: int) -> HubChanges:
        """The oldest changes, as they are now, for the tier `lent_in`."""
        keys = list(islice(self._changed, limit))
        for key in keys:
            del self._changed[key]
        known = np.array(nodes.get_all(keys), dtype=np.intp)
        found = known[known != NOWHERE]
        found = nodes.not_outdated(nodes.of_weights_now(found), lent_in)
        slots = hub.slot_of[found]
        found, slots = found[slots != NOWHERE], slots[slots != NOWHERE]
        readable = (hub.pool.state[slots] == READY) | (hub.pool.state[slots] == LEAVING)
        found, slots = found[readable], slots[readable]
        held = nodes.keys_of(found.tolist())
        kept = set(held)
        return HubChanges(held, slots.astype(np.int32), [key for key in keys if key not in kept])
