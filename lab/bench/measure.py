"""Timing of work, interleaved sides, medians.

The one rule: all sides of a comparison are measured under the same conditions. The garbage
collector never runs inside a timed section, and sides take turns in every round, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of the samples of one row."""

    median: float
    p99: float
    samples: int


def summarize(samples: Sequence[float]) -> Summary:
    """The median, the 99th percentile (nearest rank) and the number of samples.

    With the nearest rank, the 99th percentile is one of the samples (of fewer than a hundred, the
    largest) and not an interpolated value.
    """
    if not samples:
        raise ValueError("samples: at least one is needed, got none")
    ordered = sorted(samples)
    # In whole numbers, since 0.99 has no exact float: 0.99 * 100 must give rank 99.
    rank = math.ceil(99 * len(ordered) / 100)
    return Summary(
        median=float(statistics.median(ordered)),
        p99=float(ordered[rank - 1]),
        samples=len(ordered),
    )


def times_faster(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster we are: the median over rounds of their time by ours.

    The two times of one round lie close together, so a machine that changes its speed between
    rounds, as shared ones do by a factor of two, changes both and leaves their ratio alone.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"rounds: need as many of both sides, got {len(ours)} and {len(theirs)}")
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collects garbage, then keeps the collector from running until the end of the block."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def timed(work: Callable[[], T]) -> tuple[int, T]:
    """Does the work and returns how many nanoseconds it took, and its result.

    The result is returned so that taking it apart is not part of the time.
    """
    started_ns = time.perf_counter_ns()
    result = work()
    return time.perf_counter_ns() - started_ns, result


def interleave(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Runs every side once a round and returns the results per side, in order of rounds.

    Every other round runs in the opposite order, so that no side always inherits the same
    neighbour's warm or cold caches.
    """
    if rounds < 1:
        raise ValueError(f"rounds: must be at least 1, got {rounds}")
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in names:
            with collector_paused():
                result = sides[name]()
            results[name].append(result)
    return results
