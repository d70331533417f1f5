"""The handoff benchmark, as small as it gets: real processes, every row, every ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.bench.handoff import run_handoff
from lab.bench.handoff_nixl import run_handoff_over_nixl
from lab.bench.handoff_rank import BenchShape
from lab.bench.report import BenchReport
from penstock.cli.app import run
from penstock.cli.conventions import ExitStatus
from tests.relay.relays import needs_nixl

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


@needs_nixl
@pytest.mark.long
def test_over_nixl_the_benchmark_compares_with_a_plain_write() -> None:
    report = BenchReport(version="test", command="test")
    shape = BenchShape(layers=2, tokens=64, block_tokens=16, order="head major")

    run_handoff_over_nixl(report, rounds=1, shapes=[shape])
    document = report.document()

    sides = {(row.side, row.metric) for row in document.rows}
    assert ("plain NIXL write", "all bytes") in sides
    assert ("handoff, 4 prompts", "target CPU") in sides
    assert [ratio.target for ratio in document.ratios] == [0.95, 0.95, 1.2, 0.02]
    assert all(ratio.value > 0 for ratio in document.ratios)
