"""What a host tier costs the thread of an engine that runs on the CPU, per step.

A small engine with a managed cache computes in every step: one token for each running request,
or a whole prompt, by matrix products in its own thread (`einsum` keeps NumPy from sharing them
with BLAS threads). The same requests run with the tier and without it, in turn.

| requests      | what happens                                                              |
|---------------|---------------------------------------------------------------------------|
| `nothing`     | every prompt is new: whatever the tier does is cost                        |
| `prefixes`    | prompts come back after the device has forgotten them: the tier saves work |

A model computes some thousand operations for each byte of KV it makes (a 135M model 6,000, an 8B
model 120,000). Here it is 860 for blocks of 8 KiB and 110 for blocks of 64 KiB, so the copies weigh
more than they would in an engine.

The clock is `time.thread_time`, so neither other processes nor waiting count.

The one rule: with and without the tier the engine computes by the same code; a token that is
not in the cache is computed.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

import penstock
from lab.bench.measure import interleave, summarize
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from lab.bench.report import BenchReport, Param

Reused = Literal["nothing", "prefixes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """The engine, its cache, and its requests."""

    block_tokens: int = 16
    device_blocks: int = 160
    host_blocks: int = 1024
    token_bytes: int = 512
    """KV of a token: a block of 16 has 8 KiB."""
    running: int = 8
    prompt_tokens: int = 160
    answer_tokens: int = 24
    prompts: int = 24
    """Where prefixes are reused, so many prompts take turns: more than the device holds."""
    requests: int = 72
    width: int = 192
    layers: int = 6

    def config(self, *, tier: bool) -> penstock.Config:
        """The cache's settings, with a host tier below the device or without."""
        tiers = f'[[tiers]]\nname = "host"\nkind = "host"\nblocks = {self.host_blocks}\n'
        return penstock.parse_config(
            f'version = 1\n[model]\nname = "bench"\n[cache]\nblock_tokens = {self.block_tokens}\n'
            f"blocks = {self.device_blocks}\n{tiers if tier else ''}"
        )

    def prompt(self, number: int, reused: Reused) -> NDArray[np.uint32]:
        """The prompt of a request."""
        drawn = np.random.default_rng(number % self.prompts if reused == "prefixes" else number)
        return drawn.integers(0, 32_000, self.prompt_tokens, dtype=np.uint32)


