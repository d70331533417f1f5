"""What the cache costs an engine per request: keys, match, allocate, publish, release, evict.

Each round opens a fresh cache with room for exactly one prompt, computes a prompt that is not
cached, requests it again, and then computes another one that has to evict the first. With a peer,
vLLM's cache manager does the same work on the same tokens, round by round in turn. No KV is copied:
this measures metadata alone, as in the peer.

`run_policies` does the same work with every eviction policy. `run_growth` shows that the cost does
not depend on the number of cached blocks: the same prompt of a thousand blocks is a hit, and then a
miss that evicts, beside ten thousand and beside a million blocks. Time may grow with the misses of
the processor's caches; the number of calls, which is counted, must not grow at all.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

import penstock
from lab.bench.measure import collector_paused, interleave, summarize, timed, times_faster
from lab.bench.prompts import draw_tokens, other_seed
from penstock.cache.eviction import POLICIES
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.machine.effects import Granted, answer
from penstock.machine.events import Acquire, Commit, Event, ReleaseLease
from penstock.machine.machine import CacheMachine
from penstock.vocabulary.keys import KeyChain, Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from lab.bench.measure import Summary
    from lab.bench.report import BenchReport
    from penstock.vocabulary.keys import Tokens

TOKEN_COUNTS = (8_192, 32_768, 131_072)
BLOCK_SIZES = (16, 64)
Source = Literal["list", "buffer"]
SOURCES: tuple[Source, ...] = ("list", "buffer")
ROUNDS = 15
POLICY_TOKENS = (8_192, 131_072)
POLICY_METRICS = (
    "miss_acquire_ns",
    "miss_commit_ns",
    "miss_release_ns",
    "hit_acquire_ns",
    "hit_release_ns",
    "evict_acquire_ns",
    "evict_commit_ns",
)
POLICY_RATIO_MAX = 1.3
"""What a policy may take of the time that LRU takes."""

_NAMESPACE = Namespace(model="bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """One round of Penstock, in nanoseconds."""

    keys_ns: int
    miss_acquire_ns: int
    miss_commit_ns: int
    miss_release_ns: int
    hit_acquire_ns: int
    hit_release_ns: int
    hit_whole_ns: int
    """Through the public interface: keys, acquire and release in one."""
    evict_acquire_ns: int
    evict_commit_ns: int


class IndexPeer(Protocol):
    """Another cache that does the same work on the same tokens."""

    @property
    def vllm_version(self) -> str: ...

    @property
    def hash_name(self) -> str: ...

    def round(
        self, *, tokens: int, block: int, seed: int, source: Source = "list"
    ) -> PeerTimings: ...


class PeerTimings(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="timings"):
    """What one round took vLLM, in nanoseconds.

    A miss and a full hit each go through `get_computed_blocks` (match), `allocate_slots`
    (allocate, which also publishes full blocks) and `free`. Evict is a miss in a pool where
    every block is cached, so that each block it takes is evicted first.
    """

    tokens_crc32: int
    """Of the prompt as little-endian int32: both sides worked on the same tokens."""
    convert_ns: int
    """Turning a buffer into the list that vLLM wants; 0 from a list. Not part of `keys_ns`."""
    keys_ns: int
    """Constructing the request, which hashes all its full blocks."""
    miss_match_ns: int
    miss_allocate_ns: int
    miss_free_ns: int
    hit_match_ns: int
    hit_allocate_ns: int
    hit_free_ns: int
    evict_match_ns: int
    evict_allocate_ns: int
    evict_free_ns: int


def run_index(report: BenchReport, peer: IndexPeer | None, *, rounds: int = ROUNDS) -> None:
    """Measures all sizes and adds rows and ratios to the report."""
    for block in BLOCK_SIZES:
        for tokens in TOKEN_COUNTS:
            for source in SOURCES:
                _measure(report, peer, tokens=tokens, block=block, source=source, rounds=rounds)


def _measure(
    report: BenchReport,
    peer: IndexPeer | None,
    *,
    tokens: int,
    block: int,
    source: Source,
    rounds: int,
) -> None:
    seed = 1

    def ours() -> Timings:
        return run_round(tokens=tokens, block=block, source=source, seed=seed)

    sides: dict[str, Callable[[], Timings | PeerTimings]] = {"penstock": ours}
    if peer is not None:

        def theirs() -> PeerTimings:
            return peer.round(tokens=tokens, block=block, seed=seed, source=source)

        sides["vllm"] = theirs
    # One round to warm both up, which is not counted.
    results = interleave(sides, rounds + 1)
    params: dict[str, str | int | float | bool] = {
        "tokens": tokens,
        "block_tokens": block,
        "source": source,
        "hash": "sha256",
    }
    for side, samples in results.items():
        for metric in _metrics_of(samples[0]):
            values = [getattr(sample, metric) / 1e9 for sample in samples[1:]]
            report.add_row(
                bench="index",
                side=side,
                params=params,
                metric=metric.removesuffix("_ns"),
                unit="s",
                summary=summarize(values),
            )
    if peer is not None and tokens == TOKEN_COUNTS[-1] and block == BLOCK_SIZES[0]:
        _compare(report, source, results["penstock"][1:], results["vllm"][1:])


def run_policies(report: BenchReport, *, rounds: int = ROUNDS) -> None:
    """Measures the same work with every eviction policy, and compares each with LRU."""
    for tokens in POLICY_TOKENS:

        def serve(eviction: str, tokens: int = tokens) -> Timings:
            return run_round(
                tokens=tokens, block=BLOCK_TOKENS, source="buffer", seed=1, eviction=eviction
            )

        sides = {name: partial(serve, name) for name in POLICIES}
        results = interleave(sides, rounds + 1)
        for name, samples in results.items():
            for metric in POLICY_METRICS:
                times = [getattr(sample, metric) / 1e9 for sample in samples[1:]]
                report.add_row(
                    bench="policies",
                    side="penstock",
                    params={"tokens": tokens, "block_tokens": BLOCK_TOKENS, "eviction": name},
                    metric=metric.removesuffix("_ns"),
                    unit="s",
                    summary=summarize(times),
                )
                if name != "lru":
                    plain = [getattr(sample, metric) / 1e9 for sample in results["lru"][1:]]
                    report.add_ratio(
                        f"{metric.removesuffix('_ns')}, {tokens} tokens: {name} against lru",
                        times_faster(plain, times),
                        at_most=POLICY_RATIO_MAX,
                    )


def run_round(*, tokens: int, block: int, source: str, seed: int, eviction: str = "lru") -> Timings:
    """One prompt as a miss, as a hit, and evicted by another one."""
    prompt = _source(source, seed, tokens)
    keys_ns, chain = timed(lambda: _chain(prompt, block))
    device = TierSettings(name="device", slot_count=tokens // block, eviction=eviction)
    machine = CacheMachine(CacheSettings(device=device, block_tokens=block), incarnation=seed)
    miss = _serve(machine, chain.keys, tokens)
    # New key objects, as a second request brings them: equal bytes, another identity.
    again = _chain(prompt, block).keys
    acquire = Acquire(request="hit", keys=again, token_count=tokens)
    hit_acquire_ns, granted = timed(lambda: _grant(machine, acquire))
    _require(granted.cached_tokens == tokens - block, "the second request is a full hit")
    hit_release_ns, _ = timed(lambda: machine.handle(ReleaseLease(lease=granted.lease), 0.0))
    other = _chain(_source(source, other_seed(seed, 0), tokens), block).keys
    evict = _serve(machine, other, tokens)
    _require(not machine.statistics().tiers[0].free, "the pool is full")
    return Timings(
        keys_ns=keys_ns,
        miss_acquire_ns=miss[0],
        miss_commit_ns=miss[1],
        miss_release_ns=miss[2],
        hit_acquire_ns=hit_acquire_ns,
        hit_release_ns=hit_release_ns,
        hit_whole_ns=_whole(prompt, tokens=tokens, block=block),
        evict_acquire_ns=evict[0],
        evict_commit_ns=evict[1],
    )


def _serve(machine: CacheMachine, keys: Sequence[bytes], tokens: int) -> tuple[int, int, int]:
    acquire = Acquire(request="miss", keys=keys, token_count=tokens)
    acquire_ns, granted = timed(lambda: _grant(machine, acquire))
    _require(granted.cached_tokens == 0, "the first request is a miss")
    commit = Commit(lease=granted.lease, token_count=tokens, keys=keys)
    commit_ns, _ = timed(lambda: machine.handle(commit, 0.0))
    release_ns, _ = timed(lambda: machine.handle(ReleaseLease(lease=granted.lease), 0.0))
    return acquire_ns, commit_ns, release_ns


def _whole(prompt: Tokens, *, tokens: int, block: int) -> int:
    """A hit through `penstock.open`, as an engine sees it: keys included."""
    config = penstock.parse_config(
        f'version = 1\n[model]\nname = "bench"\n[cache]\nblock_tokens = {block}\n'
        f"blocks = {tokens // block}\n"
    )
    cache = penstock.open(config, kv=np.zeros((tokens // block, 1), dtype=np.uint8))
    with cache.acquire(prompt) as lease:
        lease.commit_prompt(tokens)

    def serve() -> int:
        lease = cache.acquire(prompt)
        lease.release()
        return lease.cached_tokens

    whole_ns, cached = timed(serve)
    _require(cached == tokens - block, "the second request is a full hit")
    return whole_ns


def _compare(
    report: BenchReport, source: str, ours: Sequence[object], theirs: Sequence[object]
) -> None:
    def times(name: str, our: Sequence[str], their: Sequence[str], target: float) -> None:
        value = times_faster(_sums(ours, our), _sums(theirs, their))
        report.add_ratio(f"{name}, {source}", value, at_least=target)

    hit = ("hit_match_ns", "hit_allocate_ns", "hit_free_ns")
    times("hit: acquire + release", ("hit_acquire_ns", "hit_release_ns"), hit, 5.0)
    with_keys = 4.0 if source == "buffer" else 2.5
    times("hit with keys: penstock.open", ("hit_whole_ns",), ("keys_ns", *hit), with_keys)
    cold = ("miss_allocate_ns",)
    times("miss: acquire + commit", ("miss_acquire_ns", "miss_commit_ns"), cold, 2.0)
    evict = ("evict_acquire_ns", "evict_commit_ns")
    times("miss that evicts: acquire + commit", evict, ("evict_allocate_ns",), 1.0)


def _sums(samples: Sequence[object], metrics: Sequence[str]) -> list[float]:
    return [float(sum(getattr(sample, metric) for metric in metrics)) for sample in samples]


def _metrics_of(sample: object) -> list[str]:
    fields = getattr(sample, "__struct_fields__", None) or sample.__slots__  # type: ignore[attr-defined]
    return [name for name in fields if name.endswith("_ns")]


def _source(source: str, seed: int, count: int) -> Tokens:
    drawn = draw_tokens(seed, count)
    return drawn.tolist() if source == "list" else drawn


def _chain(tokens: Tokens, block: int) -> KeyChain:
    chain = KeyChain(_NAMESPACE, block_tokens=block)
    chain.extend(tokens)
    return chain


def _grant(machine: CacheMachine, event: Event) -> Granted:
    return answer(machine.handle(event, 0.0), Granted)


def _require(condition: bool, sentence: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise AssertionError(f"the benchmark measures something else: not true that {sentence}")


SIZES = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS = 1_000
BLOCK_TOKENS = 16
SAMPLES = 15
_UNTIL_HISTORIES_ARE_FULL = 600

Server = Callable[[], Callable[[], None]]
"""Prepares a piece of work, which is then measured."""


def run_growth(report: BenchReport) -> None:
    """Measures cost and calls per block at every size, and memory per cached block."""
    worlds = {size: _World(size) for size in SIZES}
    for kind in ("hit", "evict"):
        _grow(report, kind, {size: world.server(kind) for size, world in worlds.items()})
    memory = _bytes_per_block(SIZES[-1])
    _add_row(report, SIZES[-1], "memory per cached block", "B", summarize([memory]))
    report.add_ratio("memory per cached block, bytes", memory, at_most=400.0)


def _grow(report: BenchReport, kind: str, servers: dict[int, Server]) -> None:
    """Measures one kind of work at all sizes in turn, so that a busy machine slows all."""
    # Histories are bounded: until they are full of the same, forgetting costs less.
    for serve in servers.values():
        for _ in range(_UNTIL_HISTORIES_ARE_FULL):
            serve()()
    costs: dict[int, list[float]] = {size: [] for size in servers}
    for _ in range(SAMPLES):
        for size, serve in servers.items():
            work = serve()
            with collector_paused():
                spent_ns, _ = timed(work)
            costs[size].append(spent_ns / 1e9 / PROMPT_BLOCKS)
    calls = {
        size: summarize([_count_calls(serve()) for _ in range(3)])
        for size, serve in servers.items()
    }
    for size in servers:
        _add_row(report, size, f"{kind} per block", "s", summarize(costs[size]))
        _add_row(report, size, f"{kind} calls", "calls", calls[size])
    small, large = SIZES[0], SIZES[-1]
    growth = times_faster(costs[small], costs[large])
    report.add_ratio(f"{kind}: time per block, 1M against 10k", growth, at_most=4.0)
    more = calls[large].median / calls[small].median
    report.add_ratio(f"{kind}: calls, 1M against 10k", more, at_most=1.0)


def _add_row(report: BenchReport, size: int, metric: str, unit: str, summary: Summary) -> None:
    report.add_row(
        bench="growth",
        side="penstock",
        params={"cached_blocks": size, "block_tokens": BLOCK_TOKENS},
        metric=metric,
        unit=unit,
        summary=summary,
    )


class _World:
    """A full cache of many prompts."""

    def __init__(self, size: int) -> None:
        settings = TierSettings(name="device", slot_count=size)
        self._machine = CacheMachine(
            CacheSettings(device=settings, block_tokens=BLOCK_TOKENS), incarnation=size
        )
        self._draw = np.random.default_rng(size)
        self._prompts = [self._new_prompt() for _ in range(size // PROMPT_BLOCKS)]
        for prompt in self._prompts:
            self._serve(prompt)
        self._next = 0

    def forget_prompts(self) -> None:
        """Leaves the keys to the cache alone."""
        self._prompts.clear()

    def server(self, kind: str) -> Server:
        """What makes work of a kind."""
        return self.serve_hit if kind == "hit" else self.serve_miss

    def serve_hit(self) -> Callable[[], None]:
        """The work of finding a prompt that was not used for long, and giving it back."""
        prompt = list(map(bytes, self._prompts[self._next]))
        self._next = (self._next + 1) % len(self._prompts)
        return lambda: self._serve(prompt)

    def serve_miss(self) -> Callable[[], None]:
        """The work of computing a new prompt where the oldest has to go."""
        prompt = self._new_prompt()
        return lambda: self._serve(prompt)

    def _new_prompt(self) -> list[bytes]:
        drawn = self._draw.bytes(16 * PROMPT_BLOCKS)
        return [drawn[at : at + 16] for at in range(0, len(drawn), 16)]

    def _serve(self, keys: list[bytes]) -> None:
        machine = self._machine
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        event = Acquire(request="bench", keys=keys, token_count=tokens)
        granted = answer(machine.handle(event, 0.0), Granted)
        found = granted.cached_tokens // BLOCK_TOKENS
        commit = Commit(lease=granted.lease, token_count=tokens, keys=keys[found:])
        machine.handle(commit, 0.0)
        machine.handle(ReleaseLease(lease=granted.lease), 0.0)


def _count_calls(work: Callable[[], None]) -> int:
    """How many calls the work makes, of Python and of C functions."""
    count = 0

    def observe(_frame: FrameType, kind: str, _argument: Any) -> None:  # noqa: ANN401
        nonlocal count
        count += kind in ("call", "c_call")

    with collector_paused():
        sys.setprofile(observe)
        work()
        sys.setprofile(None)
    return count


def _bytes_per_block(size: int) -> float:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        world = _World(size)
        world.forget_prompts()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / size
