"""Disk tiers of peers: a peer that does not run here is a note, not a failure."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

from lab.bench.disk_peers import run_disk_peers
from lab.bench.report import BenchReport


def test_a_peer_that_is_not_installed_is_named_with_its_reason(tmp_path: Path) -> None:
    report = BenchReport(version="0", command="lab bench disk-peers")

    run_disk_peers(
        report,
        python=Path(sys.executable),
        folder=tmp_path,
        rounds=1,
        round_bytes=16 << 20,
        sizes=["256 KiB"],
    )

    shown = StringIO()
    report.show(shown)
    assert {row.side for row in report.document().rows} == {"penstock"}
    assert "256 KiB, vllm fs: does not run here: ModuleNotFoundError" in shown.getvalue()
    assert "256 KiB, lmcache: does not run here: ModuleNotFoundError" in shown.getvalue()
    assert list(tmp_path.iterdir()) == []
