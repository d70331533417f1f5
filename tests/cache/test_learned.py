"""What the learned order makes of traffic, and that it is bounded."""

from __future__ import annotations

import math
import signal
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.eviction import LearnedPolicy
from penstock.cache.eviction.curves import (
    _SLICES,
    AGES,
    RankedCells,
    ReuseCurves,
    _GittinsIndex,
    class_of,
)
from penstock.cache.eviction.learned import UsualLength
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.replay.simulation import Replay
from penstock.replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

ROUNDS = 20


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


def make_tables(curves: ReuseCurves) -> None:
    """All slices at once."""
    curves._begin_tables()
    for _ in range(_SLICES):
        curves._index.advance()
    curves._end_tables()


def what_is_left() -> tuple[int, list[bytes], NDArray[np.float64]]:
    """Blocks that were found, the keys that lie in the tier at last, and what they are worth."""
    device = TierSettings(name="device", slot_count=60, eviction="learned")
    replay = Replay(CacheSettings(device=device, block_tokens=1))
    replay.run(islice(mixed_traffic(), 600))
    books = replay.machine._books
    tier = books.tiers[0]
    policy = tier.policy
    assert isinstance(policy, LearnedPolicy)
    policy._shared.catch_up()
    keys = sorted(books.nodes.keys_of(tier.ready_nodes().tolist()))
    return sum(replay.tally.tokens_by_tier), keys, policy._curves.values


def test_blocks_leave_in_the_same_order_whenever_uses_are_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, keys, values = what_is_left()
    monkeypatch.setattr("penstock.cache.eviction.learned._EVENTS_NOTED", 1)
    monkeypatch.setattr("penstock.cache.eviction.learned._OFFERS_NOTED", 0)
    found_at_once, keys_at_once, values_at_once = what_is_left()

    assert (found, keys) == (found_at_once, keys_at_once)
    assert np.array_equal(values, values_at_once)


def test_a_bounded_number_of_uses_and_of_blocks_that_may_leave_is_noted() -> None:
    may_leave = dict.fromkeys(range(100), 0)
    policy = LearnedPolicy(100, may_leave.get)
    policy.resize(100)
    nodes = np.arange(100, dtype=np.int32)
    policy.add(nodes, [b"%d" % node for node in range(100)], tick=0)
    for tick in range(1000):
        policy.touch(nodes, tick=tick)
        policy.offer(nodes.tolist())
        assert len(policy._shared.noted) < 4
        assert len(policy._offered) <= 1024

    assert policy.candidates() == set(range(100))


def test_an_array_may_be_written_to_after_it_was_given_to_the_policy() -> None:
    policy = LearnedPolicy(8, dict.fromkeys(range(8), 0).get)
    policy.resize(8)
    nodes = np.arange(4, dtype=np.int32)
    policy.add(nodes, [b"0", b"1", b"2", b"3"], tick=0)
    nodes[:] = 7

    assert (
        policy.leave_together(0, np.arange(8, dtype=np.int32)).tolist() == [True] * 4 + [False] * 4
    )


def test_in_the_shadow_too_others_make_room_for_new_blocks() -> None:
    curves = ReuseCurves(10)
    first = curves.begin(0, 0, 0, 8)
    curves.now = 1.0
    second = curves.begin(0, 0, 0, 8)

    assert [curves._held[number] for number in (first, second)] == [2, 8]


def test_a_lead_counts_only_if_it_is_clear_and_of_whole_prefixes() -> None:
    curves = ReuseCurves(10)
    gone = curves.begin(0, 0, 0, 8)
    curves.now = 1.0
    kept = curves.begin(0, 0, 0, 10)
    curves.begin_match()
    curves.reuse(gone, 8, found=False)
    curves.reuse(kept, 10, found=True)

    assert curves._own_hits == curves._lru_hits == 0
    assert curves.lru_leads
    curves._lru_hits, curves._own_hits = 100.0, 102.0
    assert curves.lru_leads
    curves._own_hits = 104.0
    assert not curves.lru_leads


def test_lengths_are_told_apart_by_what_is_usual() -> None:
    usual = UsualLength()
    for _ in range(2000):
        usual.compare(64)

    assert [usual.compare(count) for count in (1, 31, 33, 63, 65, 127, 129, 10**6)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]


