"""Interference on a GPU, short: every side drives the copies, and moves the right bytes."""

from __future__ import annotations

import pytest

from penstock.bench.interference.on_cuda import run_on_cuda
from penstock.bench.interference.plan import Plan
from penstock.bench.report import Report

pytestmark = pytest.mark.gpu

SIDES = {
    "penstock, 30 GB/s",
    "penstock, no limit",
    "thread that polls",
    "thread that blocks",
    "second process",
}


def test_every_side_moves_blocks_beside_a_loop_and_is_verified() -> None:
    report = Report(version="0", command="test")
    plan = Plan(loops=("small",), rounds=1, seconds=0.05, wanted=(30.0,))
    told: list[str] = []

    run_on_cuda(report, plan, tell=told.append)

    rows = report.document().rows
    for work in plan.works:
        rates = {
            row.side: row.median
            for row in rows
            if row.metric == "rate" and row.params["beside"] == work
        }
        assert rates.keys() == SIDES
        assert all(rate > 0 for rate in rates.values()), rates
    assert len(told) == 2 + len(plan.works) * len(SIDES)
