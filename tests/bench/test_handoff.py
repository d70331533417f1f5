"""The handoff benchmark, as small as it gets: real processes, every row, every ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.bench.handoff import run_handoff
from penstock.bench.handoff_rank import BenchShape
from penstock.bench.report import BenchReport
from penstock.cli.app import run
from penstock.cli.conventions import ExitStatus

if TYPE_CHECKING:
    from pathlib import Path


def test_every_side_is_measured_between_processes() -> None:
    report = BenchReport(version="test", command="test")
    shape = BenchShape(layers=3, tokens=128, block_tokens=16, order="token major")

    run_handoff(report, rounds=2, shapes=[shape])
    document = report.document()

    sides = {row.side for row in document.rows}
    assert {"copy + checksum", "handoff, at once", "handoff, by layers"} <= sides
    assert all(row.median > 0 for row in document.rows)
    assert [ratio.target for ratio in document.ratios] == [0.85, 0.85, 1.5, 0.5]


def test_without_a_gpu_the_cuda_side_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    status = run(["bench", "handoff", "--device", "cuda", "--json", str(tmp_path / "h.json")])

    assert status == ExitStatus.CANNOT_RUN_HERE
