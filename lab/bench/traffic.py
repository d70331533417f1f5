"""The traffic benchmark: how many requests a second an engine answers in time, by its cache.

For each workload and each cache, the largest number of requests in a window is searched of which
nine in ten get their first token within a bound.

| cache              | what it is                                                         |
|--------------------|--------------------------------------------------------------------|
| `off`              | device blocks alone                                                |
| `lru`, `adaptive`  | a host tier below, and what leaves first                           |
| `exclusive`        | the same with LRU, where the tier gives up first what is above it  |
| `lru, always load` | whatever is found is loaded, even if computing is predicted sooner |
| `lru, no loads ahead` | loads begin when there is room in a step                        |
| `lru, by layers`   | loads fill one layer after another, and steps join them            |
| `infinite`         | every prefix that came before is there, without any copy           |

The one rule: all caches get the same requests, from the same history, and every row is reported.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lab.bench.engine_model import EIGHT_B, Model
from lab.bench.engine_parts import quantile
from lab.bench.measure import Summary, collector_paused
from lab.bench.traffic_engine import PATIENCE_S, TrafficStage, Variant
from lab.bench.traffic_run import SHARE_IN_TIME, RunResult, TrafficRun
from lab.bench.traffic_workloads import (
    AgentPlan,
    TracePlan,
    agent_workload,
    trace_workload,
)
from penstock_serve.engine.scheduler import SchedulerSettings
from penstock_serve.engine.spec import torch_dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lab.bench.report import BenchReport, Param
    from lab.bench.traffic_engine import Side
    from lab.bench.traffic_workloads import Workload
    from penstock_serve.engine.architecture import Architecture

BENCH = "traffic"
CLOSE_TO = 1.1
"""A search ends when a rate that fails is at most this many times one that does not."""
STRIDE_UP, STRIDE_DOWN = 1.3, 1.4
"""How far the search goes until it has a rate of either kind."""
RUNS_MAX = 9
WARM_TURNS = 4
"""The first run of each cache is short and not counted."""
OFF, LRU, INFINITE = "off", "lru", "infinite"
VARIANTS = {
    each.name: each
    for each in (
        Variant(name=INFINITE, host=False, infinite=True),
        Variant(name=OFF, host=False),
        Variant(name=LRU),
        Variant(name="exclusive", write="exclusive"),
        Variant(name="lru, always load", load_gate="off"),
        Variant(name="lru, no loads ahead", loads_ahead=False),
        Variant(name="adaptive", eviction="adaptive"),
        Variant(name="lru, by layers", layer_wise="auto"),
    )
}
WORKLOADS: dict[str, TracePlan | AgentPlan] = {
    "agents": AgentPlan(),
    "agents, too many": AgentPlan(sessions=40),
    "conversation": TracePlan(trace="conversation", one_of=12),
    "conversation, long": TracePlan(trace="conversation", one_of=8, turns_min=3),
    "conversation, more": TracePlan(trace="conversation", one_of=6, turns_min=3),
    "synthetic": TracePlan(trace="synthetic", one_of=12),
}
"""`agents` fits into 90 GiB; `long` and `more` have sessions of three turns and more: those of
`long` nearly fit, those of `more` do not."""
GAIN_MIN = {
    "agents": 3.0,
    "conversation": 1.5,
    "conversation, long": 1.5,
    "conversation, more": 1.5,
}
"""Requests a second with a host tier, of those without."""
INFINITE_SHARE_MIN = {"agents": 0.85}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPlan:
    """The whole benchmark; the defaults are for an H200 machine with 128 GiB of memory."""

    architecture: Architecture = field(default_factory=lambda: replace(EIGHT_B, positions=131_072))
    device: str = "cuda"
    dtype: str = "bfloat16"
    block_tokens: int = 64
    step_tokens: int = 4096
    step_requests: int = 64
    graphs: bool = True
    blocks: int = 5_120
    """40 GiB."""
    host_blocks: int = 11_520
    """90 GiB."""
    window_s: float = 12.0
    bound_s: float = 2.0
    guess_tokens_per_s: float = 20_000.0
    """Prompt tokens computed: where the first search of a workload begins."""
    warm_rows: int = 24
    """Requests at a time for which graphs are captured before anything is measured."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    workloads: Mapping[str, TracePlan | AgentPlan] = field(default_factory=lambda: dict(WORKLOADS))

    @classmethod
    def sized(
        cls,
        *,
        device_gib: float,
        host_gib: float,
        window_s: float,
        variants: tuple[str, ...],
        workloads: Mapping[str, TracePlan | AgentPlan],
    ) -> TrafficPlan:
        """The 8B model with so much memory for blocks."""
        of = EIGHT_B
        token_bytes = of.layers * 2 * of.kv_heads * of.head_dim * 2
        block_gib = token_bytes * 64 / 2**30
        return cls(
            blocks=int(device_gib / block_gib),
            host_blocks=int(host_gib / block_gib),
            window_s=window_s,
            variants=variants,
            workloads=workloads,
        )

    def __post_init__(self) -> None:
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or not self.variants:
            named = "; ".join(self.variants)
            raise ValueError(f"variants are {named}, must be of {'; '.join(VARIANTS)}")
        if not self.workloads:
            raise ValueError("workloads are none, must be at least one")
        for name in ("window_s", "bound_s", "guess_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")


