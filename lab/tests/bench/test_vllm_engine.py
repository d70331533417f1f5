"""What `lab bench vllm` does around its engines; the engines themselves need vLLM."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from lab.bench.report import BenchReport
from lab.bench.vllm_engine import RecordingCost, RoundResult, worker_cores
from lab.bench.vllm_first_token import FirstToken, StepCounts
from lab.bench.vllm_run import low_end, tell, tell_recording
from lab.bench.vllm_workload import WORKLOADS, Workload

PROGRAM = """
import sys
from lab.bench.vllm_engine import ending_in_order

with ending_in_order():
    try:
        print("running", flush=True)
        sys.stdin.read()
    finally:
        print("engines ended", flush=True)
"""


def test_a_request_to_end_the_benchmark_ends_what_it_has_started() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"

        program.send_signal(signal.SIGTERM)
        reported, _ = program.communicate(timeout=300)

    assert reported == "engines ended\n"
    assert program.returncode == 128 + signal.SIGTERM


def test_the_scheduler_has_a_core_of_its_own_where_there_are_two() -> None:
    cores = sorted(os.sched_getaffinity(0))

    wanted = [int(core) for core in worker_cores().split(",")]

    assert wanted == (cores[1:] if len(cores) > 1 else cores)


@pytest.mark.parametrize(
    ("count", "below"), [(1, None), (5, None), (6, 0), (9, 1), (12, 2), (15, 3), (25, 7)]
)
def test_the_low_end_of_an_interval_leaves_out_as_many_as_the_odds_allow(
    count: int, below: int | None
) -> None:
    # The table of the sign test: so many samples may lie below the interval.
    assert low_end([float(number) for number in reversed(range(count))]) == below


def a_round(scheduler_s: float, *, ttft_s: float = 0.1, tokens: int = 32) -> RoundResult:
    token = FirstToken(
        request=0,
        prompt_tokens=64,
        cached_tokens=32,
        seconds=ttft_s,
        outside_s=0.0,
        waited_s=0.0,
        calls=1,
        worker_s=0.1,
        cpu_s=0.1,
        connector_s=0.0,
        counts=StepCounts(queued_steps=0, loading_steps=1, computing_steps=1, step_tokens=tokens),
    )
    return RoundResult(
        first_tokens=[token],
        tokens_per_s=20.0,
        hit_rate=0.5,
        scheduler_s=scheduler_s,
        worker_s=0.01,
        connector_s=0.001,
        steps=10,
        empty_steps=1,
        answers=[[1, 2]],
    )


@pytest.mark.parametrize(("rounds", "reported"), [(3, 0), (5, 0), (6, 1), (9, 1)])
def test_an_interval_is_told_where_there_are_rounds_enough_for_one(
    rounds: int, reported: int
) -> None:
    report = BenchReport(version="0", command="lab bench vllm")
    sides = {"no-connector": 0.001, "vllm-offloading": 0.004, "penstock": 0.002}
    measured = {side: [a_round(spent_s)] * rounds for side, spent_s in sides.items()}

    tell(report, measured, Workload(), device_blocks=52)

    names = [ratio.name for ratio in report.document().ratios]
    compared = "scheduler and connector a step against vllm-offloading"
    assert names.count(compared) == 1
    assert names.count(f"{compared}, low end of the 95 % interval") == reported


def test_chats_are_compared_by_their_first_tokens_with_every_other_side() -> None:
    report, shown = BenchReport(version="0", command="lab bench vllm"), io.StringIO()
    chats = next(workload for workload in WORKLOADS if workload.name == "chats")
    measured = {
        "no-connector": [a_round(0.001, ttft_s=0.4, tokens=640)] * 3,
        "vllm-offloading": [a_round(0.001, ttft_s=0.1, tokens=400)] * 3,
        "penstock": [a_round(0.001, ttft_s=0.2, tokens=320)] * 3,
    }

    tell(report, measured, chats, device_blocks=52)

    found = {ratio.name: (ratio.value, ratio.holds) for ratio in report.document().ratios}
    assert found == {
        "chats: ttft p50 against no-connector": (2.0, True),
        "chats: ttft p50 against vllm-offloading": (0.5, False),
        "chats: mean ttft of requests with a load against vllm-offloading": (0.5, False),
        "chats: tokens of all steps up to their first token against vllm-offloading": (1.25, True),
    }
    report.show(shown)
    for peer, behind in {"vllm-offloading": 3, "no-connector": 0}.items():
        said = f"chats: behind {peer} by the median first token in {behind} of 3 rounds"
        assert said in shown.getvalue()


def test_the_cost_of_recording_is_a_share_of_the_schedulers_thread() -> None:
    report = BenchReport(version="0", command="lab bench vllm")
    asked = Workload(name="asked", conversations=4, turns=5)
    spent = RecordingCost(calls_s=0.001, thread_s=0.1, writer_s=0.004)

    tell_recording(report, [replace(a_round(0.001), recording=spent)] * 2, asked)

    document = report.document()
    (share,) = document.ratios
    assert (share.value, share.holds) == (pytest.approx(1.0), False)
    medians = {row.metric: row.median for row in document.rows}
    assert medians["recording, scheduler thread a request"] == pytest.approx(0.001 / 20)
    assert medians["recording, writing thread a request"] == pytest.approx(0.004 / 20)


def test_all_workloads_run_on_the_same_engines() -> None:
    chats = next(workload for workload in WORKLOADS if workload.name == "chats")

    assert (chats.conversations, chats.turns, chats.together) == (6, 4, 2)
    assert len({workload.working_set_tokens for workload in WORKLOADS}) == 1
