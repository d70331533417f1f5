"""The adaptive order never finds much less than LRU, whatever the traffic, however little."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from penstock.cache.settings import CacheSettings, TierSettings
from penstock.replay.simulation import Replay
from tests.cache.kinds_of_traffic import KINDS, requests_of, traffic_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.replay.trace import TraceRequest

POINTS_MAX, POINTS_MAX_SHORT = 1.0, 2.5
"""How far below LRU the hit rate may be with a thousand requests or more, and with fewer."""
MEAN_MAX = 0.3
"""How far it may be on average, by kind of traffic."""


def play(requests: list[TraceRequest], blocks: int, eviction: str) -> Replay:
    device = TierSettings(name="device", slot_count=blocks, eviction=eviction)
    replay = Replay(CacheSettings(device=device, block_tokens=2))
    replay.run(requests)
    return replay


def play_below(requests: list[TraceRequest], blocks: int, eviction: str) -> Replay:
    """With a tier below that may refuse blocks, and a device that has room for one prompt."""
    longest = max(len(request.keys) for request in requests)
    device = TierSettings(name="device", slot_count=longest + 1)
    host = TierSettings(name="host", slot_count=blocks, eviction=eviction)
    replay = Replay(CacheSettings(device=device, tiers=(host,), block_tokens=2))
    replay.run(requests)
    return replay


def points_gained(
    requests: list[TraceRequest],
    blocks: int,
    play: Callable[[list[TraceRequest], int, str], Replay] = play,
) -> float:
    """By how many points the hit rate is above that of LRU."""
    adaptive, lru = (play(requests, blocks, name).tally for name in ("adaptive", "lru"))
    return 100 * (sum(adaptive.tokens_by_tier) - sum(lru.tokens_by_tier)) / adaptive.tokens


def little_of(kind: str, share: float) -> tuple[list[TraceRequest], int]:
    """A hundred and fifty requests, and how many blocks are a share of theirs."""
    requests = requests_of(KINDS[kind](Random(f"{kind} {share}"), 150))
    different = len({key for request in requests for key in request.keys})
    longest = max(len(request.keys) for request in requests)
    return requests, max(longest + 1, round(share * different))


def test_a_lead_that_is_lost_is_not_followed_until_it_is_forgotten() -> None:
    # Prompts that come twice, after pauses that grew too long for LRU, and become short again.
    requests = requests_of(KINDS["pauses"](Random("fresh1 pauses 0"), 1000))
    found = {}
    for eviction in ("adaptive", "lru"):
        earlier, later = (play(requests[:end], 100, eviction).tally for end in (200, 280))
        found[eviction] = sum(later.tokens_by_tier) - sum(earlier.tokens_by_tier)

    assert found["adaptive"] > 0.9 * found["lru"] > 0


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("share", [0.05, pytest.param(0.3, marks=pytest.mark.long)])
def test_little_traffic_of_any_kind_loses_little(kind: str, share: float) -> None:
    assert points_gained(*little_of(kind, share)) >= -POINTS_MAX_SHORT


@pytest.mark.parametrize(
    "kind",
    ["documents", "wonders", pytest.param("chats", marks=pytest.mark.long)],
)
def test_a_tier_that_refuses_blocks_loses_little_either(kind: str) -> None:
    assert points_gained(*little_of(kind, 0.1), play_below) >= -POINTS_MAX_SHORT


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_thousand_requests_lose_little(kind: str) -> None:
    gained = []
    for seed in range(20):
        draw = Random(f"{kind} {seed}")
        requests = requests_of(KINDS[kind](draw, 1000))
        different = len({key for request in requests for key in request.keys})
        longest = max(len(request.keys) for request in requests)
        share = draw.choice((0.02, 0.05, 0.1, 0.2, 0.35, 0.6))
        gained.append(points_gained(requests, max(longest + 1, round(share * different))))

    assert min(gained) >= -POINTS_MAX
    assert mean(gained) >= -MEAN_MAX


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 240, 40))
def test_short_traffic_drawn_from_many_seeds_gains_much_and_loses_little(first: int) -> None:
    gained = {}
    for seed in range(first, first + 40):
        name, requests, blocks = traffic_of(seed)
        gained[seed, name, blocks, len(requests)] = points_gained(requests, blocks)

    assert mean(gained.values()) >= 1.0
    assert {
        which: points
        for which, points in gained.items()
        if points < -(POINTS_MAX if which[-1] >= 1000 else POINTS_MAX_SHORT)
    } == {}