class TrafficBench:
    """One run of the benchmark."""

    def __init__(self, report: BenchReport, plan: TrafficPlan) -> None:
        self._report = report
        self._plan = plan
        self._say = report.progress
        self._found: dict[tuple[str, str], RunResult] = {}

    def run(self) -> None:
        """Measures every workload with every cache, and adds rows and ratios."""
        plan = self._plan
        workloads = [self._workload(name) for name in plan.workloads]
        self._say("model")
        model = Model(plan.architecture, device=plan.device, dtype=torch_dtype_of(plan.dtype))
        stage = TrafficStage(
            model,
            SchedulerSettings(
                step_tokens=plan.step_tokens,
                step_requests=plan.step_requests,
                steps_in_flight=2 if model.device.type == "cuda" else 1,
            ),
            block_tokens=plan.block_tokens,
            blocks=plan.blocks,
            host_blocks=plan.host_blocks,
            graphs=plan.graphs,
        )
        with closing(stage):
            for name in plan.variants:
                self._say(f"{name}: opens")
                with stage.side(VARIANTS[name]) as side:
                    self._say(f"{name}: compiles")
                    # Graphs belong to the gates of layer-wise loads.
                    fresh = VARIANTS[name].layer_wise != "off"
                    first = fresh or name == plan.variants[0]
                    self._warm_up(side, workloads, first=first)
                    for workload in workloads:
                        best = self._search(name, side, workload)
                        self._found[workload.name, name] = best
                        self._add_rows(workload, name, best)
        self._add_ratios()

    def _warm_up(self, side: Side, workloads: list[Workload], *, first: bool) -> None:
        """Compiles kernels and captures graphs, which all caches share, and copies a little."""
        plan = self._plan
        if first:
            side.warm_up(
                longest=max(each.longest_tokens for each in workloads),
                rows=min(plan.warm_rows, plan.step_requests),
                vocabulary=plan.architecture.vocabulary,
            )
        count = min(WARM_TURNS, len(workloads[0].turns))
        side.fill(workloads[0].history_prompts)
        TrafficRun(side, workloads[0], count=count, window_s=1.0, bound_s=PATIENCE_S).run()

    def _workload(self, name: str) -> Workload:
        plan, given = self._plan, self._plan.workloads[name]
        words = plan.architecture.vocabulary
        if isinstance(given, AgentPlan):
            return agent_workload(name, given, block_tokens=plan.block_tokens, vocabulary=words)
        # A little more than the host tier holds, so that it evicts.
        tokens = plan.host_blocks * plan.block_tokens * 9 // 8
        return trace_workload(
            name,
            given,
            block_tokens=plan.block_tokens,
            vocabulary=words,
            history_tokens=tokens,
        )

    def _search(self, name: str, side: Side, workload: Workload) -> RunResult:
        """The run with the most requests that were answered in time; with none, an empty one."""
        plan = self._plan
        best = RunResult(count=0, window_s=plan.window_s)
        fails: int | None = None
        count = self._guess(workload, name)
        for _ in range(RUNS_MAX):
            result = self._try(side, workload, count)
            self._say(f"{name}, {workload.name}: {_describe(result)}")
            if result.passed:
                best = result
            else:
                fails = count
            count = next_count(best.count, fails, len(workload.turns))
            if count in (best.count, fails):
                break
        return best

    def _guess(self, workload: Workload, name: str) -> int:
        """As much as the cache before could do; without a host tier, half of it."""
        found = [
            best.count
            for (of, by), best in self._found.items()
            if of == workload.name and by != OFF
        ]
        if found:
            count = found[-1]
        else:
            per_s = self._plan.guess_tokens_per_s / workload.new_tokens_mean
            count = int(per_s * self._plan.window_s)
        if name == OFF:
            count //= 2
        return max(1, min(count, len(workload.turns)))

    def _try(self, side: Side, workload: Workload, count: int) -> RunResult:
        plan = self._plan
        side.fill(workload.history_prompts)
        run = TrafficRun(side, workload, count=count, window_s=plan.window_s, bound_s=plan.bound_s)
        with collector_paused():
            return run.run()

    def _add_rows(self, workload: Workload, name: str, best: RunResult) -> None:
        params: dict[str, Param] = {"workload": workload.name, "window_s": best.window_s}
        values = {"requests/s in time": ("1/s", best.per_s)}
        if best.count:
            first = best.first_token_s
            in_device = best.device_tokens / best.asked_tokens
            values |= {
                "first token, median": ("ns", 1e9 * quantile(first, 0.5)),
                "first token, p90": ("ns", 1e9 * quantile(first, SHARE_IN_TIME)),
                "prompts from the device": ("share", in_device),
                "prompts from host memory": ("share", best.host_tokens / best.asked_tokens),
                "thread waits for the device": ("share", best.waited_s / best.seconds),
                "no request": ("share", best.idle_s / best.seconds),
                "all requests load": ("share", best.loading_s / best.seconds),
            }
        for metric, (unit, value) in values.items():
            self._report.add_row(
                bench=BENCH,
                side=name,
                params=params,
                metric=metric,
                unit=unit,
                summary=Summary(median=value, p99=value, samples=max(1, best.count)),
            )

    def _add_ratios(self) -> None:
        for workload in self._plan.workloads:
            found = {name: best for (of, name), best in self._found.items() if of == workload}
            for name, best in found.items():
                if name in (OFF, INFINITE):
                    continue
                if OFF in found:
                    # An engine that answers none in time counts as one that answers one.
                    self._report.add_ratio(
                        f"{workload}: requests/s with {name}, of off",
                        best.count / max(1, found[OFF].count),
                        at_least=GAIN_MIN.get(workload, 1.0),
                    )
                if INFINITE in found and found[INFINITE].count:
                    self._report.add_ratio(
                        f"{workload}: requests/s with {name}, of infinite",
                        best.count / found[INFINITE].count,
                        at_least=INFINITE_SHARE_MIN.get(workload, 0.0),
                    )


