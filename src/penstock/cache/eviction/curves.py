"""When blocks are used again, learned from what is seen, and what a block is worth for it.

Blocks that were last used by the same event and are of one class are a *cohort*: its age, and how
many of its blocks were not used again yet, is all that is counted. A class is how often a block was
hit and how long its last pause was. For each class and age there is the share of blocks that come
back at that age, of those that got so old. Classes that were seen little take after the others of
their hit count, these after all blocks, and all blocks after a hazard that falls with age, which
means LRU.

What a block is worth is its Gittins index: the most hits per second of occupancy that keeping it
for some time from now on can bring (`values`, by class and age).

Two shadows, of cohorts only, count what LRU and this order would have found in the same room. While
LRU leads, `lru_leads` is set.

The one rule that must not break: all that is kept is bounded, whatever the traffic.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import grown
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

AGES = 48
"""Buckets of age, three to an octave: from half a second to nine hours."""
FIRST_AGE_S = 0.5
COUNTS = 5
"""Hit counts are told apart as 0, 1, 2, 3 to 4, and more."""
COUNT_MAX = 5
PAUSES = 12
"""Of the pause before the last hit: none yet, then four buckets of age each."""
CLASSES = COUNTS * PAUSES
NO_COHORT = -1

_AGES_PER_PAUSE = 4
_COUNT_BUCKETS = (0, 1, 2, 3, 3, 4)
_COUNT_BUCKET = np.array(_COUNT_BUCKETS, dtype=np.uint8)
_PRIOR_SHARE = 0.05
"""A constant share in buckets of equal ratio is a hazard of one over the age."""
_PRIOR_RUNS = 3.0
"""How many cohorts of mean size a parent's curve counts for."""
_TURNS_PER_TABLE = 64
_DECAY = 0.98
"""Of what was counted, each time the tables are made anew."""
_SHADOW_DECAY = 1 - 1 / 1000
"""Of hits of the shadows, each turn."""
_STALE_MIN = 64
"""A shadow with fewer entries than this is not cleaned up."""
_COHORTS_MIN = 1 << 12
_COHORTS_MAX = 1 << 18
"""Older cohorts are given up: their blocks are no longer learned from."""

_EDGES = FIRST_AGE_S * 2.0 ** (np.arange(AGES) / 3)
"""The end of each bucket of age; the last one has none in truth."""
_WIDTHS = np.diff(_EDGES, prepend=0.0)
_PER_OCTAVE = 3.0


def age_bucket(age_s: float) -> int:
    """The bucket of an age."""
    if age_s < FIRST_AGE_S:
        return 0
    return min(AGES - 1, 1 + int(_PER_OCTAVE * math.log2(age_s / FIRST_AGE_S)))


_AGE_ENDS = [*_EDGES[:-1].tolist(), math.inf]


