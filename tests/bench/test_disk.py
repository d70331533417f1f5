"""The disk benchmark: every side moves its bytes, and every row is reported."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from penstock.bench.disk import run_disk
from penstock.bench.report import BenchReport

if TYPE_CHECKING:
    from pathlib import Path


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
