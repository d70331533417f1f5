"""Blocks leave by last use, by how often they were used, or by something between: what works.

Each use of a block counts, and counts for half as much after some time. A block is worth the
logarithm of that sum, which needs no updates: both a use and all blocks that compete with it fade
alike. How fast uses fade is the whole difference between policies. At once is LRU; not at all is
LFU; in between lies what suits conversations (LRFU: Lee et al., 2001). Time is counted in blocks
that were used, so that a rate means the same in a busy hour and a quiet one.

For each rate there is a shadow: which blocks a tier of this size would have now, and how many it
found of late. The tier follows the rate whose shadow leads, and LRU if none leads clearly. A lead
is over when half of it is lost, long before what the shadow found once is forgotten.

Blocks that were used together and have the same past are a *run*. All that is kept is kept by run,
also of blocks that were evicted (*ghosts*), of which a bounded number is remembered by key.

The one rule that must not break: without a clear lead, blocks leave exactly as with LRU.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import groupby, islice
from math import log2
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np

from penstock.cache.eviction.queues import WorthQueue, Worths
from penstock.cache.nodes import grown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.eviction.base import Judge, Standing
    from penstock.vocabulary.keys import Key

_LRU = 0
_LRU_RATE = 64.0
"""Halvings for each block that is used: earlier uses are then lost in rounding."""
_RATES = (0.5, 0.1, 0.03)
"""Halvings while as many blocks are used as the tier has slots."""
_LFU_RATE = -1e-12
"""Uses never fade, and of blocks with equally many the newest leaves first: of prompts that come
round and round, some stay. Too little to matter before 1e9 blocks."""
_LEADS = (1.0, 1.03, 1.03, 1.03, 1.3)
"""How much more than LRU's the shadow of each rate has to find: what never fades, errs longest."""
_LEAD_LOST = 0.5
"""What a shadow may have lost to LRU's since it led most, as a share of its lead."""
_DECAY = 1 - 1 / 1500
"""Of what shadows found and lost, each turn."""
_TURNS_PER_CHOICE = 4
_ALIKE = 0.5
"""Neighbours whose values differ by less than this are taken for one run: else each turn of a
conversation would add one."""
_GHOSTS_MIN, _GHOSTS_MAX = 1 << 16, 1 << 20
"""Evicted blocks that are remembered: as many as there are slots, within these bounds."""
_STALE_MIN = 64
"""A queue with fewer entries than this is not cleaned up."""
_NO_RUN = -1


class _Run:
    """Blocks that were used together and have the same past."""

    __slots__ = ("held", "left", "stamp", "values")

    def __init__(self, stamp: int, values: list[float], count: int) -> None:
        self.stamp = stamp
        self.values = values
        """What its blocks are worth, at each rate."""
        self.left = count
        """Blocks that were not used again, whether they are in the tier or ghosts."""
        self.held = [count] * len(values)
        """How many of them each shadow has: the leading ones."""


class _Shadow:
    """How many blocks of each run a tier would have if it followed one rate."""

    def __init__(self, at: int, slot_count: int) -> None:
        self._at = at
        self._slot_count = slot_count
        self._queue: list[tuple[float, int]] = []
        """A heap of (value, minus the number of a run): of equal ones, the later lies deeper."""
        self._queue_limit = _STALE_MIN
        self.count = 0
        self.found = 0.0
        self.found_now = 0
        """In the turn that is not over yet."""
        self.lost = 0.0
        """How much more LRU's found since this one was furthest ahead of it."""

    def push(self, number: int, run: _Run, runs: dict[int, _Run]) -> None:
        heappush(self._queue, (run.values[self._at], -number))
        self.count += run.held[self._at]
        if len(self._queue) > self._queue_limit:
            self._queue = [each for each in self._queue if self._holds(each, runs)]
            heapify(self._queue)
            self._queue_limit = 2 * len(self._queue) + _STALE_MIN

    def make_room(self, wanted: int, runs: dict[int, _Run]) -> None:
        over = min(self.count, self.count + wanted - self._slot_count)
        at, queue = self._at, self._queue
        while over > 0:
            run = runs.get(-queue[0][1])
            # As `_holds`, but for the call: most that is popped here is stale.
            if run is None or not run.held[at]:
                heappop(queue)
                continue
            gone = min(over, run.held[at])
            run.held[at] -= gone
            self.count -= gone
            over -= gone

    def _holds(self, entry: tuple[float, int], runs: dict[int, _Run]) -> bool:
        run = runs.get(-entry[1])
        return run is not None and run.held[self._at] > 0


