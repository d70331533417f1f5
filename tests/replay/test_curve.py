"""One pass says what LRU finds in every room: as much as a replay, to the token."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.cache.settings import TierSettings
from penstock.config import parse_config
from penstock.replay.curve import LruCurve
from penstock.replay.simulation import Replay, useful_blocks
from penstock.replay.trace import TraceReader
from tests.replay.test_simulation import BLOCK, Chain, cache_of, request_of, traces

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.replay.trace import TraceRequest

COMES_TWICE = [Chain(0, 4, 0), Chain(2, 3, 0), Chain(0, 4, 0), Chain(1, 5, 0), Chain(0, 4, 1)]
"""A last block that is computed again though it lies in the host tier: it was used all the same."""


def curve_of(
    trace: Iterable[TraceRequest], *, room: int, block_tokens: int = BLOCK, kept: int = 1 << 20
) -> LruCurve:
    curve = LruCurve(blocks_kept=kept)
    for request in trace:
        if -(-request.token_count // block_tokens) <= room:
            curve.add(request.keys, useful_blocks(request, block_tokens))
    return curve


def shipped(name: str) -> Iterator[TraceRequest]:
    text = 'version = 1\nmodel.name = "m"\ncache = { block_tokens = 512, blocks = 1 }'
    return TraceReader(parse_config(text)).read(name)


@given(traces, st.integers(1, 14), st.integers(1, 24))
@example([request_of(chain, float(at)) for at, chain in enumerate(COMES_TWICE)], 5, 7)
@settings(max_examples=150, deadline=None)
def test_with_write_through_all_rooms_find_what_one_lru_of_the_hosts_size_finds(
    trace: list[TraceRequest], slots: int, host: int
) -> None:
    assume(host >= slots)
    replay = Replay(cache_of(slots, TierSettings(name="host", slot_count=host)))

    replay.run(trace)

    assert sum(replay.tally.tokens_by_tier) == curve_of(trace, room=slots).found(host) * BLOCK


@pytest.mark.parametrize("host", [640, 2048])
def test_of_a_shipped_trace_the_pass_finds_what_the_replay_finds(host: int) -> None:
    trace = list(islice(shipped("conversation"), 1200))
    sizes = cache_of(640, TierSettings(name="host", slot_count=host))
    replay = Replay(replace(sizes, block_tokens=512))

    replay.run(trace)

    found = sum(replay.tally.tokens_by_tier)
    assert found == curve_of(trace, room=640, block_tokens=512).found(host) * 512 > 0


def test_a_sample_of_blocks_says_nearly_the_same() -> None:
    trace = list(shipped("synthetic"))

    exact = curve_of(trace, room=10_000, block_tokens=512)
    sampled = curve_of(trace, room=10_000, block_tokens=512, kept=20_000)

    touches = sum(len(request.keys) for request in trace)
    assert (exact.one_of, sampled.one_of) == (1, 4)
    for room in (640, 2048, 8192, 100_000):
        assert abs(exact.found(room) - sampled.found(room)) < 0.01 * touches
    assert abs(exact.most_found() - sampled.most_found()) < 0.01 * touches
