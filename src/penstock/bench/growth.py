"""No term in n: what a block costs when ten thousand are cached, and when a million are.

The work is the same prompt of a thousand blocks each time, as a hit and as a miss that
evicts; only the number of blocks beside it grows. Time may grow with the misses of the
processor's caches; the number of calls made, which is counted, may not grow at all.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.bench.measure import collector_paused, summarize, timed, times_faster
from penstock.cache.settings import CacheSettings, TierSettings
from penstock.machine.effects import Granted, answer
from penstock.machine.events import Acquire, Commit, ReleaseLease
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from types import FrameType

    from penstock.bench.measure import Summary
    from penstock.bench.report import BenchReport

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
