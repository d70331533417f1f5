"""A replay's books are those of a naive model, and the bound is never beaten."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.config import parse_config
from penstock.errors import ConfigError, UnavailableError
from penstock.replay.simulation import ROWS_IN_MEMORY, BestPossible, Replay, Speeds, sized_cache
from penstock.replay.trace import PerfectHints, TraceReader, TraceRequest

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 4


class Chain(NamedTuple):
    """A prompt as the leading blocks of one of a few conversations."""

    branch: int
    blocks: int
    rest: int


def request_of(chain: Chain, at_s: float) -> TraceRequest:
    # All conversations share their first two blocks.
    keys = [f"{depth}" if depth < 2 else f"{chain.branch}.{depth}" for depth in range(chain.blocks)]
    tokens = chain.blocks * BLOCK + chain.rest
    return TraceRequest(at_s, [key.encode() for key in keys], tokens, output_tokens=3)


chains = st.builds(
    Chain, branch=st.integers(0, 4), blocks=st.integers(1, 7), rest=st.integers(0, BLOCK - 1)
)
traces = st.lists(chains, min_size=1, max_size=40).map(
    lambda found: [request_of(chain, float(at)) for at, chain in enumerate(found)]
)


def cache_of(slots: int, *lower: TierSettings, eviction: str = "lru") -> CacheSettings:
    device = TierSettings(name="device", slot_count=slots, eviction=eviction)
    return CacheSettings(device=device, tiers=lower, block_tokens=BLOCK, block_bytes=1000)


def found_by_naive_lru(trace: list[TraceRequest], slots: int) -> tuple[int, int]:
    """Blocks found and requests refused, by a model of a few lines."""
    used: dict[bytes, tuple[int, int]] = {}
    found = refused = 0
    for number, request in enumerate(trace):
        needed = -(-request.token_count // BLOCK)
        if needed > slots:
            refused += 1
            continue
        useful = request.keys[: (request.token_count - 1) // BLOCK]
        hits = next((at for at, key in enumerate(useful) if key not in used), len(useful))
        held = set(request.keys[:hits])
        while slots - len(used) < needed - hits:
            # The oldest goes first, and of one prompt the deepest.
            del used[min(used.keys() - held, key=lambda key: (used[key][0], -used[key][1]))]
        found += hits
        used |= {key: (number, depth) for depth, key in enumerate(request.keys)}
    return found, refused


@given(traces, st.integers(1, 14))
@settings(max_examples=60, deadline=None)
def test_a_replay_without_rates_finds_what_a_naive_lru_finds(
    trace: list[TraceRequest], slots: int
) -> None:
    replay = Replay(cache_of(slots))

    replay.run(trace)

    found, refused = found_by_naive_lru(trace, slots)
    assert sum(replay.tally.tokens_by_tier) == found * BLOCK
    assert replay.tally.refused == refused
    assert replay.tally.requests + refused == len(trace)
    replay.machine.audit()


def test_a_block_that_is_computed_though_it_lies_below_was_used_there() -> None:
    # The last block of a prompt without a rest is computed: the host tier has it already.
    chains = [Chain(0, 4, 0), Chain(2, 3, 0), Chain(0, 4, 0), Chain(1, 5, 0), Chain(0, 4, 1)]
    replay = Replay(cache_of(5, TierSettings(name="host", slot_count=7)))

    replay.run(request_of(chain, float(at)) for at, chain in enumerate(chains))

    # Before the last request, the block of the second one leaves, and not that one.
    assert replay.tally.tokens_by_tier == [36, 8]


def best_of(trace: list[TraceRequest], rows_in_memory: int = ROWS_IN_MEMORY) -> BestPossible:
    best = BestPossible(rows_in_memory=rows_in_memory)
    for request in trace:
        best.add(request.keys, (request.token_count - 1) // BLOCK)
    return best


def found_by_naive_belady(trace: list[TraceRequest], slots: int) -> int:
    """Keeps, after every request, the blocks that are needed next."""

    def next_use(key: bytes, after: int) -> float:
        for number, request in enumerate(trace[after + 1 :], start=after + 1):
            if key in request.keys[: (request.token_count - 1) // BLOCK]:
                return number
        return float("inf")

    kept: set[bytes] = set()
    found = 0
    for number, request in enumerate(trace):
        useful = request.keys[: (request.token_count - 1) // BLOCK]
        found += next((at for at, key in enumerate(useful) if key not in kept), len(useful))
        pool = sorted(
            kept | set(request.keys),
            key=lambda key: (next_use(key, number), int(key.split(b".")[-1])),
        )
        kept = {key for key in pool[:slots] if next_use(key, number) < len(trace)}
    return found


@given(traces, st.integers(0, 14))
@settings(max_examples=50, deadline=None)
def test_the_bound_is_what_a_naive_belady_finds(trace: list[TraceRequest], slots: int) -> None:
    assert best_of(trace).found(slots) == found_by_naive_belady(trace, slots)


@given(traces, st.integers(0, 14), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_the_bound_is_the_same_when_it_is_found_in_parts_of_a_file(
    trace: list[TraceRequest], slots: int, rows: int
) -> None:
    assert best_of(trace, rows_in_memory=rows).found(slots) == best_of(trace).found(slots)


def test_a_bound_without_room_for_its_file_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    with pytest.raises(UnavailableError, match=r"missing: No such file.*--no-best"):
        best_of([request_of(Chain(0, 4, 1), 0.0)], rows_in_memory=1)


@given(
    traces,
    st.integers(7, 14),
    st.integers(1, 14),
    st.sampled_from(["lru", "adaptive"]),
    st.sampled_from([Speeds(), Speeds(prefill_tokens_per_s=10, tier_bytes_per_s={"host": 900})]),
)
@settings(max_examples=50, deadline=None)
def test_no_policy_and_no_timing_beats_the_bound(
    trace: list[TraceRequest], slots: int, below: int, eviction: str, speeds: Speeds
) -> None:
    lower = TierSettings(name="host", slot_count=below, eviction=eviction)
    replay = Replay(cache_of(slots, lower, eviction=eviction), speeds)

    replay.run(trace)

    assert sum(replay.tally.tokens_by_tier) <= best_of(trace).found(slots + below) * BLOCK
    assert replay.tally.requests + replay.tally.refused == len(trace)
    assert not replay.machine.statistics().leases
    replay.machine.audit()


@given(traces, st.sampled_from([0.5, 20.0]), st.floats(0.1, 1000), st.floats(0.1, 1000))
@settings(max_examples=40, deadline=None)
def test_all_requests_end_and_all_room_comes_back_whatever_the_rates(
    trace: list[TraceRequest], decode: float, prefill: float, copies: float
) -> None:
    write = WritePolicy(kind=WriteKind.WRITE_BACK)
    settings = CacheSettings(
        device=TierSettings(name="device", slot_count=9, low_watermark=0.3, high_watermark=0.5),
        tiers=(TierSettings(name="host", slot_count=12, write=write),),
        block_tokens=BLOCK,
        block_bytes=1000,
    )
    speeds = Speeds(
        prefill_tokens_per_s=prefill,
        output_tokens_per_s=decode,
        tier_bytes_per_s={"host": copies * 1000},
    )
    replay = Replay(settings, speeds)

    replay.run(trace)

    ended = replay.machine.statistics()
    assert (ended.leases, ended.operations_running, ended.operations_ending) == (0, 0, 0)
    assert replay.tally.requests == len(replay.tally.first_token_s) + replay.tally.lost
    replay.machine.audit()


def test_the_shipped_conversation_is_found_as_a_plain_lru_finds_it() -> None:
    config = parse_config('version = 1\nmodel.name = "m"\ncache.block_tokens = 512\n'
                          "cache.blocks = 1000\n")  # fmt: skip
    requests = list(TraceReader(config).read("conversation"))[:2000]
    replay = Replay(sized_cache(config))

    replay.run(requests)

    assert sum(replay.tally.tokens_by_tier) == 512 * plain_lru(requests, 1000)


def plain_lru(requests: list[TraceRequest], slots: int) -> int:
    """An ordered dict, youngest last; what is put in deepest first leaves deepest first."""
    used: dict[bytes, None] = {}
    found = 0
    for request in requests:
        useful = request.keys[: (request.token_count - 1) // 512]
        hits = next((at for at, key in enumerate(useful) if key not in used), len(useful))
        found += hits
        for key in request.keys[hits - 1 :: -1] if hits else ():
            del used[key]
        excess = len(used) + -(-request.token_count // 512) - slots
        for key in list(used)[: max(0, excess)]:
            del used[key]
        # A block that lay there as its prompt's last one, and was of no use, is computed again.
        for key in request.keys[::-1]:
            used.pop(key, None)
            used[key] = None
    return found


@pytest.mark.parametrize("eviction", ["adaptive", "lru"])
def test_perfect_hints_let_one_conversation_stay_among_many_that_end(eviction: str) -> None:
    stays = Chain(branch=0, blocks=4, rest=1)
    chains = [stays]
    for branch in range(1, 12, 2):
        # Each with as many blocks as there is room for beside those of the one that stays.
        chains += [Chain(branch=each, blocks=6, rest=1) for each in (branch, branch + 1)]
        chains.append(stays)
    trace = [request_of(chain, float(at)) for at, chain in enumerate(chains)]
    hinted = list(PerfectHints(trace, BLOCK).written_into(trace))

    plain, told = Replay(cache_of(9)), Replay(cache_of(9, eviction=eviction))
    plain.run(trace)
    told.run(hinted)

    best = best_of(trace).found(9) * BLOCK
    assert sum(told.tally.tokens_by_tier) == best > sum(plain.tally.tokens_by_tier)


@pytest.mark.long
@pytest.mark.parametrize("eviction", ["adaptive", "lru"])
def test_perfect_hints_bring_most_of_what_is_possible_on_the_shipped_conversation(
    eviction: str,
) -> None:
    config = parse_config('version = 1\nmodel.name = "m"\ncache.block_tokens = 512\n'
                          "cache.blocks = 3000\n")  # fmt: skip
    requests = list(TraceReader(config).read("conversation"))
    cache = sized_cache(config)
    assert cache.device is not None
    plain = Replay(cache)
    told = Replay(replace(cache, device=replace(cache.device, eviction=eviction)))

    plain.run(requests)
    told.run(PerfectHints(requests, 512).written_into(requests))

    bound = BestPossible()
    for request in requests:
        bound.add(request.keys, (request.token_count - 1) // 512)
    found = sum(plain.tally.tokens_by_tier)
    gap = bound.found(3000) * 512 - found
    assert (sum(told.tally.tokens_by_tier) - found) / gap >= 0.6


def test_a_first_token_waits_for_those_before_it_and_for_its_load() -> None:
    host = TierSettings(name="host", slot_count=100)
    first, other = request_of(Chain(0, 4, 1), 0.0), request_of(Chain(1, 5, 1), 0.0)
    again = request_of(Chain(0, 4, 1), 1000.0)
    speeds = Speeds(prefill_tokens_per_s=1.0, tier_bytes_per_s={"host": 500.0})
    replay = Replay(
        CacheSettings(
            device=TierSettings(name="device", slot_count=6),
            tiers=(host,),
            block_tokens=BLOCK,
            block_bytes=1000,
            load_tokens_min=1,
        ),
        speeds,
    )

    replay.run([first, other, again])

    # 17 tokens are computed. The second prompt gets room when the first has been saved, 8 s later,
    # finds two blocks and computes 13 tokens. The third loads two blocks in 4 s.
    assert list(replay.tally.first_token_s) == [17.0, 17.0 + 8.0 + 13.0, 4.0 + 1.0]
    assert replay.tally.tokens_by_tier == [16, 8]
    assert replay.links[1, 0].blocks == 2
    assert replay.links[1, 0].busy_s == 4.0


def test_loads_that_take_longer_than_computing_are_not_made() -> None:
    host = TierSettings(name="host", slot_count=100)
    prompts = [request_of(Chain(at % 2, 7, 1), at * 20.0) for at in range(40)]
    slow = Speeds(prefill_tokens_per_s=1000.0, tier_bytes_per_s={"host": 1000.0})
    replay = Replay(cache_of(8, host), slow)

    replay.run(prompts)

    assert replay.tally.misses["recompute is quicker"][0] > 20
    assert replay.machine.statistics().tokens_computed_instead


CONFIG = 'version = 1\nmodel.name = "m"\ncache.block_tokens = 16\n'


def test_a_tier_in_gib_has_the_blocks_that_fit() -> None:
    config = parse_config(
        CONFIG + "cache.blocks = 4\ncache.ranks = 2\n"
        'tiers = [{ name = "host", kind = "host", gib = 1 },'
        ' { name = "disk", kind = "disk", path = "/d", gib = 1 }]'
    )

    cache = sized_cache(config, token_bytes=1 << 16)

    # A disk keeps the parts of both ranks.
    assert [tier.slot_count for tier in cache.tiers] == [1024, 512]
    assert cache.block_bytes == 1 << 20


def test_a_tier_in_gib_without_the_bytes_of_a_token_is_refused() -> None:
    config = parse_config(
        CONFIG + 'cache.blocks = 4\ntiers = [{ name = "host", kind = "host", gib = 1 }]'
    )

    with pytest.raises(ConfigError, match=r"tiers\[0\].gib: is 1, must come with --kv-bytes"):
        sized_cache(config)


def test_device_blocks_are_asked_for_where_the_engine_has_them() -> None:
    config = parse_config(CONFIG + 'tiers = [{ name = "host", kind = "memory", blocks = 4 }]')

    with pytest.raises(ConfigError, match=r"cache.blocks: is 0, must be given, or --device-blocks"):
        sized_cache(config)
    assert Replay(sized_cache(config, device_blocks=7)).machine.tier_sizes() == {
        "device": 7,
        "host": 4,
    }


def test_a_rate_of_a_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--bandwidth: names 'disk', must be one of none"):
        Replay(cache_of(4), Speeds(tier_bytes_per_s={"disk": 1.0}))
