"""When blocks are used again, learned from what is seen, and what a block is worth for it.

Blocks that were last used by the same event and are of one class are a *cohort*: its age, and how
many of its blocks were not used again yet, is all that is counted. A class is how often a block was
hit, how long its last pause was, and how many blocks were used with it, against what is usual. For
each class and age there is the share of blocks that come back at that age, of those that got so
old. Classes that were seen little take after those that differ in length alone, these after the
others of their hit count, these after all blocks, and all blocks after a hazard that falls with
age, which means LRU.

What a block is worth is its Gittins index: the most hits per second of occupancy that keeping it
for some time from now on can bring (`values`, by class and age). It is computed anew every so many
turns, in slices, so that no turn takes long.

Two shadows, of cohorts only, count what LRU and this order would have found in the same room. While
this order does not lead clearly, `lru_leads` is set. Besides, it is known how much more the tier
itself has found than LRU, and how many blocks LRU would still have that the tier gave up. While
these could cost more than is tolerated, `exposed` is set. In both cases blocks leave by last use.

The one rule that must not break: all that is kept is bounded, whatever the traffic.
"""

from __future__ import annotations

import math
from functools import cache
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import grown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

AGES = 48
"""Buckets of age, three to an octave: from half a second to nine hours."""
FIRST_AGE_S = 0.5
COUNTS = 5
"""Hit counts are told apart as 0, 1, 2, 3 to 4, and more."""
COUNT_MAX = 5
PAUSES = 11
"""The pause before the last hit, from 1 on: four buckets of age each; without a hit it is 0."""
LENGTHS = 4
"""Blocks that were used together: less than half as many as usual, less, more, more than twice."""
CLASSES = (1 + (COUNTS - 1) * PAUSES) * LENGTHS
NO_COHORT = -1

_AGES_PER_PAUSE = 4
_BEFORE_PAUSES = tuple(bucket * PAUSES for bucket in (0, 0, 1, 2, 2, 3))
"""By hit count: the number of kinds, which are hit count and pause, that come before its own."""
_COUNT_STARTS = (0, *range(1, (COUNTS - 1) * PAUSES + 1, PAUSES))
"""The first kind of each bucket of hit counts."""
_KINDS_PER_COUNT = (1, *(PAUSES,) * (COUNTS - 1))
_PRIOR_SHARE = 0.05
"""A constant share in buckets of equal ratio is a hazard of one over the age."""
_PRIOR_RUNS = 5.0
"""How many cohorts of mean size a parent's curve counts for."""
_TURNS_PER_TABLE = 64
_AGES_PER_SLICE = 4
_SLICES = AGES // _AGES_PER_SLICE
_DECAY = 0.98
"""Of what was counted, each time the tables are made anew."""
_CLEAR_LEAD = 1.03
"""How much more than LRU's this order's shadow has to find, or blocks leave by last use."""
_SHADOW_DECAY = 1 - 1 / 1000
"""Of hits of the shadows, each turn."""
_TOLERANCE = 0.004
"""Of all blocks that are asked for: how many fewer than LRU may be found. Half a point is the most
that a user is promised; what is lost before it is noticed needs the rest."""
_LEDGER_DECAY = 1 - 1 / 10_000
"""Of what was asked for and found, each turn: what was gained long ago is no credit."""
_STALE_MIN = 64
"""A shadow with fewer entries than this is not cleaned up."""
_COHORTS_MIN = 1 << 8
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