def test_prompts_of_another_length_have_values_of_their_own() -> None:
    may_leave = dict.fromkeys(range(20_000), 0)
    policy = LearnedPolicy(20_000, may_leave.get)
    policy.resize(20_000)
    for number in range(300):
        policy.advance(10.0 * number)
        first = number * 60
        short = np.arange(first, first + 4, dtype=np.int32)
        long = np.arange(first + 4, first + 60, dtype=np.int32)
        for nodes in (short, long):
            policy.add(nodes, [b"%d" % node for node in nodes.tolist()], tick=number)
            policy.release(nodes, tick=number)
        policy.advance(10.0 * number + 2.0)
        policy.touch(short, tick=number)
    values = policy._curves.values

    assert values[class_of(0, 0, 0), 0] > 2 * values[class_of(0, 0, 3), 0]


def test_the_index_is_the_best_of_all_times_to_stop_at() -> None:
    share = np.random.default_rng(3).uniform(0.001, 0.4, size=(5, AGES))
    index = _GittinsIndex(share)
    for _ in range(_SLICES):
        index.advance()

    widths = np.diff([0.5 * 2.0 ** (age / 3) for age in range(AGES)], prepend=0.0)
    for kind, shares in enumerate(share):
        for age in range(AGES):
            left, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
            for later in range(age, AGES):
                hits += left * shares[later]
                seconds += left * widths[later] * (1 - shares[later] / 2)
                left *= 1 - shares[later]
                best = max(best, hits / seconds)
            assert index.values[kind, age] == pytest.approx(best, rel=1e-9)


def test_values_change_only_when_all_slices_are_done() -> None:
    curves = ReuseCurves(100)
    changes = []
    for second in range(200):
        curves.now = float(second)
        curves.reuse(curves.begin(0, 0, 0, 4), 4, found=True)
        before = curves.values
        curves.turn()
        if curves.values is not before:
            changes.append(second + 1)

    assert changes == [64 + 14, 128 + 14]


def interrupt(*_: object) -> None:
    raise AssertionError("it does not end")


@pytest.mark.parametrize("since", [0.1, 2.3469998811320694, 1e6 + 0.1, 3e7 + 0.7])
def test_entries_that_reach_the_end_of_an_age_to_the_last_digit_grow_older(since: float) -> None:
    ranking = ReuseCurves(8).ranking
    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    try:
        for end in (0.5 * 2.0 ** (each / 3) for each in range(AGES - 1)):
            for now in (since + end, math.nextafter(since + end, 0), since + end * (1 - 1e-15)):
                cells = RankedCells(ranking, lambda _: True)
                cells.push(class_of(0, 0, 0), 0, (1, 7, since))
                cells.settle(ranking, now)
                cells.settle(ranking, math.nextafter(now, math.inf))

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
    often, never = class_of(1, 1, 0), class_of(0, 0, 0)
    for second in range(1000):
        curves.now = float(second)
        cohort = curves.begin(1, 1, 0, 4)
        curves.begin(0, 0, 0, 4)
        curves.now += 0.9
        curves.reuse(cohort, 4, found=True)
        curves.turn()

    assert curves.values[often, 0] > 10 * curves.values[never, 0]


def test_what_is_kept_is_bounded_whatever_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cache.eviction.curves._COHORTS_MAX", 1 << 12)
    curves = ReuseCurves(100)
    for second in range(10_000):
        curves.now = float(second)
        curves.begin(0, 0, 0, 1)

    assert len(curves._left) == 1 << 12


def test_evicted_blocks_are_remembered_up_to_a_bound_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.cache.eviction.learned._GHOSTS_MIN", 32)
    policy = LearnedPolicy(8, lambda _: 0)
    policy.resize(8)
    nodes = np.arange(8, dtype=np.int32)

    for turn in range(100):
        keys = [f"{turn} {block}".encode() for block in range(8)]
        policy.add(nodes, keys, tick=turn)
        policy.forget(nodes.tolist(), keys, evicted=True)
    policy._shared.catch_up()

    assert list(policy._ghosts) == [
        f"{turn} {block}".encode() for turn in range(96, 100) for block in range(8)
    ]
    left = policy._curves._left
    assert int(np.count_nonzero(left[: len(left)])) <= 32 + 8


