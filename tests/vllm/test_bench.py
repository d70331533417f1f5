"""`penstock bench vllm` with its real engines, on conversations as small as they may be."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from penstock.bench.report import Report
from penstock.bench.vllm_run import run_vllm
from penstock.bench.vllm_workload import Workload

pytestmark = pytest.mark.vllm

# 34 blocks, of which the device has 13: the two requests that run at a time just fit.
SMALL = Workload(
    conversations=8, turns=2, system_tokens=32, question_tokens=64, answer_tokens=2, together=2
)
# An engine takes most of a minute to start, and all of them are up at the same time.
SIDES = ("no-connector", "penstock")
METRICS = {
    "ttft",
    "output rate",
    "hit rate",
    "steps",
    "steps that compute nothing",
    "scheduler thread a step",
    "worker thread a step",
    "worker thread in its connector a step",
}


def test_both_sides_answer_the_same_and_are_measured() -> None:
    report, shown = Report(version="0", command="penstock bench vllm"), io.StringIO()

    run_vllm(report, python=Path(sys.executable), rounds=1, workload=SMALL, sides=SIDES)

    report.show(shown)
    assert shown.getvalue().count("answers differ from no-connector in 0 of 1 rounds") == 4
    document = report.document()
    assert {(row.side, row.params["reuse"], row.metric) for row in document.rows} == {
        (side, reuse, metric) for side in SIDES for reuse in (True, False) for metric in METRICS
    }
    hits = {
        (row.side, row.params["reuse"]): row.median
        for row in document.rows
        if row.metric == "hit rate"
    }
    # Every second turn finds its first one, which the device has forgotten.
    assert hits["penstock", True] > hits["no-connector", True]
    assert [hits[side, False] for side in SIDES] == [0.0] * len(SIDES)
    assert "ttft p50 against no connector" in {ratio.name for ratio in document.ratios}
