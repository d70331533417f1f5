"""`lab bench vllm --handoff` with its real servers, on prompts as short as they may be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.bench.report import BenchReport
from lab.bench.vllm_handoff import HandoffPlan, run_vllm_handoff

pytestmark = [pytest.mark.vllm, pytest.mark.long]

SIDES = {"plain", "penstock", "penstock-at-once"}
# NIXL is not part of this environment.
PLAN = HandoffPlan(rounds=1, tokens=(256,), together=(2,), parts=("first-token",), peer=False)


def test_all_sides_answer_the_same_and_what_is_handed_over_is_counted() -> None:
    report = BenchReport(version="0", command="lab bench vllm --handoff")

    run_vllm_handoff(report, python=Path(sys.executable), plan=PLAN)

    document = report.document()
    rows = {(row.side, row.metric): row.median for row in document.rows}
    assert {side for side, metric in rows if metric == "first token"} == SIDES
    # Of two blocks of 128 tokens, 4 KiB a token; less if a busy machine was late for a handoff.
    moved = {side: value for (side, metric), value in rows.items() if metric.startswith("KV")}
    assert set(moved) == {"penstock", "penstock-at-once"}
    assert 0 < max(moved.values()) <= 1
    assert rows["penstock", "prefill worker, CPU a prompt"] > 0
    equal = [ratio for ratio in document.ratios if ratio.name.startswith("log-prob")]
    assert len(equal) == 2
    assert all(ratio.holds for ratio in equal)
