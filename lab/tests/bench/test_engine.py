"""The engine benchmark in small, on the CPU: its parts do what their rows say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.bench.engine import run_engine
from lab.bench.engine_model import EIGHT_B
from lab.bench.engine_parts import ChatPlan, DecodePlan, EnginePlan, HitPlan, LatencyPlan
from lab.bench.report import BenchReport

SMALL = EnginePlan(
    architecture=replace(
        EIGHT_B,
        layers=2,
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
    step_requests=4,
    rounds=1,
    load_gate="off",
    hit_rounds=1,
    chats=ChatPlan(
        conversations=20,
        turns=2,
        first_tokens=30,
        question_tokens=6,
        answer_tokens=4,
        concurrent=2,
    ),
    decode=DecodePlan(requests=2, prompt_tokens=20, answer_tokens=12),
    hits=HitPlan(tokens=160, question_tokens=3),
    latency=LatencyPlan(requests=2, context_tokens=20, answer_tokens=200, window_steps=15),
)


@pytest.mark.long
def test_every_part_reports_its_rows_and_ratios() -> None:
    report = BenchReport(version="0", command="lab bench engine")

    run_engine(report, SMALL)

    document = report.document()
    found = {(row.side, row.metric): row for row in document.rows}
    below = found["host tier", "later prompts from host memory"].median
    assert below > 0.5
    assert found["no host tier", "later prompts from host memory"].median == 0
    assert found["prefixes arrive", "first token of a prefix"].samples >= 1
    assert len(document.rows) == 12 + 2 + 3 + 3
    assert len(document.ratios) == 5


def test_one_part_can_be_measured_alone() -> None:
    report = BenchReport(version="0", command="lab bench engine --only decode")

    run_engine(report, replace(SMALL, parts=("decode",)))

    assert {row.metric for row in report.document().rows} == {"decode, nothing reused"}
