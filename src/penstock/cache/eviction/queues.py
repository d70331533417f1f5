"""Policies that keep blocks in queues and learn nothing: least recently used, and S3-FIFO.

Only blocks that may leave are queued, so a released prompt adds one entry, its last block;
the block before it follows when the last one has gone. Entries that no longer hold are
recognised by their stamp when their turn comes.

New blocks enter a small queue; only those hit again while they were in it move on to the
main queue, so that a burst of prompts seen once cannot wash out what is reused. A block
evicted from the small queue leaves a ghost: if it comes back soon, it enters the main queue
at once. Hits never reorder a queue, they only count (up to three).

Blocks that entered together and were hit alike are a *cohort*: they have one place in a queue, go
on together, and leave one after the other, from the last one on. So most of what is done for a
chain of blocks is done once. A place is a stamp, given on entry and kept while blocks are leased or
have followers; blocks that may leave are taken by lowest stamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heappushpop
from itertools import compress, islice, pairwise
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


_SMALL, _MAIN = 0, 1
_COUNT_MAX = 3
_SMALL_SHARE = 10
"""The small queue gets one slot in this many (the paper's tenth)."""

_Entry = tuple[int, int, int]


"""A queue with fewer entries than this is not cleaned up."""
_NO_COHORT = -1


@dataclass(slots=True, eq=False)
class _Cohort:
    """Blocks that entered together and were hit alike."""

    where: int
    stamp: int
    count: int
    """Hits, up to three."""
    size: int


class _Shared:
    """What is kept by node, for one policy or for several with different nodes."""

    def __init__(self) -> None:
        self.cohort = np.zeros(0, dtype=np.int64)
        self.cohorts: dict[int, _Cohort] = {}
        """None of them is empty."""
        self.next = 0

    def resize(self, node_capacity: int) -> None:
        if len(self.cohort) < node_capacity:
            self.cohort = grown(self.cohort, node_capacity, fill=_NO_COHORT)

    def begin(self, nodes: NDArray[np.int32], where: int, stamp: int, count: int) -> None:
        """Makes blocks a cohort of their own."""
        self.cohorts[self.next] = _Cohort(where, stamp, count, len(nodes))
        self.cohort[nodes] = self.next
        self.next += 1


class S3FifoPolicy:
    """Three first-in-first-out queues: small, main, and ghosts of the small one."""

    name = "s3fifo"

    def __init__(self, slot_count: int, standing: Standing) -> None:
        self._standing = standing
        self._small_limit = max(1, slot_count // _SMALL_SHARE)
        self._ghost_limit = slot_count
        self._queue_limits = [_STALE_MIN, _STALE_MIN]
        self._queues: tuple[list[_Entry], list[_Entry]] = ([], [])
        """Heaps of (priority, stamp, node): small and main. A cohort that went on leaves entries
        with its earlier stamp behind, which take its place when their turn comes."""
        self._ghosts: dict[Key, None] = {}
        self._moved: list[tuple[_Cohort, int, int, int]] = []
        """Since the mark: cohorts that got another round, with the place they had before."""
        self._requeued: list[int] = []
        """Since the mark: nodes whose entries were renewed."""
        self._stamp_next = 0
        self._small_count = 0
        self._shared = _Shared()
        self._look_at_arrays()

    def sharing(self, standing: Standing) -> S3FifoPolicy:
        """Another order of other nodes, in the same arrays."""
        other = S3FifoPolicy(self._ghost_limit, standing)
        other._shared = self._shared
        other._look_at_arrays()
        return other

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """New blocks enter the small queue, returning ones the main queue."""
        if not len(nodes):
            return
        ghosts = self._ghosts
        fresh = nodes
        if ghosts and not ghosts.keys().isdisjoint(keys):
            known = np.array([key in ghosts for key in keys], dtype=bool)
            for key in compress(keys, known.tolist()):
                ghosts.pop(key, None)
            fresh = nodes[~known]
            self._shared.begin(nodes[known], _MAIN, self._stamp_next, 0)
        if len(fresh):
            self._shared.begin(fresh, _SMALL, self._stamp_next, 0)
            self._small_count += len(fresh)
        self._stamp_next += 1

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:  # noqa: ARG002
        """Hits are counted, up to three."""
        for part, cohort in self._parts(nodes):
            count = min(cohort.count + 1, _COUNT_MAX)
            if count == cohort.count:
                continue
            if len(part) == cohort.size:
                cohort.count = count
            else:
                cohort.size -= len(part)
                self._shared.begin(part, cohort.where, cohort.stamp, count)

    def offer(self, nodes: Iterable[int]) -> None:
        """Queues blocks at the place of their cohort."""
        for node in nodes:
            self._enqueue(node)
        for where in (_SMALL, _MAIN):
            if len(self._queues[where]) > self._queue_limits[where]:
                self._drop_stale(where)

    def pop(self) -> int | None:
        """The next block to leave; cohorts with hits get another round instead."""
        while True:
            small, main = self._front(_SMALL), self._front(_MAIN)
            if small is None and main is None:
                return None
            where = _MAIN if small is None else _SMALL
            if small is not None and main is not None:
                where = self._choose(small, main)
            _, _, node = heappop(self._queues[where])
            cohort = self._cohorts[self._cohort_view[node]]
            if cohort.count <= (1 if where == _SMALL else 0):
                return node
            self._moved.append((cohort, where, cohort.stamp, cohort.count))
            if where == _SMALL:
                self._small_count -= cohort.size
            cohort.where = _MAIN
            cohort.count = 0 if where == _SMALL else cohort.count - 1
            cohort.stamp = self._stamp_next
            self._stamp_next += 1
            self._requeue(node)

    def mark(self) -> None:
        """Remembers from now on who got another round."""
        self._moved.clear()
        self._requeued.clear()

    def rollback(self) -> None:
        """Puts every cohort that got another round back where it was."""
        for cohort, where, stamp, count in reversed(self._moved):
            if where == _SMALL:
                self._small_count += cohort.size
            cohort.where, cohort.stamp, cohort.count = where, stamp, count
        for node in self._requeued:
            self._enqueue(node)
        self.mark()

    def offer_and_pop(self, node: int) -> int | None:
        self._enqueue(node)
        return self.pop()

    def leave_together(self, node: int, others: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Blocks of one cohort."""
        same: NDArray[np.bool_] = self._cohort[others] == self._cohort_view[node]
        return same

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """A block evicted from the small queue leaves a ghost."""
        numbers = np.array(nodes, dtype=np.int32)
        ghosts, first = self._ghosts, 0
        for part, cohort in self._parts(numbers):
            if cohort.where == _SMALL:
                self._small_count -= len(part)
                if evicted:
                    ghosts |= dict.fromkeys(keys[first : first + len(part)])
            cohort.size -= len(part)
            if not cohort.size:
                del self._cohorts[self._cohort_view[int(part[0])]]
            first += len(part)
        self._cohort[numbers] = _NO_COHORT
        excess = len(ghosts) - self._ghost_limit
        for key in list(islice(ghosts, max(0, excess))):
            del ghosts[key]

    def candidates(self) -> set[int]:
        return {
            node
            for queue in self._queues
            for priority, _, node in queue
            if self._cohort_view[node] in self._cohorts and self._standing(node) == priority
        }

    def resize(self, node_capacity: int) -> None:
        self._shared.resize(node_capacity)
        self._look_at_arrays()

    def _look_at_arrays(self) -> None:
        self._cohorts = self._shared.cohorts
        self._cohort = self._shared.cohort
        # Reading one number through a memoryview takes a third of the time an array takes.
        self._cohort_view = self._cohort.data

    def _parts(self, nodes: NDArray[np.int32]) -> list[tuple[NDArray[np.int32], _Cohort]]:
        """Neighbours of one cohort, each with it."""
        if not len(nodes):
            return []
        numbers = self._cohort.take(nodes)
        changes = numbers[1:] != numbers[:-1]
        if not np.count_nonzero(changes):
            return [(nodes, self._cohorts[int(numbers[0])])]
        ends = changes.nonzero()[0]
        bounds = [0, *(ends + 1).tolist(), len(nodes)]
        firsts = numbers[bounds[:-1]].tolist()
        return [
            (nodes[first:end], self._cohorts[number])
            for (first, end), number in zip(pairwise(bounds), firsts, strict=True)
        ]

    def _choose(self, small: _Entry, main: _Entry) -> int:
        if small[0] != main[0]:
            return _SMALL if small[0] < main[0] else _MAIN
        return _SMALL if self._small_count > self._small_limit else _MAIN

    def _enqueue(self, node: int) -> None:
        priority = self._standing(node)
        if priority is not None:
            cohort = self._cohorts[self._cohort_view[node]]
            heappush(self._queues[cohort.where], (priority, cohort.stamp, node))

    def _requeue(self, node: int) -> None:
        self._requeued.append(node)
        self._enqueue(node)

    def _front(self, where: int) -> _Entry | None:
        queue = self._queues[where]
        while queue:
            priority, stamp, node = queue[0]
            cohort = self._cohorts.get(self._cohort_view[node])
            if cohort is not None and self._standing(node) == priority:
                if cohort.where == where and cohort.stamp == stamp:
                    return queue[0]
                # Its cohort went on without it: another block of it had its turn.
                heappop(queue)
                self._requeue(node)
            else:
                heappop(queue)
        return None

    def _drop_stale(self, where: int) -> None:
        """Keeps one entry of each node that may leave, at its place."""
        held: dict[int, _Entry] = {}
        for priority, stamp, node in self._queues[where]:
            cohort = self._cohorts.get(self._cohort_view[node])
            if cohort is not None and self._standing(node) == priority:
                held[node] = (priority, cohort.stamp if cohort.where == where else stamp, node)
        self._queues[where][:] = held.values()
        heapify(self._queues[where])
        self._queue_limits[where] = 2 * len(held) + _STALE_MIN