# -------------------------------------------------------------------- who may enter


def test_a_tier_below_refuses_what_never_comes_back_and_keeps_the_rest() -> None:
    device = TierSettings(name="device", slot_count=8)
    host = TierSettings(name="host", slot_count=60, eviction="learned")
    replay = Replay(CacheSettings(device=device, tiers=(host,), block_tokens=1))
    replay.run(mixed_traffic())

    # As a device of that size finds; LRU finds nothing, and writes every block.
    assert sum(replay.tally.tokens_by_tier) > 0.5 * 3 * 10 * ROUNDS
    assert replay.machine.statistics().blocks_refused > replay.tally.blocks / 3
    assert replay.links[0, 1].blocks < replay.tally.blocks / 2


class Shelves:
    """A policy of a tier below the device in which blocks lie that may leave at any time."""

    def __init__(self, *, by_value: bool = True) -> None:
        self.priority: dict[int, int] = {}
        self.policy = LearnedPolicy(20, self.priority.get)
        self.policy.may_refuse = True
        self.policy.resize(64)
        curves = self.policy._curves
        # Blocks that were hit once come back after some seconds, others hardly ever do.
        curves._reused[class_of(1, 1, 0) : class_of(1, 10, 3) + 1, 9:12] = 50.0
        curves._passed[class_of(1, 1, 0) : class_of(1, 10, 3) + 1, :] = 50.0
        curves._passed[: class_of(0, 0, 3) + 1, :] = 1000.0
        make_tables(curves)
        curves._own_hits = curves._ahead = 1e9
        if by_value:
            curves.ranking = curves._by_value

    def enter(self, *nodes: int, hit: bool = False) -> None:
        numbers = np.array(nodes, dtype=np.int32)
        self.policy.add(numbers, [b"%d" % node for node in nodes], tick=1)
        if hit:
            self.policy.touch(numbers, tick=2)
        self.priority.update(dict.fromkeys(nodes, 0))
        self.policy.offer(nodes)

    def admitted(self, *names: bytes, victim: int) -> int:
        judge = self.policy.admit(names, priority=0)
        return len(names) if judge is None else judge(victim)


def test_new_blocks_do_not_take_the_place_of_blocks_that_come_back() -> None:
    shelves = Shelves()
    shelves.enter(1, 2, hit=True)
    shelves.enter(3, 4)

    assert shelves.admitted(b"new", b"newer", victim=2) == 0
    assert shelves.admitted(b"new", b"newer", victim=4) == 2


def test_a_block_that_was_refused_and_is_asked_for_again_is_worth_more() -> None:
    shelves = Shelves()
    shelves.enter(1, 2, hit=True)
    again = [b"a", b"b"]
    nodes = np.array([10, 11], dtype=np.int32)
    shelves.policy.add(nodes, again, tick=3)
    shelves.policy.forget(nodes.tolist(), again, evicted=True)

    assert shelves.admitted(*again, victim=2) == 2
    # What follows is new, and is judged by itself.
    assert shelves.admitted(*again, b"new", victim=2) == 2


def test_all_blocks_enter_while_blocks_leave_by_last_use() -> None:
    shelves = Shelves(by_value=False)
    shelves.enter(1, hit=True)

    assert shelves.policy.admit([b"new"], priority=0) is None


def test_what_refusing_blocks_may_cost_is_counted_as_if_they_had_been_evicted() -> None:
    curves = ReuseCurves(10)
    curves.may_refuse = True
    refused = curves.begin(0, 0, 0, 6)
    curves.evict(refused, 6)
    curves.reuse(refused, 4, found=False)

    assert curves._missing_count == 2
    assert curves._ahead == -4


def test_in_the_shadow_of_a_tier_that_refuses_new_blocks_may_stay_outside() -> None:
    curves = ReuseCurves(10)
    curves.may_refuse = True
    curves._reused[class_of(1, 1, 0), 9:12] = 50.0
    curves._passed[class_of(1, 1, 0), :] = 50.0
    curves._passed[: class_of(0, 0, 3) + 1, :] = 1000.0
    make_tables(curves)
    known = curves.begin(1, 1, 0, 8)
    new = curves.begin(0, 0, 0, 8)

    assert (curves._held_view[known], curves._held_view[new]) == (8, 2)
