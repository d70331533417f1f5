"""How fast blocks are copied and tokens computed, and whether a step may wait for a load.

A rate is a *moving median* of an odd, small number of samples, so that one copy that waited for a
busy disk, or one step that compiled a kernel, does not turn a decision. What was measured long ago
does not count: a hop that was slow once would otherwise never be used, and so never be measured,
again.

A request whose layers are still arriving may join a step (`joins_step`):

    layer     0      1      2      3
    arrives   ──┤    ──────┤ ──────────┤ ─────────────┤
    needed    │      │      │      │                        the step alone
              └stall ┘

A step waits for a layer that is not there, and needs everything after it that much later. A long
load must not hold up the requests that decode in the same step, so it joins only when all its
waits together are a small share of the step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


SAMPLE_COUNT = 31
"""Odd, so that the median is a sample; at a few samples a second, it follows within seconds."""


class MovingMedian:
    """The median of the last samples, for as long as the last of them is fresh."""

    __slots__ = ("_age_s", "_at", "_recent", "_sorted")

    def __init__(self, *, age_s: float) -> None:
        self._age_s = age_s
        self._at = 0.0
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, sample: float, now: float) -> None:
        """Takes in one more sample; those before it are forgotten if they are stale."""
        if self._stale(now):
            self._recent.clear()
            self._sorted.clear()
        self._recent.append(sample)
        insort(self._sorted, sample)
        if len(self._recent) > SAMPLE_COUNT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._at = now

    def value(self, now: float) -> float | None:
        """The median, or `None` where nothing was measured lately."""
        if not self._sorted or self._stale(now):
            return None
        return self._sorted[len(self._sorted) // 2]

    def _stale(self, now: float) -> bool:
        return now - self._at > self._age_s


STEPS_TO_TELL = 5
"""Steps of the engine until the end of any copy is reported, however quick it was. It is asked
for before one, waits on the device for the two that may be under way, and is seen to have ended
in the next, or, where reports of ranks come with the engine's messages, in the one after that."""


class HopMeter:
    """Measures one hop: how many blocks a second arrive while any are under way.

    A *stretch* begins when a copy is asked for on an idle hop, and ends when the hop is idle
    again or, while it stays busy, with every tick after which something arrived. So copies
    that wait for each other are counted together, as are those that are reported in the same
    step, and idle time is not counted at all.

    A copy is seen to end at the border of a step, so one that took a moment seems to have taken
    a step. Where steps are long, a quick hop looks slow by that; were it believed, everything
    would be computed, and steps would stay long. So there are two rates. `seen` is of all
    stretches, for people. `bound` decides, and counts only what the steps cannot explain:

    | at the end of a stretch                         | it took                               |
    |-------------------------------------------------|---------------------------------------|
    | a copy is still under way that was asked for    | all of it: the hop was never idle     |
    | more than `STEPS_TO_TELL` ticks ago             |                                       |
    | otherwise                                       | the time before its last              |
    |                                                 | `STEPS_TO_TELL` ticks, if there is any|

    An engine that has nothing to compute ticks without a pause until its first load has come, and
    then computes a long step: the other loads end early in it, and are seen to end after it.
    """

    __slots__ = (
        "_arrived",
        "_asked",
        "_asked_by_tick",
        "_last",
        "_over",
        "_since",
        "_sure",
        "_ticks",
        "bound",
        "copied",
        "seen",
    )

    def __init__(self, *, age_s: float) -> None:
        self.seen = MovingMedian(age_s=age_s)
        """Blocks a second, of all stretches."""
        self.bound = MovingMedian(age_s=age_s)
        """Blocks a second, of those that the hop and not the engine's steps held up."""
        self.copied = 0
        """Blocks that ever arrived, in copies that did not fail."""
        self._asked = 0
        """Blocks that were ever asked for, and, next, those of them that nobody copies any more."""
        self._over = 0
        self._asked_by_tick: deque[int] = deque((0,) * STEPS_TO_TELL, maxlen=STEPS_TO_TELL)
        """How many had been asked for at the last ticks, oldest first."""
        self._ticks: deque[float] = deque((0.0,) * STEPS_TO_TELL, maxlen=STEPS_TO_TELL)
        """When the last ticks were, oldest first."""
        self._since = 0.0
        self._last = 0.0
        self._arrived = 0
        self._sure = 0.0
        """Until when a copy was surely under way that has arrived since."""

    @property
    def queued(self) -> int:
        """Blocks that were asked for, and that some rank may still be copying."""
        return self._asked - self._over

    def begin(self, block_count: int, now: float) -> None:
        if not self.queued:
            self._sample()
            self._forget(now)
        self._asked += block_count

    def end(self, block_count: int, now: float, *, whole: bool) -> None:
        """Notes that every rank has ended a copy; one that failed in part is not measured."""
        overdue = self._is_overdue
        self._over += block_count
        if whole:
            self.copied += block_count
            self._arrived += block_count
            self._last = now
            if overdue:
                self._sure = self._ticks[0]
        else:
            self._forget(now)

    def tick(self, now: float) -> None:
        """A step of the engine: ends a stretch, if anything arrived in it."""
        self._sample()
        self._asked_by_tick.append(self._asked)
        self._ticks.append(now)

    @property
    def _is_overdue(self) -> bool:
        """Whether a copy is under way for longer than steps alone could make it look."""
        return self._asked_by_tick[0] > self._over

    def _sample(self) -> None:
        seconds = self._last - self._since
        if not self._arrived or seconds <= 0:
            return
        self.seen.add(self._arrived / seconds, self._last)
        hop_s = seconds if self._is_overdue else self._sure - self._since
        if hop_s > 0:
            self.bound.add(self._arrived / hop_s, self._last)
        self._forget(self._last)

    def _forget(self, now: float) -> None:
        self._since = self._sure = now
        self._arrived = 0


STALL_SHARE_MAX = 0.05


def stall_s(arrivals_s: Sequence[float], needs_s: Sequence[float]) -> float:
    """How long a step that begins now waits for its layers, all in all.

    Raises `ValueError`: the two differ in length.
    """
    if len(arrivals_s) != len(needs_s):
        raise ValueError(f"{len(arrivals_s)} layers arrive, {len(needs_s)} are needed")
    # Once it has waited for one layer, the step needs every later one that much later.
    late = (there - wanted for there, wanted in zip(arrivals_s, needs_s, strict=True))
    return max(0.0, max(late, default=0.0))


def joins_step(
    arrivals_s: Sequence[float],
    needs_s: Sequence[float],
    *,
    step_s: float,
    stall_share_max: float = STALL_SHARE_MAX,
) -> bool:
    """Whether the step would wait for at most `stall_share_max` of its own length.

    Raises `ValueError`: `step_s` is not positive, or the layers do not match.
    """
    if not step_s > 0:
        raise ValueError(f"step_s is {step_s}, must be more than 0")
    return stall_s(arrivals_s, needs_s) <= stall_share_max * step_s
