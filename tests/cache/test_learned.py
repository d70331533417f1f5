"""What the learned order makes of traffic, and that it is bounded."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.eviction import LearnedPolicy
from penstock.cache.eviction.curves import AGES, RankedCells, ReuseCurves, class_of
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.replay.simulation import Replay
from penstock.replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 30


def mixed_traffic() -> Iterator[TraceRequest]:
    """Ten prompts that come back after 100 s each, among many that are seen once."""
    for number in range(10 * ROUNDS):
        at_s = 10.0 * number
        again = [f"again {number % 10} {block}".encode() for block in range(4)]
        yield TraceRequest(at_s, again, 4)
        for other in range(4):
            once = [f"once {number} {other} {block}".encode() for block in range(4)]
            yield TraceRequest(at_s + 1 + other, once, 4)


def found_with(eviction: str) -> int:
    device = TierSettings(name="device", slot_count=60, eviction=eviction)
    replay = Replay(CacheSettings(device=device, block_tokens=1))
    replay.run(mixed_traffic())
    return sum(replay.tally.tokens_by_tier)


def test_blocks_that_come_back_are_kept_where_lru_loses_them() -> None:
    assert found_with("lru") == 0
    # Not in the first rounds; the last block of a prompt is never taken from the cache.
    assert found_with("learned") > 0.5 * 3 * 10 * ROUNDS


def interrupt(*_: object) -> None:
    raise AssertionError("it does not end")


@pytest.mark.parametrize("since", [0.1, 2.3469998811320694, 1e6 + 0.1, 3e7 + 0.7])
def test_entries_that_reach_the_end_of_an_age_to_the_last_digit_grow_older(since: float) -> None:
    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    try:
        for end in (0.5 * 2.0 ** (each / 3) for each in range(AGES - 1)):
            for now in (since + end, math.nextafter(since + end, 0), since + end * (1 - 1e-15)):
                cells = RankedCells(ReuseCurves(8).ranking, since)
                cells.push(class_of(0, 0), 1, 7, since)
                cells.settle(ReuseCurves(8).ranking, now)
                cells.settle(ReuseCurves(8).ranking, math.nextafter(now, math.inf))

                assert cells.entries() == [(1, 7, since)]
    finally:
        signal.alarm(0)


def test_blocks_leave_by_last_use_until_something_was_learned() -> None:
    order: dict[int, int] = {}
    policy = LearnedPolicy(8, order.get)
    policy.resize(8)
    for node in range(8):
        policy.advance(float(node))
        policy.add(np.array([node], dtype=np.int32), [bytes([node])], tick=node)
        order[node] = 0
    policy.offer(range(8))

    leaving = []
    while (node_or_none := policy.pop()) is not None:
        del order[node_or_none]
        leaving.append(node_or_none)

    assert leaving == list(range(8))


def test_a_class_that_comes_back_at_once_is_worth_more_than_one_that_does_not() -> None:
    curves = ReuseCurves(1000)
    often, never = class_of(1, 1), class_of(0, 0)
    for second in range(1000):
        curves.now = float(second)
        cohort = curves.begin(often, 4)
        curves.begin(never, 4)
        curves.now += 0.9
        curves.reuse(cohort, 4)
        curves.turn()

    assert curves.values[often, 0] > 10 * curves.values[never, 0]


def test_what_is_kept_is_bounded_whatever_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.eviction.curves._COHORTS_MAX", 1 << 12)
    curves = ReuseCurves(100)
    for second in range(10_000):
        curves.now = float(second)
        curves.begin(class_of(0, 0), 1)

    assert len(curves._left) == 1 << 12
