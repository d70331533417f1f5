"""`lab bench vllm` with its real engines, on conversations as small as they may be."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench.report import BenchReport
from lab.bench.vllm_run import run_recording, run_vllm
from lab.bench.vllm_workload import Workload

# Of our own measurements, and of three minutes.
pytestmark = [pytest.mark.vllm, pytest.mark.long]

# 34 blocks, of which the device has 13: the two requests that run at a time just fit.
SMALL = Workload(
    conversations=8, turns=2, system_tokens=32, question_tokens=64, answer_tokens=2, together=2
)
# The same size, so that the same engines run it.
CHATS = replace(SMALL, name="chats", conversations=4, turns=4)
WORKLOADS = (SMALL, replace(SMALL, name="new", reuse=False), CHATS)
# An engine takes most of a minute to start, and all of them are up at the same time.
SIDES = ("no-connector", "penstock")
METRICS = {
    "ttft",
    "ttft, queued and loading",
    "ttft, steps in the queue",
    "ttft, steps for the load",
    "ttft, steps of its own",
    "ttft, tokens of all steps",
    "output rate",
    "hit rate",
    "steps",
    "steps that compute nothing",
    "scheduler thread a step",
    "worker thread a step",
    "worker thread in its connector a step",
}


def test_both_sides_answer_the_same_and_are_measured() -> None:
    report, shown = BenchReport(version="0", command="lab bench vllm"), io.StringIO()

    run_vllm(report, python=Path(sys.executable), rounds=1, workloads=WORKLOADS, sides=SIDES)

    report.show(shown)
    assert shown.getvalue().count("answers differ from no-connector in 0 of 1 rounds") == 6
    document = report.document()
    names = [workload.name for workload in WORKLOADS]
    assert {(row.side, row.params["workload"], row.metric) for row in document.rows} == {
        (side, name, metric) for side in SIDES for name in names for metric in METRICS
    }
    medians = {(row.side, row.params["workload"], row.metric): row.median for row in document.rows}
    # Every turn but the first finds the one before, which the device has forgotten.
    for name in ("conversations", "chats"):
        hits = [medians[side, name, "hit rate"] for side in SIDES]
        assert hits[1] > hits[0]
        loading = [medians[side, name, "ttft, steps for the load"] for side in SIDES]
        # A load is there in the step after the one that begins it.
        assert loading[0] == 0.0
        assert 0.0 < loading[1] <= 1.0
    assert [medians[side, "new", "hit rate"] for side in SIDES] == [0.0] * len(SIDES)
    ratios = {ratio.name for ratio in document.ratios}
    assert {"ttft p50 against no connector", "chats: ttft p50 against no-connector"} <= ratios


def test_what_recording_costs_is_measured_where_requests_are_recorded() -> None:
    report = BenchReport(version="0", command="lab bench vllm")
    asked = replace(SMALL, name="asked", conversations=4, turns=1, reuse=False)

    run_recording(report, python=Path(sys.executable), rounds=1, workloads=[asked])

    document = report.document()
    medians = {row.metric: row.median for row in document.rows if row.side == "penstock"}
    spent_s = medians["recording, scheduler thread a request"]
    assert 0 < spent_s < medians["scheduler's own calls a request"]
    assert medians["scheduler's own calls a request"] < medians["scheduler thread a request"]
    (share,) = document.ratios
    assert share.name == "asked: recording, % of the scheduler's thread"
