"""The benchmark of blocks of peers brings the blocks that it says it does."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from lab.bench import peer_blocks
from lab.bench.peer_blocks import SIDES, SIZES, run_peer_blocks
from lab.bench.report import BenchReport
from penstock.relay.agents import is_installed

if TYPE_CHECKING:
    from pathlib import Path


needs_nixl = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")


@needs_nixl
def test_every_side_brings_all_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    monkeypatch.setattr(peer_blocks, "SIZES", {"256 KiB": SIZES["256 KiB"]})
    report = BenchReport(version="0", command="bench peer-blocks")

    run_peer_blocks(report, rounds=1, total_bytes=1 << 20, folder=tmp_path)

    rows = report.document().rows
    assert {row.side for row in rows} == set(SIDES)
    assert all(row.median > 0 for row in rows)


@needs_nixl
@pytest.mark.long
def test_a_prefix_of_a_peer_and_of_a_redis_is_found_and_timed() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    run_peer_first_token = pytest.importorskip("lab.bench.peer_first_token").run_peer_first_token
    report = BenchReport(version="0", command="bench peer-blocks")

    run_peer_first_token(report, rounds=1, tokens=512)

    rows = report.document().rows
    assert {row.side for row in rows} == {"computed", "redis", "peers", "peers tcp", "peers nixl"}
    assert all(row.median > 0 for row in rows)