def pause_of(bucket: int) -> int:
    """The class of pauses that an age at a hit belongs to."""
    return min(PAUSES - 1, 1 + bucket // _AGES_PER_PAUSE)


def classes_of(counts: NDArray[np.uint8], pauses: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The class of each block."""
    classes: NDArray[np.uint8] = _COUNT_BUCKET[counts] * np.uint8(PAUSES) + pauses
    return classes


def class_of(count: int, pause: int) -> int:
    """The class of one block."""
    return _COUNT_BUCKETS[count] * PAUSES + pause


class Ranking:
    """An order of all cells, from the least valuable on."""

    def __init__(self, cell_at: Sequence[int], *, by_use: bool = False) -> None:
        self.cell_at = cell_at
        self.bits = [0] * len(cell_at)
        """Of each cell: the bit of its place."""
        for place, cell in enumerate(cell_at):
            self.bits[cell] = 1 << place
        self.by_use = by_use
        """Whether cells of one age count as one, in which the last use alone matters."""


_OLDER_FIRST = np.tile(np.arange(AGES, 0, -1), CLASSES)
_BY_USE = Ranking(np.argsort(_OLDER_FIRST, kind="stable").tolist(), by_use=True)


class RankedCells:
    """Entries by class and age, which grow older by themselves; the least valuable comes first.

    An entry is (order, subject, since): the order among those of one cell, whose it is, and the
    time from which its age counts. Later entries have a higher order and a later time.
    """

    def __init__(self, ranking: Ranking, now: float) -> None:
        self._ranking = ranking
        self._now = now
        self._heaps: dict[int, list[tuple[int, int, float]]] = {}
        """By cell; none of them is empty."""
        self._due: list[tuple[float, int]] = []
        """When the first entry of a cell is too old for it; a heap."""
        self._mask = 0
        """One bit for each cell that is not empty, the least valuable cell lowest."""
        self.count = 0

    def push(self, block_class: int, order: int, subject: int, since: float) -> None:
        self._push(block_class, age_bucket(self._now - since), (order, subject, since))

    def _push(self, block_class: int, bucket: int, entry: tuple[int, int, float]) -> None:
        cell = block_class * AGES + bucket
        heap = self._heaps.get(cell)
        if heap is None:
            heap = self._heaps[cell] = []
            self._mask |= self._ranking.bits[cell]
        heappush(heap, entry)
        self.count += 1
        if heap[0] is entry:
            heappush(self._due, (entry[2] + _AGE_ENDS[bucket], cell))

    def first(self) -> tuple[int, tuple[int, int, float]] | None:
        """The cell that comes first, and its first entry; nothing is taken."""
        mask = self._mask
        if not mask:
            return None
        ranking = self._ranking
        cell = ranking.cell_at[(mask & -mask).bit_length() - 1]
        if not ranking.by_use:
            return cell, self._heaps[cell][0]
        # By last use alone: of one age, the oldest of all classes.
        heaps = self._heaps
        cells = [other for other in range(cell % AGES, CLASSES * AGES, AGES) if other in heaps]
        cell = min(cells, key=lambda other: heaps[other][0])
        return cell, heaps[cell][0]

    def take(self, cell: int) -> None:
        """Removes the first entry of a cell."""
        heap = self._heaps[cell]
        heappop(heap)
        self.count -= 1
        if not heap:
            del self._heaps[cell]
            self._mask ^= self._ranking.bits[cell]

    def entries(self) -> list[tuple[int, int, float]]:
        """All of them, in no order."""
        return [entry for heap in self._heaps.values() for entry in heap]

    def keep_only(self, kept: set[tuple[int, int, float]]) -> None:
        """Removes all other entries, and second ones of the same."""
        before, self._heaps = self._heaps, {}
        for cell, heap in before.items():
            left = kept.intersection(heap)
            kept -= left
            if left:
                self._heaps[cell] = sorted(left)
        self.count = sum(map(len, self._heaps.values()))
        self._due = [
            (heap[0][2] + _AGE_ENDS[cell % AGES], cell) for cell, heap in self._heaps.items()
        ]
        heapify(self._due)
        self._mask = sum(self._ranking.bits[cell] for cell in self._heaps)

    def settle(self, ranking: Ranking, now: float) -> None:
        """Takes the latest values over, and moves entries that grew older."""
        if ranking is not self._ranking:
            self._ranking = ranking
            self._mask = sum(ranking.bits[cell] for cell in self._heaps)
        self._now = now
        due = self._due
        while due and due[0][0] <= now:
            _, cell = heappop(due)
            heap = self._heaps.get(cell, [])
            block_class, bucket = divmod(cell, AGES)
            end = _AGE_ENDS[bucket]
            while heap and heap[0][2] + end <= now:
                entry = heap[0]
                self.take(cell)
                # A sum and a difference of times need not agree in their last digit.
                older = max(bucket + 1, age_bucket(now - entry[2]))
                self._push(block_class, older, entry)
            if heap:
                heappush(due, (heap[0][2] + end, cell))


class ReuseCurves:
    """What was learned of one tier."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self.now = 0.0
        self.values = np.zeros((CLASSES, AGES))
        self.ranking = _BY_USE
        """What blocks should leave by now: `_by_value`, or by last use while LRU leads."""
        self._by_value = _BY_USE
        self._reused = np.zeros((CLASSES, AGES))
        self._passed = np.zeros((CLASSES, AGES))
        self._turns = 0
        self._base = 0
        """The number of the first cohort that is known."""
        self._next = 0
        self._since = np.zeros(_COHORTS_MIN)
        self._class = np.zeros(_COHORTS_MIN, dtype=np.uint8)
        self._left = np.zeros(_COHORTS_MIN, dtype=np.int64)
        """Blocks that were not used again."""
        self._held = np.zeros(_COHORTS_MIN, dtype=np.int64)
        """Blocks that the shadow of this order has."""
        self._look_at_arrays()
        self._watched = np.zeros(AGES, dtype=np.int64)
        """For each age: the first cohort that was not counted as having passed it."""
        self._lru_first = 0
        """The oldest cohort that the shadow of LRU has whole."""
        self._lru_count = 0
        self._lru_hits = 0.0
        self._own_hits = 0.0
        self._own_count = 0
        self._blocks_begun = 1.0
        self._cohorts_begun = 1.0
        self._make_tables()
        self._shadow = RankedCells(self._by_value, 0.0)
        self._shadow_limit = _STALE_MIN

    # ---------------------------------------------------------------- what is seen

    def begin(self, block_class: int, count: int) -> int:
        """Blocks of a class were used now; returns the number of their cohort."""
        number = self._next
        if number - self._base == len(self._since):
            self._make_space()
        at = number - self._base
        self._next += 1
        self._since[at] = self.now
        self._class_view[at] = block_class
        self._left_view[at] = self._held_view[at] = count
        self._blocks_begun += count
        self._cohorts_begun += 1
        self._lru_count += count
        self._own_count += count
        self._shadow.settle(self._by_value, self.now)
        self._shadow.push(block_class, number, number, self.now)
        self._keep_shadows_small()
        if self._shadow.count > self._shadow_limit:
            self._drop_stale()
        return number

    def since_of(self, number: int) -> float:
        """When a cohort was used; of one that was given up, the earliest time that is known."""
        return self._since_view[max(0, number - self._base)]

    def reuse(self, number: int, count: int) -> int:
        """Blocks of a cohort are used again; returns the age's bucket, to say their pause."""
        at = number - self._base
        if at < 0:
            return AGES - 1
        bucket = age_bucket(self.now - self._since_view[at])
        block_class = self._class_view[at]
        self._reused[block_class, bucket] += count
        # What passed an age and was not counted there yet will be missing when it is.
        self._passed[block_class, :bucket] += count * (self._watched[:bucket] <= number)
        self._lru_hits += self._held_by_lru(number, at, count)
        self._own_hits += min(count, self._held_view[at])
        self._take_out(number, at, count)
        return bucket

    def withdraw(self, number: int, count: int) -> None:
        """Blocks of a cohort are no longer watched, or begin anew, without having been hit."""
        at = number - self._base
        if at >= 0:
            self._take_out(number, at, count)

    def turn(self) -> None:
        """One more request came by; the tables are made anew after some of them."""
        self._turns += 1
        self._lru_hits *= _SHADOW_DECAY
        self._own_hits *= _SHADOW_DECAY
        if self._turns % _TURNS_PER_TABLE == 0:
            self._watch()
            self._make_tables()

    # ---------------------------------------------------------------- shadows

    def _held_by_lru(self, number: int, at: int, count: int) -> int:
        if number >= self._lru_first:
            return count
        if number == self._lru_first - 1:
            return min(count, self._slot_count - self._lru_count, self._left_view[at])
        return 0

    def _take_out(self, number: int, at: int, count: int) -> None:
        count = min(count, self._left_view[at])
        self._left_view[at] -= count
        if number >= self._lru_first:
            self._lru_count -= count
        gone = min(count, self._held_view[at])
        self._held_view[at] -= gone
        self._own_count -= gone

    def _keep_shadows_small(self) -> None:
        while self._lru_count > self._slot_count:
            self._lru_count -= self._left_view[self._lru_first - self._base]
            self._lru_first += 1
        while self._own_count > self._slot_count:
            found = self._shadow.first()
            if found is None:
                raise InvariantViolation(f"a shadow of {self._own_count} blocks has no cohort")
            cell, (_, number, _) = found
            at = number - self._base
            held = self._held_view[at] if at >= 0 else 0
            gone = min(held, self._own_count - self._slot_count)
            self._own_count -= gone
            if gone == held:
                self._shadow.take(cell)
            if gone:
                self._held_view[at] -= gone

    def _drop_stale(self) -> None:
        """Removes cohorts of which the shadow has nothing any more."""
        base, held = self._base, self._held
        kept = {
            entry
            for entry in self._shadow.entries()
            if entry[1] >= base and held[entry[1] - base] > 0
        }
        # Each has a block at least, so there are no more than slots.
        self._shadow_limit = 2 * len(kept) + _STALE_MIN
        self._shadow.keep_only(kept)

    # ---------------------------------------------------------------- tables

    def _watch(self) -> None:
        """Counts the cohorts that passed an age since the last time."""
        end = self._next - self._base
        since, left, classes = self._since[:end], self._left, self._class
        ends = np.searchsorted(since, self.now - _EDGES, side="right") + self._base
        for bucket in range(AGES):
            first, last = int(self._watched[bucket]), int(ends[bucket])
            if last > first:
                part = slice(first - self._base, last - self._base)
                self._passed[:, bucket] += np.bincount(
                    classes[part], weights=left[part], minlength=CLASSES
                )
                self._watched[bucket] = last

    def _make_tables(self) -> None:
        reused, passed = self._reused, self._passed
        mean = self._blocks_begun / self._cohorts_begun
        weight = _PRIOR_RUNS * mean
        by_count = (COUNTS, PAUSES, AGES)
        parent_reused = reused.reshape(by_count).sum(axis=1)
        parent_passed = passed.reshape(by_count).sum(axis=1)
        share = _shrunk(
            parent_reused.sum(axis=0), parent_passed.sum(axis=0), _PRIOR_SHARE, 3 * weight
        )
        share = _shrunk(parent_reused, parent_passed, share, 3 * weight)
        share = _shrunk(reused, passed, np.repeat(share, PAUSES, axis=0), weight)
        self.values = _gittins(share)
        reused *= _DECAY
        passed *= _DECAY
        self._blocks_begun *= _DECAY
        self._cohorts_begun *= _DECAY
        self._by_value = Ranking(np.lexsort((_OLDER_FIRST, self.values.ravel())).tolist())
        self.ranking = _BY_USE if self.lru_leads else self._by_value

    @property
    def lru_leads(self) -> bool:
        """Whether LRU would have found as much of late."""
        return self._lru_hits >= self._own_hits

    def _look_at_arrays(self) -> None:
        # Reading one number through a memoryview takes a third of the time an array takes.
        self._since_view, self._class_view = self._since.data, self._class.data
        self._left_view, self._held_view = self._left.data, self._held.data

    def _make_space(self) -> None:
        size = len(self._since)
        if size < _COHORTS_MAX:
            self._since = grown(self._since, 2 * size)
            self._class = grown(self._class, 2 * size)
            self._left = grown(self._left, 2 * size)
            self._held = grown(self._held, 2 * size)
            self._look_at_arrays()
            return
        gone = size // 2
        for number in range(self._base, self._base + gone):
            at = number - self._base
            self._take_out(number, at, int(self._left[at]))
        for array in (self._since, self._class, self._left, self._held):
            array[:-gone] = array[gone:]
        self._base += gone
        self._lru_first = max(self._lru_first, self._base)
        np.maximum(self._watched, self._base, out=self._watched)


def _shrunk(
    reused: NDArray[np.float64],
    passed: NDArray[np.float64],
    parent: NDArray[np.float64] | float,
    weight: float,
) -> NDArray[np.float64]:
    """The share that was reused; with little to go by, that of the parent."""
    share: NDArray[np.float64] = (reused + weight * parent) / (reused + passed + weight)
    return share


def _gittins(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best hits per second that keeping from each age on, until any later one, brings."""
    reach = np.cumprod(1 - share, axis=1)
    reach = np.concatenate((np.ones((len(share), 1)), reach[:, :-1]), axis=1)
    hits = np.cumsum(reach * share, axis=1)
    seconds = np.cumsum(reach * _WIDTHS * (1 - share / 2), axis=1)
    best = np.empty_like(share)
    for age in range(AGES):
        hits_before = hits[:, age - 1 : age] if age else 0.0
        seconds_before = seconds[:, age - 1 : age] if age else 0.0
        ratio = (hits[:, age:] - hits_before) / (seconds[:, age:] - seconds_before)
        best[:, age] = ratio.max(axis=1)
    return best
