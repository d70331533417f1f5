"""The benchmark of compression measures what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lab.bench import compression
from lab.bench.report import BenchReport

if TYPE_CHECKING:
    import pytest


def test_the_benchmark_measures_every_codec_on_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = torch.randn(2, 2, 2, 16, 2, 8, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(compression, "real_blocks", lambda tokens: kv[: tokens // 16])
    report = BenchReport(version="0", command="lab bench compression")

    compression.run_compression(report, tokens=32, rounds=2)

    rows = report.document().rows
    assert len(rows) == len(compression.CODECS) * len(compression.DTYPES) * 3
    assert all(row.median > 0 for row in rows)