def next_count(passes: int, fails: int | None, most: int) -> int:
    """The count to try after the largest that passes and the smallest that fails."""
    if fails is None:
        return min(most, max(passes + 1, round(passes * STRIDE_UP)))
    if not passes:
        return max(1, int(fails / STRIDE_DOWN))
    if fails - passes <= max(1, (CLOSE_TO - 1) * passes):
        return passes
    return (passes + fails) // 2


def _describe(result: RunResult) -> str:
    first = result.first_token_s
    p50, p90 = (quantile(first, share) for share in (0.5, SHARE_IN_TIME))
    asked = max(1, result.asked_tokens)
    return (
        f"{result.per_s:.2f}/s {'in time' if result.passed else 'LATE'}, {result.count} requests, "
        f"{result.seconds:.1f} s; first token {p50:.2f} s, p90 {p90:.2f}; prompts "
        f"{result.asked_tokens}, of the device {result.device_tokens / asked:.2f}, host "
        f"{result.host_tokens / asked:.2f}, computed instead {result.computed_instead}; "
        f"loaded {result.loaded_bytes / 1e9:.1f} GB, saved {result.saved_bytes / 1e9:.1f} GB; "
        f"waits {result.waited_s:.1f} s, loads alone {result.loading_s:.1f} s, no request "
        f"{result.idle_s:.1f} s, "
        f"{result.preemptions} preempted, {result.joins} joined"
    )


def run_traffic(report: BenchReport, plan: TrafficPlan) -> None:
    """Measures, and adds rows and ratios.

    Raises:
        ConfigError: a trace cannot be read, or the machine has too little memory.
        UnavailableError: there is no such device, or the machine does not give the memory.
    """
    TrafficBench(report, plan).run()