SHAPES = (EngineShape(), EngineShape(token_bytes=4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What one run took."""

    thread_s: float
    steps: int
    cached_tokens: int

    @property
    def step_ns(self) -> float:
        """Of the engine's thread, per step."""
        return self.thread_s / self.steps * 1e9


class SmallEngine:
    """Continuous batching on a managed cache, with matrix products for a model."""

    def __init__(self, shape: EngineShape, *, tier: bool) -> None:
        self._shape = shape
        self._kv = np.zeros(
            (shape.device_blocks, shape.block_tokens, shape.token_bytes), dtype=np.uint8
        )
        self.cache = penstock.open(shape.config(tier=tier), kv=self._kv)
        drawn = np.random.default_rng(0)
        size = (shape.width, shape.width)
        self._weights = [drawn.standard_normal(size, dtype=np.float32) for _ in range(shape.layers)]
        self._waiting: deque[NDArray[np.uint32]] = deque()
        self._running: list[_Running] = []

    def run(self, reused: Reused) -> EngineRun:
        """Serves all requests, and waits for the copies they caused."""
        shape = self._shape
        self._waiting.extend(shape.prompt(number, reused) for number in range(shape.requests))
        cached_tokens = steps = 0
        steps_max = shape.requests * (shape.answer_tokens + 100)
        began = time.thread_time()
        while self._waiting or self._running or self.cache.busy:
            cached_tokens += self._step()
            steps += 1
            if steps > steps_max:
                raise InvariantViolation(f"bench: requests still wait after {steps} steps")
        return EngineRun(
            thread_s=time.thread_time() - began, steps=steps, cached_tokens=cached_tokens
        )

    def _step(self) -> int:
        """One iteration; returns the prompt tokens it found cached."""
        while self._waiting and len(self._running) < self._shape.running:
            lease = self.cache.acquire(self._waiting.popleft())
            self._running.append(_Running(lease, self._shape.prompt_tokens))
        cached_tokens = 0
        for each in list(self._running):
            if each.lease.state is not penstock.LeaseState.READY:
                continue
            if each.lease.token_count < each.prompt_tokens:
                cached_tokens += each.lease.cached_tokens
                self._compute(each.lease, each.prompt_tokens - each.lease.token_count)
                each.lease.commit_prompt(each.prompt_tokens)
            else:
                each.lease.grow(each.lease.token_count + 1)
                self._compute(each.lease, 1)
                each.lease.commit([1])
                each.answered += 1
            if each.answered == self._shape.answer_tokens:
                each.lease.release()
                self._running.remove(each)
        self.cache.step()
        return cached_tokens

    def _compute(self, lease: penstock.Lease, count: int) -> None:
        """The work of a model on `count` tokens, and their KV into the lease's blocks."""
        states = np.ones((count, self._shape.width), dtype=np.float32)
        for weights in self._weights:
            states = np.tanh(np.einsum("ti,ij->tj", states, weights))
        positions = np.arange(lease.token_count, lease.token_count + count)
        blocks, offsets = np.divmod(positions, self._shape.block_tokens)
        self._kv[lease.block_table[blocks], offsets] = states[:, :1].view(np.uint8)[:, :1]


class _Running:
    """A request on its way."""

    __slots__ = ("answered", "lease", "prompt_tokens")

    def __init__(self, lease: penstock.Lease, prompt_tokens: int) -> None:
        self.lease = lease
        self.prompt_tokens = prompt_tokens
        self.answered = 0


def run_engine_time(
    report: BenchReport, *, rounds: int, shapes: Sequence[EngineShape] = SHAPES
) -> None:
    """Measures both kinds of requests, with the tier and without it."""
    kinds: tuple[Reused, ...] = ("nothing", "prefixes")
    for shape in shapes:
        for reused in kinds:
            _measure(report, shape, reused, rounds)


def _measure(report: BenchReport, shape: EngineShape, reused: Reused, rounds: int) -> None:
    params: dict[str, Param] = {
        "reused": reused,
        "requests": shape.requests,
        "prompt_tokens": shape.prompt_tokens,
        "block_bytes": shape.block_tokens * shape.token_bytes,
    }
    sides: dict[str, Callable[[], EngineRun]] = {
        "host tier off": partial(_run_once, shape, reused, tier=False),
        "host tier on": partial(_run_once, shape, reused, tier=True),
    }
    # One round to warm both up, which is not counted.
    found = {side: runs[1:] for side, runs in interleave(sides, rounds + 1).items()}
    for side, runs in found.items():
        _add(report, side, params, "engine thread, per step", [run.step_ns for run in runs])
        served = [run.thread_s / shape.requests * 1e9 for run in runs]
        _add(report, side, params, "engine thread, per request", served)
    pairs = list(zip(found["host tier on"], found["host tier off"], strict=True))
    for metric, ratios in (
        ("per step, of that without", [on.step_ns / off.step_ns for on, off in pairs]),
        ("per request, of that without", [on.thread_s / off.thread_s for on, off in pairs]),
    ):
        _add(report, "host tier on", params, metric, ratios, unit="of 1")


def _run_once(shape: EngineShape, reused: Reused, *, tier: bool) -> EngineRun:
    return SmallEngine(shape, tier=tier).run(reused)


def _add(
    report: BenchReport,
    side: str,
    params: dict[str, Param],
    metric: str,
    samples: list[float],
    unit: str = "ns",
) -> None:
    report.add_row(
        bench="engine thread",
        side=side,
        params=params,
        metric=metric,
        unit=unit,
        summary=summarize(samples),
    )
