"""How fast blocks travel and tokens are computed, from the last few times either happened.

A rate is a *moving median*: of an odd, small number of samples, so that one copy that waited
for a busy disk, or one step that compiled a kernel, does not turn a decision.

The one rule that must not break: what was measured long ago is not believed. A hop that was
slow once would otherwise never be used, and so never be measured, again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

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

    @property
    def sample_count(self) -> int:
        """How many samples it is the median of."""
        return len(self._sorted)

    def freeze(self) -> tuple[float, ...]:
        """The samples, oldest first, and when the last came."""
        return (self._at, *self._recent)

    def _stale(self, now: float) -> bool:
        return now - self._at > self._age_s


class HopMeter:
    """Measures one hop: how many blocks a second arrive while any are under way.

    A *stretch* begins when a copy is asked for on an idle hop, and ends when the hop is idle
    again or, while it stays busy, with every tick after which something arrived. So copies
    that wait for each other are counted together, as are those that are reported in the same
    step, and idle time is not counted at all.
    """

    __slots__ = ("_arrived", "_last", "_since", "queued", "rate")

    def __init__(self, *, age_s: float) -> None:
        self.rate = MovingMedian(age_s=age_s)
        """Blocks a second."""
        self.queued = 0
        """Blocks that were asked for, and that some rank may still be copying."""
        self._since = 0.0
        self._last = 0.0
        self._arrived = 0

    def begin(self, block_count: int, now: float) -> None:
        """A copy was asked for."""
        if not self.queued:
            self.sample()
            self._since = now
            self._arrived = 0
        self.queued += block_count

    def end(self, block_count: int, now: float, *, whole: bool) -> None:
        """Every rank is through with a copy; how long one took that is not whole tells nothing."""
        self.queued -= block_count
        if whole:
            self._arrived += block_count
            self._last = now
        else:
            self._arrived = 0
            self._since = now

    def sample(self) -> None:
        """Ends a stretch, if anything arrived in it."""
        seconds = self._last - self._since
        if self._arrived and seconds > 0:
            self.rate.add(self._arrived / seconds, self._last)
            self._since = self._last
            self._arrived = 0

    def freeze(self) -> tuple[object, ...]:
        """All that decides."""
        return (self.queued, self._since, self._last, self._arrived, self.rate.freeze())
