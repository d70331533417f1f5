"""Least recently used, leaf-first.

Only blocks that may leave are queued, so a released prompt adds one entry, its last block;
the block before it follows when the last one has gone. Entries that no longer hold are
recognised by their stamp when their turn comes.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heappushpop
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import grown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.eviction.base import Standing
    from penstock.vocabulary.ids import Key


_STALE_MIN = 64
"""A queue with fewer entries than this is not cleaned up."""


class _Arrays:
    """What is kept by node, for one policy or for several with different nodes."""

    def __init__(self) -> None:
        self.used = np.zeros(0, dtype=np.int64)

    def resize(self, node_capacity: int) -> None:
        if len(self.used) < node_capacity:
            self.used = grown(self.used, node_capacity)


class LruPolicy:
    """The block whose last use lies longest ago leaves first."""

    name = "lru"

    def __init__(self, slot_count: int, standing: Standing) -> None:
        self._slot_count = slot_count
        self._standing = standing
        self._arrays = _Arrays()
        self._used = self._arrays.used
        """Node to the tick of its last use."""
        self._used_view = self._used.data
        self._queue: list[tuple[int, int, int]] = []
        """A heap of (priority, tick, node)."""
        self._queue_limit = _STALE_MIN

    def sharing(self, standing: Standing) -> LruPolicy:
        """Another order of other nodes, in the same arrays."""
        other = LruPolicy(self._slot_count, standing)
        other._arrays = self._arrays
        return other

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """Entering counts as a use."""
        self._used[nodes] = tick

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:
        """A hit is a use."""
        self._used[nodes] = tick

    def offer(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            priority = self._standing(node)
            if priority is not None:
                heappush(self._queue, (priority, self._used_view[node], node))
        if len(self._queue) > self._queue_limit:
            self._drop_stale()

    def pop(self) -> int | None:
        """The least recently used block among those of lowest priority."""
        while self._queue:
            priority, used, node = heappop(self._queue)
            if self._used_view[node] == used and self._standing(node) == priority:
                return node
        return None

    def mark(self) -> None:
        """Popping changes no order."""

    def rollback(self) -> None:
        """Popping changed no order."""

    def offer_and_pop(self, node: int) -> int | None:
        """The least recently used block, `node` included; often it is `node` itself."""
        priority = self._standing(node)
        if priority is None:
            return self.pop()
        entry = (priority, self._used_view[node], node)
        first = heappushpop(self._queue, entry)
        if first is entry:
            return node
        heappush(self._queue, first)
        return self.pop()

    def leave_together(self, node: int, others: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Blocks that were last used by the same event."""
        same: NDArray[np.bool_] = self._used[others] == self._used_view[node]
        return same

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:  # noqa: ARG002
        """Nothing is kept of a block that left; its entries no longer hold."""
        self._used[list(nodes)] = -1

    def candidates(self) -> set[int]:
        return {
            node
            for priority, used, node in self._queue
            if self._standing(node) == priority and self._used[node] == used
        }

    def resize(self, node_capacity: int) -> None:
        self._arrays.resize(node_capacity)
        self._used = self._arrays.used
        self._used_view = self._used.data

    def _drop_stale(self) -> None:
        held = {
            entry
            for entry in self._queue
            if self._standing(entry[2]) == entry[0] and self._used[entry[2]] == entry[1]
        }
        self._queue = list(held)
        heapify(self._queue)
        # A node has at most one entry that holds; beyond twice that, most are stale.
        self._queue_limit = 2 * len(held) + _STALE_MIN
