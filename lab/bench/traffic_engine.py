"""The engines of `lab bench traffic`: one set of device blocks, and a cache at a time.

Kernels are compiled and graphs are captured once, and the memory of the host tier is made once, so
that a benchmark of minutes can compare many caches.

The one rule: a cache is emptied and then filled with a workload's history before each run, so that
no run finds what another one has left.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

import penstock
from lab.bench.prompts import draw_tokens
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError, UnavailableError
from penstock_serve.engine.engine import Engine, LocalWorkers
from penstock_serve.engine.handoffs import Handoffs
from penstock_serve.engine.requests import Request
from penstock_serve.engine.scheduler import Scheduler, SchedulerSettings
from penstock_serve.engine.worker import Worker, allocate_kv, kv_tier, lane_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from lab.bench.engine_model import Model
    from penstock.runtime.cache import Lease
    from penstock_serve.engine.requests import Answer
    from penstock_serve.engine.steps import StepResult

PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One cache."""

    name: str
    host: bool = True
    eviction: str = "lru"
    write: str = "write_through"
    load_gate: str = "measured"
    loads_ahead: bool = True
    """Whether loads begin before there is room in a step."""
    layer_wise: str = "off"
    """Whether loads fill one layer after another, so that a step can join them."""
    infinite: bool = False
    """Every prefix that came before is there, without any copy."""


class InfinitePrefixes(Handoffs):
    """Gives requests the prefixes that were asked for before, as a handoff that takes no time."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.known_blocks: dict[str, int] = {}
        """By request."""

    def begin(self, answer: Answer) -> bool:
        lease = answer.lease
        assert lease is not None
        # The last token is always computed: the first one of the answer comes from it.
        last = (len(answer.request.prompt) - 1) // self._block_tokens
        tokens = min(self.known_blocks.get(answer.request.id, 0), last) * self._block_tokens
        if lease.state is LeaseState.READY and tokens > lease.token_count:
            lease.commit_prompt(tokens)
            answer.scheduled = answer.computed = lease.token_count
        return True


class TimedWorkers(LocalWorkers):
    """The worker, with the time for which its results were waited for."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.waited_s = 0.0

    def collect(self, *, deadline: float) -> StepResult | None:
        began = time.perf_counter()
        result = super().collect(deadline=deadline)
        self.waited_s += time.perf_counter() - began
        return result


