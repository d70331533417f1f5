"""The learned order never finds much less than LRU, whatever the traffic, however little."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from penstock.cache.eviction import LearnedPolicy
from penstock.cache.eviction.curves import ReuseCurves
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.replay.simulation import Replay
from tests.cache.kinds_of_traffic import KINDS, requests_of, traffic_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.replay.trace import TraceRequest

POINTS_MAX = 0.5
"""How far below LRU the hit rate may be."""
KNOWN_MAX = {277: 0.63}
"""Traffic, by seed, that is known to cost more, and how much: 400 requests of chats in a cache of
357 blocks find 158 blocks, of 7,447, where LRU finds 206."""


def play(requests: list[TraceRequest], blocks: int, eviction: str) -> Replay:
    device = TierSettings(name="device", slot_count=blocks, eviction=eviction)
    replay = Replay(CacheSettings(device=device, block_tokens=2))
    replay.run(requests)
    return replay


def points_gained(
    requests: list[TraceRequest],
    blocks: int,
    play: Callable[[list[TraceRequest], int, str], Replay] = play,
) -> float:
    """By how many points the hit rate is above that of LRU."""
    learned, lru = (play(requests, blocks, name).tally for name in ("learned", "lru"))
    return 100 * (sum(learned.tokens_by_tier) - sum(lru.tokens_by_tier)) / learned.tokens


def play_below(requests: list[TraceRequest], blocks: int, eviction: str) -> Replay:
    """With a tier below that may refuse blocks, and a device that has room for one prompt."""
    longest = max(len(request.keys) for request in requests)
    device = TierSettings(name="device", slot_count=longest + 1)
    host = TierSettings(name="host", slot_count=blocks, eviction=eviction)
    replay = Replay(CacheSettings(device=device, tiers=(host,), block_tokens=2))
    replay.run(requests)
    return replay


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("share", [0.05, pytest.param(0.3, marks=pytest.mark.long)])
def test_little_traffic_of_any_kind_loses_nothing_that_matters(kind: str, share: float) -> None:
    requests = requests_of(KINDS[kind](Random(f"{kind} {share}"), 150))
    different = len({key for request in requests for key in request.keys})
    longest = max(len(request.keys) for request in requests)

    assert points_gained(requests, max(longest + 1, round(share * different))) >= -POINTS_MAX


@pytest.mark.parametrize("seed", [18, 3012, 3016, 3021, 3106])
def test_traffic_that_once_lost_half_a_point_does_so_no_more(seed: int) -> None:
    _, requests, blocks = traffic_of(seed)

    assert points_gained(requests, blocks) >= -POINTS_MAX


@pytest.mark.parametrize("seed", KNOWN_MAX)
def test_traffic_that_is_known_to_lose_more_loses_no_more_than_that(seed: int) -> None:
    _, requests, blocks = traffic_of(seed)

    assert points_gained(requests, blocks) >= -KNOWN_MAX[seed]


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("documents", 0.1),
        pytest.param("reversals", 0.2, marks=pytest.mark.long),
        pytest.param("chats", 0.1, marks=pytest.mark.long),
    ],
)
def test_a_tier_that_refuses_blocks_loses_nothing_that_matters_either(
    kind: str, share: float
) -> None:
    requests = requests_of(KINDS[kind](Random(f"{kind} below"), 400))
    different = len({key for request in requests for key in request.keys})

    assert points_gained(requests, round(share * different), play_below) >= -POINTS_MAX


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_traffic_drawn_from_many_seeds_never_loses_half_a_point(first: int) -> None:
    gained = {}
    for seed in range(first, first + 50):
        name, requests, blocks = traffic_of(seed)
        gained[seed, name, blocks] = points_gained(requests, blocks)

    lost = {which: -points for which, points in gained.items()}
    assert {
        which: points
        for which, points in lost.items()
        if points > KNOWN_MAX.get(which[0], POINTS_MAX)
    } == {}


@pytest.mark.parametrize("seed", [3, 5, 8])
def test_what_lru_would_have_found_is_known_and_never_counted_too_low(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.eviction.curves._LEDGER_DECAY", 1.0)
    requests = requests_of(KINDS["chats"](Random(seed), 200))
    longest = max(len(request.keys) for request in requests)
    learned = play(requests, 4 * longest, "learned")
    lru = play(requests, 4 * longest, "lru")
    policy = learned.machine._books.device.policy
    assert isinstance(policy, LearnedPolicy)

    gained = (sum(learned.tally.tokens_by_tier) - sum(lru.tally.tokens_by_tier)) / 2
    # A prompt's last block, which is not full, takes a slot that the count does not know of.
    assert gained - 0.005 * learned.tally.blocks <= policy._curves._ahead <= gained


def lead_of(curves: ReuseCurves) -> None:
    """Makes it look as if this order found twice as much."""
    curves._lru_hits, curves._own_hits = 100.0, 200.0


def test_nothing_is_risked_before_the_tolerance_covers_a_run_that_comes_back() -> None:
    curves = ReuseCurves(100)
    lead_of(curves)
    curves._missing_sum, curves._missing_squares = 100.0, 100.0 * 8

    curves.ask(1999)
    assert curves.exposed
    curves.ask(1)
    assert not curves.exposed


def test_blocks_that_lru_still_has_are_counted_until_lru_drops_them_too() -> None:
    curves = ReuseCurves(10)
    first = curves.begin(0, 0, 0, 6)
    curves.evict(first, 4)
    assert curves._missing_count == 4

    curves.reuse(first, 1, found=False)
    assert curves._missing_count == 3
    assert curves._ahead == -1

    curves.begin(0, 0, 0, 10)
    assert curves._missing_count == 0
    curves.evict(first, 1)
    assert curves._missing_count == 0


def test_a_tier_that_lost_more_than_is_tolerated_leaves_by_last_use_at_once() -> None:
    curves = ReuseCurves(100)
    lead_of(curves)
    curves.ask(100_000)
    while curves.ranking.by_use:
        lead_of(curves)
        curves.turn()
    cohort = curves.begin(0, 0, 0, 100)
    curves._ahead = -1000.0
    curves.evict(cohort, 50)

    curves.turn()
    assert curves.ranking.by_use
