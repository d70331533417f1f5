"""The disk benchmark: every side moves its bytes, and every row is reported."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from lab.bench.disk import run_disk
from lab.bench.disk_first_token import FirstTokenPlan, run_first_token
from lab.bench.disk_process import run_store_process
from lab.bench.report import BenchReport

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_every_size_has_rows_of_every_side_both_ways(tmp_path: Path) -> None:
    report = BenchReport(version="0", command="bench disk")

    run_disk(report, folder=tmp_path, rounds=1, round_bytes=48 << 20, sizes=["256 KiB"])

    rows = report.document().rows
    sides = {"penstock", "threads", "threads + sums"}
    sides |= {"fio"} if shutil.which("fio") else set()
    found = {(row.params["block"], row.metric, row.side) for row in rows}
    blocks = ("256 KiB", "256 KiB, single")
    assert found == {(b, m, s) for b in blocks for m in ("save", "load") for s in sides}
    assert all(row.median > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_store_process_has_rows_for_its_engine_and_for_a_restart(tmp_path: Path) -> None:
    report = BenchReport(version="0", command="bench disk")

    run_store_process(report, folder=tmp_path, rounds=1, round_s=0.001, rows=5000)

    rows = {(row.side, row.metric): row for row in report.document().rows}
    assert rows["penstock", "engine thread, CPU a block, load"].median > 0
    assert rows["penstock", "disk meanwhile"].median > 0
    assert rows["penstock", "tables recovered"].params["segments"] == 2
    assert rows["penstock", "first hit after the start of a process"].median > 0
    assert len(report.document().ratios) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_first_token_from_disk_is_measured_beside_computing_and_reading(tmp_path: Path) -> None:
    report = BenchReport(version="0", command="bench disk")

    run_first_token(report, FirstTokenPlan.small(tokens=512), folder=tmp_path, rounds=1)

    sides = {row.side for row in report.document().rows}
    assert sides == {"disk", "computed", "plain read"}
    assert list(tmp_path.iterdir()) == []