class _Learner:
    """What is learned and kept by node, for one policy or for several with different nodes."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self._rates = [_LRU_RATE, *(rate / slot_count for rate in _RATES), _LFU_RATE]
        self.shadows = [_Shadow(at, slot_count) for at in range(len(self._rates))]
        self.chosen = _LRU
        """The rate that blocks leave by."""
        self.may_refuse = False
        self.runs: dict[int, _Run] = {}
        """By number; none of them is empty."""
        self._next = 0
        self._run_of = np.zeros(0, dtype=np.int64)
        """Node to the number of its run."""
        self.worths = Worths(np.float64)
        """Node to what it is worth at the chosen rate."""
        self.queues: WeakSet[WorthQueue] = WeakSet()
        self.ghosts: dict[Key, int] = {}
        """Key to run, of blocks that were evicted."""
        self._ghost_limit = min(max(slot_count, _GHOSTS_MIN), _GHOSTS_MAX)
        self._clock = 0
        """Blocks that were used so far."""
        self.stamp = 0
        """What the clock was when the blocks were asked for that were used last."""
        self._turns = 0

    def resize(self, node_capacity: int) -> None:
        if len(self._run_of) < node_capacity:
            self._run_of = grown(self._run_of, node_capacity, fill=_NO_RUN)

    # ---------------------------------------------------------------- what is seen

    def turn(self, count: int, *, follows: bool) -> None:
        """Blocks are used now, perhaps after others of the same prompt."""
        if not follows:
            self.stamp = self._clock
        self._clock += count
        self._turns += 1
        usual = self.shadows[_LRU].found_now
        for shadow in self.shadows:
            now, shadow.found_now = shadow.found_now, 0
            shadow.found = _DECAY * shadow.found + now
            lost = _DECAY * shadow.lost + usual - now
            shadow.lost = lost if lost > 0 else 0.0
        if self._turns % _TURNS_PER_CHOICE == 0:
            self._choose()

    def use(self, nodes: NDArray[np.intp], parts: list[tuple[int, int]]) -> None:
        """Blocks of these runs are used, or new."""
        used: list[tuple[list[float], int]] = []
        for number, count in parts:
            run = self.runs.get(number)
            values = self.values_if_used(run)
            if run is not None:
                for shadow, held in zip(self.shadows, run.held, strict=True):
                    shadow.found_now += count if count < held else held
                self._take(number, count)
            if used and _are_alike(used[-1][0], values):
                # The later block is worth less: none is taken for more than it is.
                used[-1] = (values, used[-1][1] + count)
            else:
                used.append((values, count))
        first = 0
        for values, count in used:
            self._begin(nodes[first : first + count], values)
            first += count

    def renew(self, nodes: NDArray[np.intp], parts: list[tuple[int, int]]) -> None:
        """A request that used blocks of these runs has ended: their time counts from here."""
        first = 0
        for number, count in parts:
            run = self.runs[number]
            passed = self.stamp - run.stamp
            if passed:
                held = [min(count, each) for each in run.held]
                self._take(number, count)
                rates = zip(run.values, self._rates, strict=True)
                values = [value + rate * passed for value, rate in rates]
                self._begin(nodes[first : first + count], values, held)
            first += count

    def forget(self, nodes: NDArray[np.intp], keys: Sequence[Key] | None) -> None:
        """Blocks left; they are remembered by their keys, if there are any."""
        first = 0
        for number, count in self.runs_of(nodes):
            if keys is None:
                self._take(number, count)
            else:
                self._remember(keys[first : first + count], number)
            first += count
        self._run_of[nodes] = _NO_RUN

    def runs_of(self, nodes: NDArray[np.intp]) -> list[tuple[int, int]]:
        """The runs of neighbours, each with how many there are."""
        numbers = self._run_of[nodes]
        if not np.count_nonzero(numbers != numbers[0]):
            return [(int(numbers[0]), len(nodes))]
        return _parts(numbers.tolist())

    def _take(self, number: int, count: int) -> None:
        """Blocks of a run are no longer in it."""
        run = self.runs[number]
        run.left -= count
        for at, shadow in enumerate(self.shadows):
            held = run.held[at]
            gone = count if count < held else held
            run.held[at] = held - gone
            shadow.count -= gone
        if not run.left:
            del self.runs[number]

    def _remember(self, keys: Iterable[Key], number: int) -> None:
        """Blocks of a run were evicted."""
        ghosts = self.ghosts
        # None of them is a ghost already: `recognize` takes those that enter.
        for key in keys:
            ghosts[key] = number
        excess = len(ghosts) - self._ghost_limit
        if excess > 0:
            gone = [ghosts.pop(key) for key in list(islice(ghosts, excess))]
            for old, count in _parts(gone):
                self._take(old, count)

    def recognize(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """The runs of blocks that enter; they are ghosts no more."""
        ghosts = self.ghosts
        if not ghosts or ghosts.keys().isdisjoint(keys):
            return [(_NO_RUN, len(keys))]
        return _parts([ghosts.pop(key, _NO_RUN) for key in keys])

    def values_if_used(self, run: _Run | None) -> list[float]:
        """What blocks of a run, or new ones, are worth after a use now."""
        now = self.stamp
        if run is None:
            return [rate * now for rate in self._rates]
        return [
            rate * now + log2(1 + 2.0 ** (value - rate * now))
            for value, rate in zip(run.values, self._rates, strict=True)
        ]

    # ---------------------------------------------------------------- shadows

    def _begin(
        self, nodes: NDArray[np.intp], values: list[float], held: list[int] | None = None
    ) -> None:
        number = self._next
        self._next += 1
        self._run_of[nodes] = number
        self.worths.of[nodes] = values[self.chosen]
        run = self.runs[number] = _Run(self.stamp, values, len(nodes))
        if held is not None:
            run.held = held
        for at, shadow in enumerate(self.shadows):
            wanted = run.held[at] = min(run.held[at], self._slot_count)
            # Others make room first, as in the tier, unless it refuses blocks.
            if not self.may_refuse:
                shadow.make_room(wanted, self.runs)
            shadow.push(number, run, self.runs)
            if self.may_refuse:
                shadow.make_room(0, self.runs)

    def _choose(self) -> None:
        lru = self.shadows[_LRU]
        usual = self._clock / self._turns
        chosen = max(
            (
                at
                for at, (shadow, lead) in enumerate(zip(self.shadows, _LEADS, strict=True))
                if shadow.found - lead * lru.found > max(usual, shadow.lost / _LEAD_LOST)
            ),
            key=lambda at: self.shadows[at].found,
            default=_LRU,
        )
        if chosen != self.chosen:
            self.follow(chosen)

    def follow(self, chosen: int) -> None:
        """Blocks leave by another rate from now on."""
        self.chosen = chosen
        known = (self._run_of != _NO_RUN).nonzero()[0]
        numbers, which = np.unique(self._run_of[known], return_inverse=True)
        worth = [self.runs[number].values[chosen] for number in numbers.tolist()]
        self.worths.of[known] = np.array(worth)[which]
        for queue in self.queues:
            queue.order_anew()


class AdaptivePolicy(WorthQueue):
    """Blocks leave by what they are worth at the rate that found most of late."""

    name = "adaptive"

    def __init__(
        self, slot_count: int, standing: Standing, *, learner: _Learner | None = None
    ) -> None:
        self._slot_count = slot_count
        self._learner = learner or _Learner(slot_count)
        super().__init__(standing, self._learner.worths)
        self._learner.queues.add(self)
        self._follows = False
        """Whether blocks that enter now follow those that were hit."""

    def sharing(self, standing: Standing) -> AdaptivePolicy:
        """Another order of other nodes, in the same arrays; all learn together."""
        return AdaptivePolicy(self._slot_count, standing, learner=self._learner)

    @property
    def may_refuse(self) -> bool:
        """Whether blocks that are worth too little stay outside, in the shadows as in the tier."""
        return self._learner.may_refuse

    @may_refuse.setter
    def may_refuse(self, may: bool) -> None:
        self._learner.may_refuse = may

    def add(self, nodes: NDArray[np.intp], keys: Sequence[Key], *, tick: int) -> None:  # noqa: ARG002
        """New blocks; those that were evicted not long ago are used again."""
        if len(nodes):
            self._learner.turn(len(nodes), follows=self._follows)
            self._follows = False
            self._learner.use(nodes, self._learner.recognize(keys))

    def touch(self, nodes: NDArray[np.intp], *, tick: int) -> None:  # noqa: ARG002
        """A hit is a use."""
        if len(nodes):
            self._learner.turn(len(nodes), follows=False)
            self._follows = True
            self._learner.use(nodes, self._learner.runs_of(nodes))

    def release(self, nodes: NDArray[np.intp], *, tick: int) -> None:  # noqa: ARG002
        """Their last use was now, but it is no other use."""
        if len(nodes):
            self._follows = False
            self._learner.renew(nodes, self._learner.runs_of(nodes))

    def admit(self, keys: Sequence[Key], *, priority: int) -> Judge | None:
        """Compares what blocks are worth; all may enter while blocks leave by last use."""
        learner, chosen = self._learner, self._learner.chosen
        if chosen == _LRU or not keys:
            return None
        worth: list[tuple[int, float]] = []
        """The end of each run of newcomers with what they are worth, the last run first."""
        end = 0
        for number, count in _parts([learner.ghosts.get(key, _NO_RUN) for key in keys]):
            end += count
            worth.insert(0, (end, learner.values_if_used(learner.runs.get(number))[chosen]))

        def judge(victim: int) -> int:
            leaves_at = self._standing(victim)
            if leaves_at is not None and leaves_at != priority:
                return len(keys) if leaves_at < priority else 0
            value = self._worth_view[victim]
            return next((end for end, best in worth if best > value), 0)

        return judge

    def forget(self, nodes: Sequence[int], keys: Sequence[Key], *, evicted: bool) -> None:
        """An evicted block leaves a ghost; of others nothing more is learned."""
        if nodes:
            self._learner.forget(np.array(nodes, dtype=np.intp), keys if evicted else None)

    def resize(self, node_capacity: int) -> None:
        self._learner.resize(node_capacity)
        super().resize(node_capacity)


def _parts(numbers: list[int]) -> list[tuple[int, int]]:
    return [(number, len(list(same))) for number, same in groupby(numbers)]


def _are_alike(values: list[float], others: list[float]) -> bool:
    return all(abs(one - other) < _ALIKE for one, other in zip(values, others, strict=True))
