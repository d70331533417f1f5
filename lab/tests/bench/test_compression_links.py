"""Compressed and plain blocks over links of a given rate."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from lab.bench.compression_links import require_networks, run_links
from lab.bench.report import BenchReport
from lab.cli.app import run
from penstock.errors import UnavailableError
from tests.store.redis_server import require_redis


def test_a_slow_link_lets_compressed_blocks_through_sooner() -> None:
    require_redis()
    try:
        require_networks()
    except UnavailableError as reason:
        pytest.skip(str(reason))
    numbers = np.random.default_rng(1).standard_normal((8, 64 << 10), np.float32)
    blocks = numbers.view("<u2")[:, 1::2].copy().view(np.uint8)
    report = BenchReport(version="0", command="lab bench compression")

    run_links(report, blocks, links=[20], rounds=1, round_bytes=2 << 20)

    text = io.StringIO()
    report.show(text)
    loads = {row.side: row.median for row in report.document().rows if row.metric == "load"}
    # A burst comes on top of the rate; without the link, loopback has ten times as much.
    assert 0 < loads["plain"] < 40
    assert "link of 20 MB/s: load with zstd, times plain: " in text.getvalue()
    assert "times smaller: zstd pays on links below " in text.getvalue()


def test_rates_of_links_must_be_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "compression", "--links", "50,fast"]) == 2
    printed = capsys.readouterr().err
    assert "--links" in printed
    assert json.dumps("50,fast")[1:-1] in printed
