"""The traffic benchmark in small, on the CPU: its workloads, searches and rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab.bench.engine_model import EIGHT_B
from lab.bench.report import BenchReport
from lab.bench.traffic import TrafficPlan, next_count, run_traffic
from lab.bench.traffic_run import TrafficRun
from lab.bench.traffic_workloads import (
    AgentPlan,
    TracePlan,
    agent_workload,
    due_s,
    trace_workload,
)

AGENTS = AgentPlan(
    sessions=4,
    shared_tokens=16,
    first_tokens=40,
    last_tokens=120,
    tool_tokens=(4, 20),
    answer_tokens=2,
    turns=8,
)
SMALL = TrafficPlan(
    architecture=replace(
        EIGHT_B,
        layers=1,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        vocabulary=97,
        positions=600,
    ),
    device="cpu",
    dtype="float32",
    block_tokens=8,
    step_tokens=64,
    step_requests=8,
    blocks=24,
    host_blocks=120,
    window_s=0.05,
    bound_s=60.0,
    guess_tokens_per_s=1e6,
    warm_rows=2,
    variants=("infinite", "off", "lru, always load"),
    workloads={"agents": AGENTS},
)


@pytest.mark.long
def test_every_cache_gets_its_rows_and_ratios() -> None:
    report = BenchReport(version="0", command="lab bench traffic")

    run_traffic(report, SMALL)

    document = report.document()
    found = {(row.side, row.metric): row.median for row in document.rows}
    # With a bound that no machine misses, all turns of the workload are answered in time.
    assert {found[name, "requests/s in time"] for name in SMALL.variants} == {8 / 0.05}
    assert found["off", "prompts from host memory"] == 0
    assert found["infinite", "prompts from host memory"] == 0
    # By default a load is only made where it is predicted to be sooner than computing, which for
    # a model this small depends on the machine.
    assert found["lru, always load", "prompts from host memory"] > 0
    assert {ratio.value for ratio in document.ratios} == {1.0}


def test_an_engine_that_is_always_late_answers_none_in_time() -> None:
    report = BenchReport(version="0", command="lab bench traffic")

    run_traffic(report, replace(SMALL, bound_s=1e-9, variants=("infinite", "lru")))

    document = report.document()
    assert {row.median for row in document.rows} == {0.0}
    assert not document.ratios


def test_a_request_that_becomes_due_while_others_are_asked_is_not_slept_through() -> None:
    workload = agent_workload("agents", AGENTS, block_tokens=8, vocabulary=97)
    side = _IdleSide()
    run = TrafficRun(side, workload, count=1, window_s=1.0, bound_s=60.0)  # type: ignore[arg-type]

    run._rest()

    assert not side.engine.cache.waited


class _IdleSide:
    """An engine that has nothing to do; remembers whether it was waited for."""

    class _Cache:
        waited = False

        def wait(self, _deadline: float) -> None:
            self.waited = True

    def __init__(self) -> None:
        self.engine = SimpleNamespace(cache=self._Cache(), unfinished=0)


@pytest.mark.parametrize(
    ("passes", "fails", "tried"),
    [(0, 20, 14), (0, 1, 1), (10, None, 13), (40, None, 40), (10, 20, 15), (20, 22, 20), (1, 2, 1)],
)
def test_the_search_goes_between_what_passes_and_what_fails(
    passes: int, fails: int | None, tried: int
) -> None:
    assert next_count(passes, fails, 40) == tried


def test_turns_are_spread_over_the_window_in_their_order() -> None:
    turns = agent_workload("agents", AGENTS, block_tokens=8, vocabulary=97).turns

    times = due_s(turns, 6, 10.0)

    assert times == sorted(times)
    assert times[0] == 0
    assert 0 < times[-1] < 10.0


def test_a_turn_of_an_agent_begins_with_all_that_it_sent_before() -> None:
    workload = agent_workload("agents", AGENTS, block_tokens=8, vocabulary=97)

    following = [number for number, turn in enumerate(workload.turns) if turn.after is not None]
    assert following
    for number in following:
        before = workload.turns[number].after
        assert before is not None
        known = workload.known_blocks[number]
        assert known >= len(workload.turns[before].blocks)
        shared = 8 * len(workload.turns[before].blocks)
        assert workload.prompt(number)[:shared] == workload.prompt(before)[:shared]
    prompts = {workload.prompt(number) for number in range(len(workload.turns))}
    assert len(prompts) == len(workload.turns)


def test_a_slice_of_a_trace_has_whole_sessions_and_fills_a_cache_before() -> None:
    plan = TracePlan(trace="synthetic", one_of=24, turns_min=3, prompt_tokens_max=16_384)

    workload = trace_workload("slice", plan, block_tokens=4, vocabulary=97, history_tokens=1000)

    history = {seed for turn in workload.history for seed in turn.blocks}
    assert 4 * len(history) >= 1000
    assert max(len(turn.blocks) for turn in workload.turns) <= 16_384 // 64
    # Most of a session's prompts were sent before.
    total = sum(len(turn.blocks) for turn in workload.turns)
    assert 0.5 < sum(workload.known_blocks) / total < 1


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"variants": ("none",)}, "variants are none"),
        ({"workloads": {}}, "workloads are none"),
        ({"window_s": 0.0}, "window_s is 0.0"),
        ({"bound_s": float("nan")}, "bound_s is nan"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(changed: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(SMALL, **changed)  # type: ignore[arg-type]