class MemoryKeeper:
    """Keeps the memory of host tiers for the next cache of this process."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    def kept(self, name: str) -> int | None:
        return self._kept.get(name)

    def keep(self, name: str, fd: int) -> None:
        before, self._kept[name] = self._kept.get(name), os.dup(fd)
        if before is not None:
            os.close(before)

    def close(self) -> None:
        while self._kept:
            os.close(self._kept.popitem()[1])


@dataclass(slots=True, kw_only=True)
class Side:
    """An engine with one of the caches."""

    engine: Engine
    workers: TimedWorkers
    infinite: InfinitePrefixes | None

    def settle(self) -> None:
        """Waits until all requests and copies have ended."""
        deadline = time.monotonic() + PATIENCE_S
        engine = self.engine
        while engine.unfinished or engine.scheduler.flying or engine.cache.busy:
            engine.step()
            if engine.idle and engine.cache.busy:
                engine.cache.wait(deadline)
            if time.monotonic() > deadline:
                raise UnavailableError(f"requests and copies have not ended in {PATIENCE_S:g} s")

    def fill(self, prompts: Iterable[NDArray[np.int32]]) -> None:
        """Empties the cache and fills it as if these prompts had been computed, in order."""
        self.settle()
        cache = self.engine.cache
        cache.reset("another run of the benchmark")
        for prompt in prompts:
            self._mark_computed(prompt)
        self.settle()

    def warm_up(self, *, longest: int, rows: int, vocabulary: int) -> None:
        """Has graphs of decode steps captured: up to `rows` requests, contexts up to `longest`."""
        scheduler = self.engine.scheduler
        short = scheduler.block_tokens
        context = 16 * short
        while context < 2 * longest:
            prompt = draw_tokens(context, min(context, longest) - short) % np.int32(vocabulary)
            self.fill([prompt])
            for number in range(rows):
                # One has the long context until the others have ended, one after the other.
                tokens = prompt[:short] if number else prompt
                request = Request(
                    id=f"warm {context} {number}",
                    prompt=tuple(tokens.tolist()),
                    max_tokens=2 * (rows - number),
                )
                self.engine.add(request)
            self.settle()
            context *= 2

    def _mark_computed(self, prompt: NDArray[np.int32]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        with self._acquired(prompt, deadline) as lease:
            while lease.state is LeaseState.LOADING:
                self._wait_for_copies(deadline)
            if lease.state is LeaseState.READY:
                lease.commit_prompt(len(prompt))
        self.engine.cache.step()

    def _acquired(self, prompt: NDArray[np.int32], deadline: float) -> Lease:
        while True:
            try:
                return self.engine.cache.acquire(prompt)
            except CapacityError:
                # Blocks that are being saved cannot be given away yet.
                self._wait_for_copies(deadline)

    def _wait_for_copies(self, deadline: float) -> None:
        cache = self.engine.cache
        cache.step()
        if time.monotonic() > deadline:
            raise UnavailableError(f"copies have not ended in {PATIENCE_S:g} s")
        if cache.busy:
            cache.wait(deadline)


class TrafficStage:
    """A model, its device blocks, and the memory of a host tier."""

    def __init__(
        self,
        model: Model,
        settings: SchedulerSettings,
        *,
        block_tokens: int,
        blocks: int,
        host_blocks: int,
        graphs: bool = True,
    ) -> None:
        self._model = model
        self._settings = settings
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._host_blocks = host_blocks
        self._kv = allocate_kv(
            model.architecture,
            model.share,
            block_count=blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        lane = lane_on(model.device, graphs=graphs)
        self._worker = Worker(model.decoder, self._kv, block_tokens=block_tokens, lane=lane)
        self._keeper = MemoryKeeper()

    def close(self) -> None:
        """Gives the memory of the host tier back."""
        self._keeper.close()

    @contextmanager
    def side(self, variant: Variant) -> Iterator[Side]:
        """An engine with a cache; only one at a time."""
        tier = kv_tier(
            self._model.architecture,
            self._model.share,
            self._kv,
            block_tokens=self._block_tokens,
        )
        config = penstock.parse_config(self._config(variant))
        with ExitStack() as stack:
            cache = stack.enter_context(penstock.open(config, kv=tier, keeper=self._keeper))
            self._worker.steps = cache.steps
            stack.callback(setattr, self._worker, "steps", None)
            settings = self._settings
            if not variant.loads_ahead:
                settings = replace(settings, loads_ahead=0)
            infinite = InfinitePrefixes(self._block_tokens) if variant.infinite else None
            scheduler = Scheduler(
                cache,
                settings,
                block_tokens=self._block_tokens,
                block_count=self._blocks,
                handoffs=infinite,
            )
            workers = TimedWorkers(self._worker)
            side = Side(engine=Engine(scheduler, workers), workers=workers, infinite=infinite)
            yield side
            side.settle()

    def _config(self, variant: Variant) -> str:
        host = (
            f'{{ name = "host", kind = "host", blocks = {self._host_blocks}, required = true, '
            f'eviction = "{variant.eviction}", write = "{variant.write}" }}'
        )
        return f"""
            version = 1
            model.name = "random"
            model.weights_version = "1"
            cache.block_tokens = {self._block_tokens}
            cache.blocks = {self._blocks}
            cache.load_gate = "{variant.load_gate}"
            cache.layer_wise = "{variant.layer_wise}"
            cache.eviction = "{variant.eviction}"
            tiers = [{host if variant.host else ""}]
            """
