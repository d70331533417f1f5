"""Blocks that may leave, the one that is worth least first; and the plainest worth: the last use.

Only blocks that may leave are queued, so a released prompt adds one entry, its last block;
the block before it follows when the last one has gone. Entries that no longer hold are
recognised by what the block is worth now, when their turn comes.
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
    from penstock.vocabulary.keys import Key


_STALE_MIN = 64
"""A queue with fewer entries than this is not cleaned up."""


class Worths:
    """What blocks are worth, by node: for one order, or for several of different nodes."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.of = np.zeros(0, dtype=dtype)

    def resize(self, node_capacity: int) -> None:
        if len(self.of) < node_capacity:
            self.of = grown(self.of, node_capacity)


class WorthQueue:
    """The block that is worth least leaves first."""

    def __init__(self, standing: Standing, worths: Worths) -> None:
        self._standing = standing
        self._worths = worths
        self._look_at_arrays()
        self._queue: list[tuple[int, float, int]] = []
        """A heap of (priority, worth, node)."""
        self._queue_limit = _STALE_MIN

    def offer(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            priority = self._standing(node)
            if priority is not None:
                heappush(self._queue, (priority, self._worth_view[node], node))
        if len(self._queue) > self._queue_limit:
            self._drop_stale()

    def pop(self) -> int | None:
        """The block that is worth least among those of lowest priority."""
        while self._queue:
            priority, worth, node = heappop(self._queue)
            if self._worth_view[node] == worth and self._standing(node) == priority:
                return node
        return None

    def mark(self) -> None:
        """Popping changes no order."""

    def rollback(self) -> None:
        """Popping changed no order."""

    def offer_and_pop(self, node: int) -> int | None:
        """The block that is worth least, `node` included; often it is `node` itself."""
        priority = self._standing(node)
        if priority is None:
            return self.pop()
        entry: tuple[int, float, int] = (priority, self._worth_view[node], node)
        first = heappushpop(self._queue, entry)
        if first is entry:
            return node
        heappush(self._queue, first)
        return self.pop()

    def leave_together(self, node: int, others: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Blocks that are worth the same."""
        same: NDArray[np.bool_] = self._worths.of[others] == self._worth_view[node]
        return same

    def candidates(self) -> set[int]:
        return {entry[2] for entry in self._queue if self._holds(entry)}

    def resize(self, node_capacity: int) -> None:
        self._worths.resize(node_capacity)
        self._look_at_arrays()

    def order_anew(self) -> None:
        """All blocks are worth something else than before."""
        nodes = {node for _, _, node in self._queue}
        self._queue = []
        self.offer(nodes)

    def _look_at_arrays(self) -> None:
        # Reading one number through a memoryview takes a third of the time an array takes.
        self._worth_view = self._worths.of.data

    def _holds(self, entry: tuple[int, float, int]) -> bool:
        """Whether a block may still leave, and is worth what it was when it was queued."""
        priority, worth, node = entry
        return self._worth_view[node] == worth and self._standing(node) == priority

    def _drop_stale(self) -> None:
        self._queue = list(set(filter(self._holds, self._queue)))
        heapify(self._queue)
        # A node has at most one entry that holds; beyond twice that, most are stale.
        self._queue_limit = 2 * len(self._queue) + _STALE_MIN


class LruPolicy(WorthQueue):
    """The block whose last use lies longest ago leaves first."""

    name = "lru"

    def __init__(
        self, slot_count: int, standing: Standing, *, worths: Worths | None = None
    ) -> None:
        super().__init__(standing, worths or Worths(np.int64))
        self._slot_count = slot_count

    def sharing(self, standing: Standing) -> LruPolicy:
        """Another order of other nodes, in the same arrays."""
        return LruPolicy(self._slot_count, standing, worths=self._worths)

    def add(self, nodes: NDArray[np.intp], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """Entering counts as a use."""
        self._worths.of[nodes] = tick

    def touch(self, nodes: NDArray[np.intp], *, tick: int) -> None:
        """A hit is a use."""
        self._worths.of[nodes] = tick

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:  # noqa: ARG002
        """Nothing is kept of a block that left; its entries no longer hold."""
        self._worths.of[np.array(nodes, dtype=np.intp)] = -1
