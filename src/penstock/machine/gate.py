"""Load or compute: how much of what lies below the device is worth bringing up.

    time to have the first n blocks    the copies they need, behind those already queued
    time to compute the others         their tokens, at the measured speed of prefill

The prefix with the least sum is taken. It can only end where the tier changes: within one
tier every further block costs the same and saves the same.

Computing takes the device from others, loading does not. While other requests are being loaded,
what this one computes holds up what they will compute, so computing counts twice: a request waits
for its load up to twice as long as it would compute. Otherwise, of requests that come together,
the last would compute because the link is busy, and all of them would end later.

A load costs at least the wait for the end of a step, which no rate shows: one that saves less
than `load_tokens_min`, or than the engine prefills in `LOAD_WAIT_S`, is not made.

| not measured, or not lately | what follows                                             |
|-----------------------------|----------------------------------------------------------|
| prefill                     | everything is loaded                                     |
| a hop, or nobody waited     | it counts as free: its copies end within the steps that  |
| longer than for a few steps | a request waits for anyway, and cost it no computing     |

The one rule that must not break: rates come from events and the time that came with them, so
that the same events give the same decisions. Asking changes nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import BlockFault
from penstock.cache.rates import HopMeter, MovingMedian
from penstock.cache.settings import DEVICE, HUB, Gate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.operations import Operation
    from penstock.cache.settings import CacheSettings
    from penstock.machine.books import Books
    from penstock.machine.events import Computed


LOAD_WAIT_S = 0.005
"""What a load costs its request however small it is: it is seen to have ended at the border of a
step. An 8B model decodes a batch in about 20 ms on one GPU, and a request that comes at any
moment of a step waits for half of it; a quarter of a step is on the side of loading. An engine
that prefills 20,000 tokens a second computes 100 of them meanwhile."""


BESIDE_OTHERS = 2
"""How often computing counts while others are being loaded. An estimate, not a measurement: where
35,000 tokens a second are computed and 190,000 loaded, as on one H200, eight requests that come
together with 512 new tokens behind 1,600 others all have their first tokens after 130 ms if all are
loaded, and after 260 if the last three of them compute."""


class Rates:
    """All that was measured for one engine: its hops, and its prefill."""

    def __init__(self, settings: CacheSettings) -> None:
        self.prefill = MovingMedian(age_s=settings.rate_age_s)
        """Tokens a second."""
        lower = range(HUB, 1 + len(settings.tiers))
        below = [hop for tier in lower[1:] for hop in ((tier, HUB), (HUB, tier))]
        pairs = [(DEVICE, HUB), (HUB, DEVICE), *below] if lower else []
        self.hops = {pair: HopMeter(age_s=settings.rate_age_s) for pair in pairs}
        """By source and target. Copies within the device are not measured: nobody could
        rather compute what a fork shares."""

    def started(self, operation: Operation, now: float) -> None:
        meter = self.hops.get((operation.source, operation.target))
        if meter is not None:
            meter.begin(len(operation.keys), now)

    def ended(self, operation: Operation, now: float) -> None:
        """No rank touches a copy's slots any more."""
        meter = self.hops.get((operation.source, operation.target))
        if meter is not None:
            # To say that a block is not there takes no time, and says nothing of a disk's speed.
            missing = BlockFault.MISSING in operation.faults.values()
            whole = not operation.failure and not missing
            meter.end(len(operation.keys), now, whole=whole)

    def tick(self, now: float) -> None:
        """A step of the engine: what arrived since the last one is counted together."""
        for meter in self.hops.values():
            meter.tick(now)


def computed(books: Books, event: Computed, now: float) -> None:
    """Takes how long the engine's prefill took."""
    if event.token_count < 1:
        raise ValueError(f"token_count is {event.token_count}, must be at least 1")
    if not 0 < event.seconds < math.inf:
        raise ValueError(f"seconds is {event.seconds}, must be a number above 0")
    rate = event.token_count / event.seconds
    if rate == math.inf:
        raise ValueError(f"seconds is {event.seconds}: no engine computes that fast")
    books.rates.prefill.add(rate, now)


def worth_loading(books: Books, source: NDArray[np.int8], now: float) -> int:
    """How many leading blocks to take, of a chain whose blocks lie in these tiers."""
    below = np.flatnonzero(source != DEVICE)
    if not len(below):
        return len(source)
    free = int(below[0])
    length = _quickest(books, source, free, now)
    saved_tokens = (length - free) * books.settings.block_tokens
    return length if saved_tokens >= _floor_tokens(books, now) else free


def _floor_tokens(books: Books, now: float) -> float:
    """How many tokens a load has to save."""
    settings = books.settings
    if settings.load_tokens_min or settings.load_gate is Gate.OFF:
        return settings.load_tokens_min
    return LOAD_WAIT_S * (books.rates.prefill.value(now) or 0.0)


def _quickest(books: Books, source: NDArray[np.int8], free: int, now: float) -> int:
    """The length of the prefix after which the rest is better computed; the longer if equal."""
    tokens_per_s = books.rates.prefill.value(now)
    if tokens_per_s is None or books.settings.load_gate is Gate.OFF:
        return len(source)
    ends = np.flatnonzero(source[free + 1 :] != source[free:-1]) + free + 1
    ends = np.concatenate(([free], ends, [len(source)]))
    weight = BESIDE_OTHERS if books.rates.hops[HUB, DEVICE].queued else 1
    compute_s = (len(source) - ends) * (weight * books.settings.block_tokens / tokens_per_s)
    total_s = compute_s + _load_s(books, source, ends, now)
    return int(ends[len(ends) - 1 - int(np.argmin(total_s[::-1]))])


def _load_s(
    books: Books, source: NDArray[np.int8], ends: NDArray[np.intp], now: float
) -> NDArray[np.float64]:
    """How long it takes to have each of some prefixes on the device."""
    below = np.concatenate(([0], np.cumsum(source != DEVICE)))[ends]
    seconds = _hop_s(books, HUB, DEVICE, below, now)
    for tier in range(HUB + 1, len(books.tiers)):
        staged = np.concatenate(([0], np.cumsum(source == tier)))[ends]
        seconds = seconds + _hop_s(books, tier, HUB, staged, now)
    return seconds


def _hop_s(
    books: Books, source: int, target: int, block_counts: NDArray[np.intp], now: float
) -> NDArray[np.float64]:
    """How long blocks take over a hop, behind what is queued there."""
    meter = books.rates.hops[source, target]
    blocks_per_s = meter.bound.value(now)
    if blocks_per_s is None:
        return np.zeros(len(block_counts))
    seconds: NDArray[np.float64] = (block_counts + meter.queued) / blocks_per_s
    return np.where(block_counts > 0, seconds, 0.0)