def _pause_of(bucket: int) -> int:
    """The class of pauses that an age at a hit belongs to."""
    return min(PAUSES - 1, 1 + bucket // _AGES_PER_PAUSE)


def class_of(count: int, pause: int, length: int) -> int:
    """The class of blocks."""
    return (_BEFORE_PAUSES[count] + pause) * LENGTHS + length


_DIGITS = bytes.maketrans(b"\0\1", b"01")


class Ranking:
    """An order of all cells, from the least valuable on."""

    def __init__(self, cell_at: NDArray[np.intp], *, by_use: bool = False) -> None:
        places = np.empty_like(cell_at)
        places[cell_at] = np.arange(len(cell_at))
        # Few places are looked at before there is another ranking: lists would cost more.
        self.cell_at = cell_at.data
        self.place_of = places.data
        self.by_use = by_use
        """Whether cells of one age count as one, in which the last use alone matters."""

    def mask_of(self, cells: Iterable[int]) -> int:
        """A bit for the place of each of these cells."""
        places = bytearray(len(self.cell_at))
        for cell in cells:
            places[-1 - self.place_of[cell]] = 1
        return int(places.translate(_DIGITS), 2)


_OLDER_FIRST = np.arange(CLASSES * AGES).reshape(CLASSES, AGES).T[::-1].ravel()
_BY_USE = Ranking(_OLDER_FIRST, by_use=True)
_ONE_AGE = (1 << CLASSES) - 1
"""The places of one age in `_BY_USE`, which lie side by side."""


class RankedCells:
    """Entries by class and age, which grow older by themselves; the least valuable comes first.

    An entry is (order, subject, since): the order among those of one cell, whose it is, and the
    time from which its age counts. Later entries have a higher order and a later time.
    """

    def __init__(self, ranking: Ranking, holds: Callable[[tuple[int, int, float]], bool]) -> None:
        self._ranking = ranking
        self._holds = holds
        """Whether an entry still does; one that does not never will again."""
        self._heaps: dict[int, list[tuple[int, int, float]]] = {}
        """By cell; none of them is empty."""
        self._due: list[tuple[float, int]] = []
        """When the first entry of a cell is too old for it; a heap."""
        self._mask = 0
        """One bit for each cell that is not empty, the least valuable cell lowest."""
        self.count = 0

    def push(self, block_class: int, bucket: int, entry: tuple[int, int, float]) -> None:
        """Adds an entry of a class and age, whenever the others were settled last."""
        self.count += 1
        cell = block_class * AGES + bucket
        heap = self._heaps.get(cell)
        if heap is None:
            self._heaps[cell] = [entry]
            self._mask |= 1 << self._ranking.place_of[cell]
        else:
            heappush(heap, entry)
            if heap[0] is not entry:
                return
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
        first = ranking.place_of[cell % AGES]
        same_age = mask >> first & _ONE_AGE
        while same_age:
            bit = same_age & -same_age
            same_age ^= bit
            other = ranking.cell_at[first + bit.bit_length() - 1]
            if heaps[other][0] < heaps[cell][0]:
                cell = other
        return cell, heaps[cell][0]

    def take(self, cell: int) -> None:
        """Removes the first entry of a cell."""
        heap = self._heaps[cell]
        heappop(heap)
        self.count -= 1
        if not heap:
            del self._heaps[cell]
            self._mask ^= 1 << self._ranking.place_of[cell]

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
        self._mask = self._ranking.mask_of(self._heaps)

    def settle(self, ranking: Ranking, now: float) -> None:
        """Takes the latest values over, and moves entries that grew older."""
        if ranking is not self._ranking:
            self._ranking = ranking
            self._mask = ranking.mask_of(self._heaps)
        due = self._due
        while due and due[0][0] <= now:
            cell = heappop(due)[1]
            heap = self._heaps.get(cell)
            if heap is not None:
                self._move_older(cell, heap, now)

    def _move_older(self, cell: int, heap: list[tuple[int, int, float]], now: float) -> None:
        """Moves those entries of a cell that are too old for it; drops what no longer holds."""
        block_class, bucket = divmod(cell, AGES)
        end, next_end = _AGE_ENDS[bucket], _AGE_ENDS[bucket + 1]
        while heap:
            entry = heap[0]
            since = entry[2]
            if since + end > now:
                heappush(self._due, (since + end, cell))
                return
            heappop(heap)
            self.count -= 1
            if self._holds(entry):
                older = bucket + 1
                if now - since >= next_end:
                    older = max(older, age_bucket(now - since))
                self.push(block_class, older, entry)
        del self._heaps[cell]
        self._mask ^= 1 << self._ranking.place_of[cell]


class ReuseCurves:
    """What was learned of one tier."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self.now = 0.0
        self._index, self._by_value = _known_at_first()
        self.values = self._index.values
        self.ranking = _BY_USE
        """What blocks should leave by now: `_by_value`, or by last use while LRU leads."""
        self.may_refuse = False
        """Whether blocks that enter the tier may be worth too little to do so."""
        self._reused = np.zeros((CLASSES, AGES))
        self._passed = np.zeros((CLASSES, AGES))
        # Reading one number through a memoryview takes a third of the time an array takes.
        self._reused_view, self._passed_view = self._reused.ravel().data, self._passed.ravel().data
        self._turns = 0
        self._base = 0
        """The number of the first cohort that is known."""
        self._next = 0
        self._since = np.zeros(_COHORTS_MIN)
        self._class = np.zeros(_COHORTS_MIN, dtype=np.uint8)
        self._hits = np.zeros(_COHORTS_MIN, dtype=np.uint8)
        self._left = np.zeros(_COHORTS_MIN, dtype=np.int64)
        """Blocks that were not used again."""
        self._held = np.zeros(_COHORTS_MIN, dtype=np.int64)
        """Blocks that the shadow of this order has."""
        self._missing = np.zeros(_COHORTS_MIN, dtype=np.int64)
        """Blocks that the tier evicted and the shadow of LRU still has."""
        self._look_at_arrays()
        self._watched = np.zeros(AGES, dtype=np.int64)
        """For each age: the first cohort that was not counted as having passed it; the older the
        age, the older the cohort."""
        self._watched_view = self._watched.data
        self._lru_first = 0
        """The oldest cohort that the shadow of LRU has whole."""
        self._lru_count = 0
        self._lru_hits = 0.0
        self._own_hits = 0.0
        self._own_count = 0
        # A block is of no use without those before it.
        self._lru_matches = self._own_matches = True
        """Whether the shadow has all of the current prompt so far."""
        self._asked = 0.0
        """Blocks of late, whether they were found or not."""
        self._ahead = 0.0
        """How many more of them were found than LRU would have found."""
        self._missing_count = 0
        self._missing_sum = self._missing_squares = 0.0
        """Of the runs that were evicted before LRU would have done it: blocks, and their squares.
        """
        self._given_up_hit = self._given_up_idle = 0.0
        """Blocks that this order gives up before LRU does: those that LRU then found, or not."""
        self._blocks_begun = _DECAY
        self._cohorts_begun = _DECAY
        self._shadow = RankedCells(self._by_value, self._is_held)
        self._shadow_limit = _STALE_MIN

    # ---------------------------------------------------------------- what is seen

    def begin(self, hits: int, pause: int, length: int, count: int) -> int:
        """Blocks of one class were used now; returns the number of their cohort."""
        block_class = class_of(hits, pause, length)
        number = self._next
        if number - self._base == len(self._since):
            self._make_space()
        at = number - self._base
        self._next += 1
        self._since[at] = self.now
        self._class_view[at] = block_class
        self._hits_view[at] = hits
        self._left_view[at] = self._held_view[at] = count
        self._missing_view[at] = 0
        self._blocks_begun += count
        self._cohorts_begun += 1
        self._lru_count += count
        self._own_count += count
        # Others make room first, as in the tier, unless it refuses blocks.
        full = self._lru_count > self._slot_count or self._own_count > self._slot_count
        if full and not self.may_refuse:
            self._keep_shadows_small()
        self._shadow.push(block_class, 0, (number, number, self.now))
        if self._lru_count > self._slot_count or self._own_count > self._slot_count:
            self._keep_shadows_small()
        if self._shadow.count > self._shadow_limit:
            self._drop_stale()
        return number

    def history_if_hit(self, number: int) -> tuple[int, int]:
        """The hit count and pause of blocks of a cohort, if they were used again now."""
        at = number - self._base
        if at < 0:
            return 1, _pause_of(AGES - 1)
        bucket = age_bucket(self.now - self._since_view[at])
        return min(self._hits_view[at] + 1, COUNT_MAX), _pause_of(bucket)

    def place_of(self, block_class: int, since: float) -> int:
        """Where blocks of a class that were last used then stand in the order; 0 leaves first."""
        return self.ranking.place_of[block_class * AGES + age_bucket(self.now - since)]

    def class_and_since(self, number: int) -> tuple[int, float]:
        """The class of a cohort, and when it was used.

        Of one that was given up, that of blocks never hit, and the earliest time that is known.
        """
        at = number - self._base
        if at < 0:
            return 0, self._since_view[0]
        return self._class_view[at], self._since_view[at]

    def _history_at(self, at: int) -> tuple[int, int]:
        """The hit count and last pause of a cohort."""
        hits = self._hits_view[at]
        if not hits:
            return 0, 0
        return hits, self._class_view[at] // LENGTHS - _BEFORE_PAUSES[hits]

    def begin_match(self) -> None:
        """What is used again next is the start of a prompt."""
        self._lru_matches = self._own_matches = True

    def ask(self, count: int) -> None:
        """New blocks were asked for, which nobody has."""
        self._asked += count

    def reuse(self, number: int, count: int, *, found: bool) -> tuple[int, int]:
        """Blocks of a cohort are used again; returns their history with this hit.

        They were found in the tier, or they had been evicted.
        """
        at = number - self._base
        self._asked += count
        if at < 0:
            self._ahead += count if found else 0
            self._lru_matches = self._own_matches = False
            return 1, _pause_of(AGES - 1)
        bucket = age_bucket(self.now - self._since_view[at])
        block_class = self._class_view[at]
        cell = block_class * AGES + bucket
        self._reused_view[cell] += count
        # What passed an age and was not counted there yet will be missing when it is.
        for age in range(bucket - 1, -1, -1):
            if self._watched_view[age] > number:
                break
            cell -= 1
            self._passed_view[cell] += count
        lru_held = self._held_by_lru(number, at, count) if self._lru_matches else 0
        own_held = min(count, self._held_view[at]) if self._own_matches else 0
        self._lru_matches = lru_held == count
        self._own_matches = own_held == count
        self._lru_hits += lru_held
        self._own_hits += own_held
        self._ahead += (count if found else 0) - lru_held
        self._given_up_hit += max(0, lru_held - own_held)
        self._take_out(number, at, count)
        if not found:
            self._forgive(at, count)
        return min(self._hits_view[at] + 1, COUNT_MAX), _pause_of(bucket)

    def evict(self, number: int, count: int) -> None:
        """Blocks of a cohort left the tier to make room."""
        at = number - self._base
        if at >= 0 and number >= self._lru_first:
            self._missing_view[at] += count
            self._missing_count += count
            self._missing_sum += count
            self._missing_squares += count * count

    def withdraw(self, number: int, count: int, *, evicted: bool = False) -> tuple[int, int]:
        """Blocks of a cohort are no longer watched, or begin anew, without having been hit.

        Returns their history.
        """
        at = number - self._base
        if at < 0:
            return 0, 0
        self._take_out(number, at, count)
        if evicted:
            self._forgive(at, count)
        return self._history_at(at)

    def turn(self) -> None:
        """One more request came by; the tables are made anew after some of them."""
        self._turns += 1
        self._lru_hits *= _SHADOW_DECAY
        self._missing_squares *= _SHADOW_DECAY
        self._missing_sum *= _SHADOW_DECAY
        self._own_hits *= _SHADOW_DECAY
        self._given_up_hit *= _SHADOW_DECAY
        self._given_up_idle *= _SHADOW_DECAY
        self._asked *= _LEDGER_DECAY
        self._ahead *= _LEDGER_DECAY
        if not self.ranking.by_use and self.exposed:
            self.ranking = _BY_USE
        step = self._turns % _TURNS_PER_TABLE
        if self._turns < _TURNS_PER_TABLE:
            return  # Nothing was counted yet.
        if step == 0:
            self._watch()
        elif step == 1:
            self._begin_tables()
        elif step <= 1 + _SLICES:
            self._index.advance()
        elif step == 2 + _SLICES:
            self._end_tables()

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

    def _forgive(self, at: int, count: int) -> None:
        """Blocks that were evicted no longer count as missing."""
        count = min(count, self._missing_view[at])
        self._missing_view[at] -= count
        self._missing_count -= count

    def _keep_shadows_small(self) -> None:
        while self._lru_count > self._slot_count:
            at = self._lru_first - self._base
            self._lru_count -= self._left_view[at]
            self._given_up_idle += self._left_view[at] - self._held_view[at]
            self._forgive(at, self._missing_view[at])
            self._lru_first += 1
        if self._own_count > self._slot_count:
            self._shadow.settle(self._by_value, self.now)
        while self._own_count > self._slot_count:
            found = self._shadow.first()
            if found is None:
                return  # A cohort larger than the tier, which comes next.
            cell, (_, number, _) = found
            at = number - self._base
            held = self._held_view[at] if at >= 0 else 0
            gone = min(held, self._own_count - self._slot_count)
            self._own_count -= gone
            if gone == held:
                self._shadow.take(cell)
            if gone:
                self._held_view[at] -= gone

    def _is_held(self, entry: tuple[int, int, float]) -> bool:
        """Whether the shadow of this order has blocks of the entry's cohort."""
        at = entry[1] - self._base
        return at >= 0 and self._held_view[at] > 0

    def _drop_stale(self) -> None:
        """Removes cohorts of which the shadow has nothing any more."""
        kept = {entry for entry in self._shadow.entries() if self._is_held(entry)}
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

    def _begin_tables(self) -> None:
        reused, passed = self._reused, self._passed
        usual = self._blocks_begun / self._cohorts_begun
        self._index = _GittinsIndex(_shares(reused, passed, _PRIOR_RUNS * usual))
        reused *= _DECAY
        passed *= _DECAY
        self._blocks_begun *= _DECAY
        self._cohorts_begun *= _DECAY

    def _end_tables(self) -> None:
        self.values = self._index.values
        self._by_value = self._index.ranking()
        self.ranking = _BY_USE if self.lru_leads or self.exposed else self._by_value

    @property
    def lru_leads(self) -> bool:
        """Whether LRU would have found about as much of late, or more."""
        return self._lru_hits * _CLEAR_LEAD >= self._own_hits

    @property
    def exposed(self) -> bool:
        """Whether what the tier lacks may cost more than is allowed, against LRU."""
        usual = self._blocks_begun / self._cohorts_begun
        hit = self._given_up_hit + _PRIOR_RUNS * usual
        expected = self._missing_count * hit / (hit + self._given_up_idle)
        # Blocks come back as they went, in runs: a few long ones make a large difference.
        run = max(usual, self._missing_squares / max(1.0, self._missing_sum))
        doubt = max(run, math.sqrt(expected * run))
        return expected + doubt > _TOLERANCE * self._asked + self._ahead

    def _look_at_arrays(self) -> None:
        # Reading one number through a memoryview takes a third of the time an array takes.
        self._since_view, self._class_view = self._since.data, self._class.data
        self._hits_view = self._hits.data
        self._left_view, self._held_view = self._left.data, self._held.data
        self._missing_view = self._missing.data

    def _make_space(self) -> None:
        size = len(self._since)
        if size < _COHORTS_MAX:
            self._since = grown(self._since, 2 * size)
            self._class = grown(self._class, 2 * size)
            self._hits = grown(self._hits, 2 * size)
            self._left = grown(self._left, 2 * size)
            self._held = grown(self._held, 2 * size)
            self._missing = grown(self._missing, 2 * size)
            self._look_at_arrays()
            return
        gone = size // 2
        for number in range(self._base, self._base + gone):
            at = number - self._base
            self._take_out(number, at, int(self._left[at]))
            self._forgive(at, int(self._missing[at]))
        for array in (self._since, self._class, self._hits, self._left, self._held, self._missing):
            array[:-gone] = array[gone:]
        self._base += gone
        self._lru_first = max(self._lru_first, self._base)
        np.maximum(self._watched, self._base, out=self._watched)


def _shares(
    reused: NDArray[np.float64], passed: NDArray[np.float64], weight: float
) -> NDArray[np.float64]:
    """By class and age: the share of blocks that come back at that age, of those that got there."""
    kind_reused = reused.reshape(-1, LENGTHS, AGES).sum(axis=1)
    kind_passed = passed.reshape(-1, LENGTHS, AGES).sum(axis=1)
    count_reused = np.add.reduceat(kind_reused, _COUNT_STARTS, axis=0)
    count_passed = np.add.reduceat(kind_passed, _COUNT_STARTS, axis=0)
    share = _shrunk(count_reused.sum(axis=0), count_passed.sum(axis=0), _PRIOR_SHARE, 3 * weight)
    share = _shrunk(count_reused, count_passed, share, 3 * weight)
    share = np.repeat(share, _KINDS_PER_COUNT, axis=0)
    share = _shrunk(kind_reused, kind_passed, share, weight)
    return _shrunk(reused, passed, np.repeat(share, LENGTHS, axis=0), weight)


def _shrunk(
    reused: NDArray[np.float64],
    passed: NDArray[np.float64],
    parent: NDArray[np.float64] | float,
    weight: float,
) -> NDArray[np.float64]:
    """The share that was reused; with little to go by, that of the parent."""
    share: NDArray[np.float64] = (reused + weight * parent) / (reused + passed + weight)
    return share


class _GittinsIndex:
    """The best hits per second that keeping from each age on, until any later one, brings.

    Computed for some ages at a time.
    """

    def __init__(self, share: NDArray[np.float64]) -> None:
        # By age, then class: what is computed of one age lies side by side.
        share = np.ascontiguousarray(share.T)
        reach = np.ones_like(share)
        np.cumprod(1 - share[:-1], axis=0, out=reach[1:])
        self._hits = np.cumsum(reach * share, axis=0)
        self._seconds = np.cumsum(reach * _WIDTHS[:, np.newaxis] * (1 - share / 2), axis=0)
        self._done = 0
        self.values_by_age = np.empty_like(share)

    @property
    def values(self) -> NDArray[np.float64]:
        """By class, then age."""
        return self.values_by_age.T

    def advance(self) -> None:
        """The next slice of ages."""
        hits, seconds = self._hits, self._seconds
        for age in range(self._done, self._done + _AGES_PER_SLICE):
            later_hits, later_seconds = hits[age:], seconds[age:]
            if age:
                later_hits = later_hits - hits[age - 1]
                later_seconds = later_seconds - seconds[age - 1]
            (later_hits / later_seconds).max(axis=0, out=self.values_by_age[age])
        self._done += _AGES_PER_SLICE

    def ranking(self) -> Ranking:
        """The order by value, once all ages are computed; of equal ones the older comes first."""
        order = np.argsort(self.values_by_age[::-1].ravel(), kind="stable")
        return Ranking(_OLDER_FIRST[order])


@cache
def _known_at_first() -> tuple[_GittinsIndex, Ranking]:
    """Of blocks of which nothing was seen yet: the same for all."""
    nothing = np.zeros((CLASSES, AGES))
    index = _GittinsIndex(_shares(nothing, nothing, _PRIOR_RUNS))
    for _ in range(_SLICES):
        index.advance()
    return index, index.ranking()
