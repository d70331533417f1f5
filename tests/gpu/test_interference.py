"""Interference on a GPU, short: every side drives the copies, and moves the right bytes."""

from __future__ import annotations

import time

import pytest
import torch

from lab.bench.interference.bare import BareCopies, Extents
from lab.bench.interference.on_cuda import run_on_cuda
from lab.bench.interference.plan import Plan
from lab.bench.report import BenchReport

pytestmark = pytest.mark.gpu

SIDES = {
    "penstock, 30 GB/s",
    "penstock, no limit",
    "thread that polls",
    "thread that blocks",
    "second process",
}


def test_every_side_moves_blocks_beside_a_loop_and_is_verified() -> None:
    report = BenchReport(version="0", command="test")
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


def test_bare_copies_move_what_the_rate_allows_and_count_what_arrived() -> None:
    length = 64 << 20
    here = torch.randint(0, 255, (length,), dtype=torch.uint8, device="cuda")
    there = torch.zeros(length, dtype=torch.uint8).pin_memory()
    ways = [Extents(target=there.data_ptr(), source=here.data_ptr(), length=length)]
    ticks = iter([0.0, 0.002, 1.0])
    side = BareCopies(ways, gb_per_s=10.0, clock=lambda: next(ticks))
    torch.cuda.synchronize()
    began = time.monotonic()

    side.begin()
    side.at_boundary()
    side.at_boundary()
    moved_bytes = side.end(began, float("inf"))

    # 2 ms of the rate, then all there is.
    assert moved_bytes == 20_000_000 + length
    assert torch.equal(there, here.cpu())
    side.close()
