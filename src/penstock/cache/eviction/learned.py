"""Blocks leave in the order of what they are worth, as learned from the traffic.

A block is worth its Gittins index (`curves.py`): the hits per second of occupancy that it can be
expected to bring, by its class and its age. Blocks that may leave are kept by class and age, so the
least valuable one is found without looking at the others. Unless a shadow of this order finds
clearly more than one of LRU, blocks leave by last use alone.

Of blocks that were evicted a bounded number is remembered by key, so that what comes back too late
is learned from as well.

What happens is only noted. It is learned from, and blocks that may leave are queued, before the
next block enters or is to leave, or when some events have come together: most requests do not wait
for it, and one after the other it takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.cache.eviction.curves import (
    LENGTHS,
    NO_COHORT,
    RankedCells,
    ReuseCurves,
    age_bucket,
    class_of,
)
from penstock.cache.nodes import grown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cache.eviction.base import Judge, Standing
    from penstock.vocabulary.keys import Key

_STALE_MIN = 64
"""A queue with fewer entries than this is not cleaned up."""
_EVENTS_NOTED = 4
"""So many events are noted at most before they are learned from."""
_OFFERS_NOTED = 1024
"""So many blocks that may leave are noted at most before they are queued."""
_FEW = 16
"""With at most this many blocks, a loop is cheaper than array operations."""
_GHOSTS_MIN, _GHOSTS_MAX = 1 << 16, 1 << 20
"""Evicted blocks that are remembered: as many as there are slots, within these bounds."""


_Event = tuple[
    Callable[[NDArray[np.int32], "Sequence[Key]"], None], NDArray[np.int32], "Sequence[Key]", float
]
"""How to learn from it, its blocks, the keys where they matter, and when it was."""


class UsualLength:
    """How many blocks one kind of event is about, of late."""

    _EVENTS = 1000

    def __init__(self) -> None:
        self.mean = 0.0
        """Of logarithms."""
        self.events = 0

    def compare(self, count: int) -> int:
        """Which of `LENGTHS` this many blocks are; they count for what is usual from now on."""
        octaves = math.log2(count)
        if self.events < self._EVENTS:
            self.events += 1
        self.mean += (octaves - self.mean) / self.events
        return self._length_of(octaves)

    def look_at(self, count: int) -> int:
        """Which of `LENGTHS` this many blocks are, which may never come."""
        return self._length_of(math.log2(count))

    def _length_of(self, octaves: float) -> int:
        return min(LENGTHS - 1, max(0, math.floor(octaves - self.mean) + LENGTHS // 2))


class _Shared:
    """What is learned and kept by node, for one policy or for several with different nodes."""

    def __init__(self, slot_count: int) -> None:
        self.now = 0.0
        self.noted: list[_Event] = []
        """In order, what was not learned from yet."""
        self.curves = ReuseCurves(slot_count)
        self.ghosts: dict[Key, int] = {}
        """Key to cohort, of blocks that were evicted."""
        self.cohort = np.zeros(0, dtype=np.int64)
        # New blocks, hits and whole requests are of different lengths.
        self.usually_added = UsualLength()
        self.usually_hit = UsualLength()
        self.usually_released = UsualLength()

    def resize(self, node_capacity: int) -> None:
        if len(self.cohort) < node_capacity:
            self.cohort = grown(self.cohort, node_capacity, fill=NO_COHORT)

    def catch_up(self) -> None:
        """Learns from all that was noted."""
        noted, self.noted = self.noted, []
        for learn, nodes, keys, now in noted:
            self.curves.now = now
            learn(nodes, keys)
        self.curves.now = self.now


class LearnedPolicy:
    """The block that is worth least leaves first."""

    name = "learned"

    def __init__(
        self, slot_count: int, standing: Standing, *, shared: _Shared | None = None
    ) -> None:
        self._slot_count = slot_count
        self._standing = standing
        self._shared = shared or _Shared(slot_count)
        self._curves = self._shared.curves
        self._ghosts = self._shared.ghosts
        self._ghost_limit = min(max(slot_count, _GHOSTS_MIN), _GHOSTS_MAX)
        self._queues: dict[int, RankedCells] = {}
        """By priority."""
        self._queue_limit = _STALE_MIN
        self._offered: list[int] = []
        """Blocks that may leave and were not queued yet."""
        # Every use makes a cohort with a higher number, so that it also says when a use was.
        self._last: tuple[int, int, int] | None = None
        """Priority, cohort and node of what was popped last, if nothing was offered since."""
        self._touched_last = False
        """Whether blocks that enter now follow those that were hit."""
        self._look_at_arrays()

    def sharing(self, standing: Standing) -> LearnedPolicy:
        """Another order of other nodes, in the same arrays; all learn together."""
        return LearnedPolicy(self._slot_count, standing, shared=self._shared)

    @property
    def may_refuse(self) -> bool:
        """Whether blocks that are worth too little stay outside, in the shadow as in the tier."""
        return self._curves.may_refuse

    @may_refuse.setter
    def may_refuse(self, may: bool) -> None:
        self._curves.may_refuse = may

    def advance(self, now: float) -> None:
        """Ages count from here."""
        self._shared.now = now

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """New blocks; those that were evicted not long ago count as hit."""
        if len(nodes):
            # What left for them is learned from now: to compute blocks takes long anyway.
            if self._shared.noted:
                self._shared.catch_up()
            known = self._ghosts and keys[0] in self._ghosts
            self._note(self._learn_added, nodes, list(keys) if known else ())

    def admit(self, keys: Sequence[Key], *, priority: int) -> Judge | None:
        """Compares what blocks are worth; all may enter while blocks leave by last use."""
        self._shared.catch_up()
        curves = self._curves
        if not keys or curves.ranking.by_use:
            return None
        worth = self._worth(keys)

        def judge(victim: int) -> int:
            leaves_at = self._standing(victim)
            if leaves_at is not None and leaves_at != priority:
                return len(keys) if leaves_at < priority else 0
            place = curves.place_of(*curves.class_and_since(self._cohort_view[victim]))
            return next((end for end, best in worth if best >= place), 0)

        return judge

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:  # noqa: ARG002
        """A hit shows at what age such blocks are used again."""
        if len(nodes):
            self._note(self._learn_hit, nodes, ())

    def release(self, nodes: NDArray[np.int32], *, tick: int) -> None:  # noqa: ARG002
        """Their age counts from the end of the request."""
        if len(nodes):
            self._note(self._learn_released, nodes, ())

    def offer(self, nodes: Iterable[int]) -> None:
        """Notes blocks that are to be queued by class and age."""
        self._last = None
        self._offered.extend(nodes)
        if len(self._offered) > _OFFERS_NOTED:
            self._catch_up()

    def pop(self) -> int | None:
        """The block of the lowest priority that is worth least."""
        if self._offered or self._shared.noted:
            self._catch_up()
        return self._pop_queued()

    def mark(self) -> None:
        """Popping changes no order."""

    def rollback(self) -> None:
        """Popping changed no order."""

    def offer_and_pop(self, node: int) -> int | None:
        """The same as both; a block of the cohort that the last one was of comes next."""
        if self._offered or self._shared.noted:
            self._catch_up()
        elif self._last is not None:
            priority, cohort, last = self._last
            same = self._cohort_view[node] == cohort and node < last
            if same and self._standing(node) == priority:
                self._last = (priority, cohort, node)
                return node
        self._enqueue(node)
        return self._pop_queued()

    def leave_together(self, node: int, others: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Blocks of one cohort: they are worth the same."""
        if self._shared.noted:
            self._shared.catch_up()
        same: NDArray[np.bool_] = self._cohort[others] == self._cohort_view[node]
        return same

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """An evicted block leaves a ghost; of others nothing more is learned."""
        numbers = np.array(nodes, dtype=np.int32)
        self._note(self._learn_evicted if evicted else self._learn_dropped, numbers, list(keys))

    def candidates(self) -> set[int]:
        self._catch_up()
        return {
            node
            for priority, queue in self._queues.items()
            for cohort, node, _ in queue.entries()
            if self._cohort_view[node] == cohort and self._standing(node) == priority
        }

    def resize(self, node_capacity: int) -> None:
        self._shared.resize(node_capacity)
        self._look_at_arrays()

    def _look_at_arrays(self) -> None:
        self._cohort = self._shared.cohort
        self._cohort_view = self._cohort.data

    def _note(
        self,
        learn: Callable[[NDArray[np.int32], Sequence[Key]], None],
        nodes: NDArray[np.int32],
        keys: Sequence[Key],
    ) -> None:
        shared = self._shared
        shared.noted.append((learn, nodes.copy(), keys, shared.now))
        if len(shared.noted) >= _EVENTS_NOTED:
            shared.catch_up()

    def _catch_up(self) -> None:
        """Learns from what was noted, then queues what may leave."""
        self._shared.catch_up()
        offered, self._offered = self._offered, []
        for node in dict.fromkeys(offered) if len(offered) > 1 else offered:
            self._enqueue(node)
        count = 0
        for queue in self._queues.values():
            count += queue.count
        if count > self._queue_limit:
            self._drop_stale()

    def _pop_queued(self) -> int | None:
        for priority in sorted(self._queues):
            queue = self._queues[priority]
            queue.settle(self._curves.ranking, self._shared.now)
            while (found := queue.first()) is not None:
                cell, (cohort, node, _) = found
                queue.take(cell)
                if self._cohort_view[node] == cohort and self._standing(node) == priority:
                    self._last = (priority, cohort, node)
                    return node
            del self._queues[priority]
        return None

    def _learn_added(self, nodes: NDArray[np.int32], keys: Sequence[Key]) -> None:
        if not self._touched_last:
            self._curves.begin_match()
        self._touched_last = False
        length = self._shared.usually_added.compare(len(nodes))
        known, rest = self._recognize(keys) if keys else [], nodes
        if known:
            rest = nodes[sum(count for _, count in known) :]
        if len(rest):
            self._curves.ask(len(rest))
            self._set_cohort(rest, self._curves.begin(0, 0, length, len(rest)))
        if known:
            self._begin(nodes[: len(nodes) - len(rest)], known, length)
        self._curves.turn()

    def _learn_hit(self, nodes: NDArray[np.int32], _keys: Sequence[Key]) -> None:
        self._curves.begin_match()
        self._touched_last = True
        histories = self._hit(self._cohorts_of(nodes), found=True)
        self._begin(nodes, histories, self._shared.usually_hit.compare(len(nodes)))
        self._curves.turn()

    def _learn_released(self, nodes: NDArray[np.int32], _keys: Sequence[Key]) -> None:
        self._touched_last = False
        withdraw = self._curves.withdraw
        histories = [(withdraw(cohort, count), count) for cohort, count in self._cohorts_of(nodes)]
        self._begin(nodes, histories, self._shared.usually_released.compare(len(nodes)))

    def _learn_evicted(self, nodes: NDArray[np.int32], keys: Sequence[Key]) -> None:
        first = 0
        for cohort, count in self._cohorts_of(nodes):
            # One by one: `update` takes longer, with as many ghosts as there usually are.
            for key in keys[first : first + count]:
                self._ghosts[key] = cohort
            self._curves.evict(cohort, count)
            first += count
        self._set_cohort(nodes, NO_COHORT)
        if len(self._ghosts) > self._ghost_limit:
            self._drop_ghosts()

    def _learn_dropped(self, nodes: NDArray[np.int32], _keys: Sequence[Key]) -> None:
        for cohort, count in self._cohorts_of(nodes):
            self._curves.withdraw(cohort, count)
        self._set_cohort(nodes, NO_COHORT)

    def _hit(
        self, cohorts: list[tuple[int, int]], *, found: bool
    ) -> list[tuple[tuple[int, int], int]]:
        """Learns from a hit; returns hit count and pause for each run of blocks."""
        reuse = self._curves.reuse
        return [(reuse(cohort, count, found=found), count) for cohort, count in cohorts]

    def _cohorts_of(self, nodes: NDArray[np.int32]) -> list[tuple[int, int]]:
        """The cohorts of neighbours, each with how many there are."""
        count = len(nodes)
        if count <= _FEW:
            view = self._cohort_view
            return _runs([view[node] for node in nodes.tolist()])
        cohorts = self._cohort[nodes]
        first = int(cohorts[0])
        if np.count_nonzero(cohorts == first) == count:
            return [(first, count)]
        (ends,) = (cohorts[1:] != cohorts[:-1]).nonzero()
        bounds = [0, *(ends + 1).tolist(), count]
        return [(int(cohorts[start]), end - start) for start, end in pairwise(bounds)]

    def _set_cohort(self, nodes: NDArray[np.int32], cohort: int) -> None:
        if len(nodes) <= _FEW:
            for node in nodes.tolist():
                self._cohort_view[node] = cohort
        else:
            self._cohort[nodes] = cohort

    def _begin(
        self, nodes: NDArray[np.int32], histories: list[tuple[tuple[int, int], int]], length: int
    ) -> None:
        """Makes new cohorts of blocks, one for neighbours with the same history.

        From the end on: a block may leave before those that it follows, so it is the older one.
        """
        if len(histories) == 1:
            hits, pause = histories[0][0]
            self._set_cohort(nodes, self._curves.begin(hits, pause, length, len(nodes)))
            return
        first = end = len(nodes)
        for at in range(len(histories) - 1, -1, -1):
            (hits, pause), count = histories[at]
            first -= count
            if at and histories[at - 1][0] == (hits, pause):
                continue
            cohort = self._curves.begin(hits, pause, length, end - first)
            self._set_cohort(nodes[first:end], cohort)
            end = first

    def _recognize(self, keys: Sequence[Key]) -> list[tuple[tuple[int, int], int]]:
        """Learns from leading blocks that were evicted; returns the history of each run.

        A chain leaves from its end, so that the ghosts of its end are dropped first.
        """
        found: list[int] = []
        for key in keys:
            cohort = self._ghosts.pop(key, None)
            if cohort is None:
                break
            found.append(cohort)
        return self._hit(_runs(found), found=False)

    def _worth(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """The places of blocks that enter now: the end of each run, the last one first.

        A block is worth as much as those that follow it.
        """
        curves = self._curves
        length = self._shared.usually_added.look_at(len(keys))
        runs: list[tuple[int, int]] = []
        known, last, ghosts = 0, NO_COHORT, self._ghosts
        for key in keys:
            cohort = ghosts.get(key)
            if cohort is None:
                break
            known += 1
            if cohort == last:
                runs[-1] = (known, runs[-1][1])
                continue
            last = cohort
            place = curves.place_of(class_of(*curves.history_if_hit(cohort), length), curves.now)
            runs.append((known, place))
        if known < len(keys):
            runs.append((len(keys), curves.place_of(class_of(0, 0, length), curves.now)))
        runs.reverse()
        return runs

    def _enqueue(self, node: int) -> None:
        priority = self._standing(node)
        if priority is not None:
            queue = self._queues.get(priority)
            if queue is None:
                queue = RankedCells(self._curves.ranking, self._is_current)
                self._queues[priority] = queue
            cohort = self._cohort_view[node]
            block_class, since = self._curves.class_and_since(cohort)
            queue.push(block_class, age_bucket(self._shared.now - since), (cohort, node, since))

    def _is_current(self, entry: tuple[int, int, float]) -> bool:
        """Whether its block was not used, nor left, since it was queued."""
        return self._cohort_view[entry[1]] == entry[0]

    def _drop_ghosts(self) -> None:
        excess = len(self._ghosts) - self._ghost_limit
        gone = [self._ghosts.pop(key) for key in list(islice(self._ghosts, excess))]
        for cohort, count in _runs(gone):
            self._curves.withdraw(cohort, count, evicted=True)

    def _drop_stale(self) -> None:
        held_count = 0
        for priority, queue in self._queues.items():
            held = {
                entry
                for entry in queue.entries()
                if self._is_current(entry) and self._standing(entry[1]) == priority
            }
            held_count += len(held)
            queue.keep_only(held)
        self._queue_limit = 2 * held_count + _STALE_MIN


def _runs(cohorts: list[int]) -> list[tuple[int, int]]:
    return [(cohort, len(list(same))) for cohort, same in groupby(cohorts)]
