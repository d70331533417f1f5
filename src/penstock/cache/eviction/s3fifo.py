"""S3-FIFO (Yang et al., SOSP 2023), restricted to blocks that may leave.

New blocks enter a small queue; only those hit again while they were in it move on to the
main queue, so that a burst of prompts seen once cannot wash out what is reused. A block
evicted from the small queue leaves a ghost: if it comes back soon, it enters the main queue
at once. Hits never reorder a queue, they only count (up to three).

A queue position is a stamp given on entry and kept while the block is leased or has
followers; blocks that may leave are taken by lowest stamp.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import grown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.eviction.base import Standing
    from penstock.vocabulary.ids import Key

_SMALL, _MAIN = 0, 1
_COUNT_MAX = 3
_SMALL_SHARE = 10
"""The small queue gets one slot in this many (the paper's tenth)."""

_Entry = tuple[int, int, int]


_STALE_MIN = 64
"""A queue with fewer entries than this is not cleaned up."""


class _Arrays:
    """What is kept by node, for one policy or for several with different nodes."""

    def __init__(self) -> None:
        self.where = np.zeros(0, dtype=np.uint8)
        self.stamp = np.zeros(0, dtype=np.int64)
        self.count = np.zeros(0, dtype=np.uint8)

    def resize(self, node_capacity: int) -> None:
        if len(self.where) < node_capacity:
            self.where = grown(self.where, node_capacity)
            self.stamp = grown(self.stamp, node_capacity)
            self.count = grown(self.count, node_capacity)


class S3FifoPolicy:
    """Three first-in-first-out queues: small, main, and ghosts of the small one."""

    name = "s3fifo"

    def __init__(self, slot_count: int, standing: Standing) -> None:
        self._standing = standing
        self._small_limit = max(1, slot_count // _SMALL_SHARE)
        self._ghost_limit = slot_count
        self._queue_limits = [_STALE_MIN, _STALE_MIN]
        self._queues: tuple[list[_Entry], list[_Entry]] = ([], [])
        """Heaps of (priority, stamp, node): small and main."""
        self._ghosts: dict[Key, None] = {}
        self._moved: list[tuple[int, int, int, int]] = []
        """Since the mark: nodes that got another round, with the place they had before."""
        self._stamp_next = 0
        self._small_count = 0
        self._arrays = _Arrays()
        self._look_at_arrays()

    def sharing(self, standing: Standing) -> S3FifoPolicy:
        """Another order of other nodes, in the same arrays."""
        other = S3FifoPolicy(self._ghost_limit, standing)
        other._arrays = self._arrays
        return other

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """New blocks enter the small queue, returning ones the main queue."""
        self._count[nodes] = 0
        self._where[nodes] = _SMALL
        self._stamp[nodes] = np.arange(self._stamp_next, self._stamp_next + len(nodes))
        self._stamp_next += len(nodes)
        self._small_count += len(nodes)
        if self._ghosts:
            for node, key in zip(nodes.tolist(), keys, strict=True):
                if key in self._ghosts:
                    del self._ghosts[key]
                    self._where[node] = _MAIN
                    self._small_count -= 1

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:  # noqa: ARG002
        """Hits are counted, up to three."""
        self._count[nodes] = np.minimum(self._count[nodes] + 1, _COUNT_MAX)

    def offer(self, nodes: Iterable[int]) -> None:
        """Queues blocks at the position they got on entry."""
        for node in nodes:
            self._enqueue(node)
        for where in (_SMALL, _MAIN):
            if len(self._queues[where]) > self._queue_limits[where]:
                self._drop_stale(where)

    def pop(self) -> int | None:
        """The next block to leave; blocks with hits get another round instead."""
        while True:
            small, main = self._front(_SMALL), self._front(_MAIN)
            if small is None and main is None:
                return None
            where = _MAIN if small is None else _SMALL
            if small is not None and main is not None:
                where = self._choose(small, main)
            _, stamp, node = heappop(self._queues[where])
            count = int(self._count[node])
            if count <= (1 if where == _SMALL else 0):
                return node
            self._moved.append((node, where, stamp, count))
            if where == _SMALL:
                self._small_count -= 1
            self._where[node] = _MAIN
            self._count[node] = 0 if where == _SMALL else count - 1
            self._stamp[node] = self._stamp_next
            self._stamp_next += 1
            self._enqueue(node)

    def mark(self) -> None:
        """Remembers from now on who got another round."""
        self._moved.clear()

    def rollback(self) -> None:
        """Puts every block that got another round back where it was."""
        for node, where, stamp, count in reversed(self._moved):
            if where == _SMALL:
                self._small_count += 1
            self._where[node] = where
            self._stamp[node] = stamp
            self._count[node] = count
        for node, *_ in self._moved:
            self._enqueue(node)
        self._moved.clear()

    def offer_and_pop(self, node: int) -> int | None:
        self._enqueue(node)
        return self.pop()

    def leave_together(self, node: int, others: NDArray[np.int32]) -> NDArray[np.bool_]:  # noqa: ARG002
        """Each block has a turn of its own."""
        return np.zeros(len(others), dtype=bool)

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """A block evicted from the small queue leaves a ghost."""
        for node, key in zip(nodes, keys, strict=True):
            self._stamp[node] = -1
            if self._where[node] == _SMALL:
                self._small_count -= 1
                if evicted:
                    self._ghosts[key] = None
        while len(self._ghosts) > self._ghost_limit:
            del self._ghosts[next(iter(self._ghosts))]

    def candidates(self) -> set[int]:
        return {
            entry[2]
            for where in (_SMALL, _MAIN)
            for entry in self._queues[where]
            if self._holds(entry, where)
        }

    def resize(self, node_capacity: int) -> None:
        self._arrays.resize(node_capacity)
        self._look_at_arrays()

    def _look_at_arrays(self) -> None:
        self._where = self._arrays.where
        self._stamp = self._arrays.stamp
        self._count = self._arrays.count

    def _choose(self, small: _Entry, main: _Entry) -> int:
        if small[0] != main[0]:
            return _SMALL if small[0] < main[0] else _MAIN
        return _SMALL if self._small_count > self._small_limit else _MAIN

    def _enqueue(self, node: int) -> None:
        priority = self._standing(node)
        if priority is not None:
            where = int(self._where[node])
            heappush(self._queues[where], (priority, int(self._stamp[node]), node))

    def _front(self, where: int) -> _Entry | None:
        queue = self._queues[where]
        while queue:
            if self._holds(queue[0], where):
                return queue[0]
            heappop(queue)
        return None

    def _holds(self, entry: _Entry, where: int) -> bool:
        priority, stamp, node = entry
        return bool(
            self._where[node] == where
            and self._stamp[node] == stamp
            and self._standing(node) == priority
        )

    def _drop_stale(self, where: int) -> None:
        held = {entry for entry in self._queues[where] if self._holds(entry, where)}
        self._queues[where][:] = held
        heapify(self._queues[where])
        self._queue_limits[where] = 2 * len(held) + _STALE_MIN
