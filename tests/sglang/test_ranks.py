"""Two ranks: each has its own part of every page, and both load or both compute."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from oracle import HITS, OTHERS, PAGE, SIX, host_hits, same

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Run

pytestmark = pytest.mark.sglang

THREE = {**SIX, "lengths": SIX["lengths"][:3]}
OTHER = {**OTHERS, "lengths": OTHERS["lengths"][:3]}
FIRST = {**SIX, "lengths": SIX["lengths"][:1]}


def two_cores() -> str:
    """A core for each of two ranks, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


def two_ranks() -> dict[str, Any]:
    return {
        "linker": True,
        "pool": 1024,
        "options": {"tp_size": 2},
        # Without it SGLang wants a NUMA node for each rank.
        "environment": {"SGLANG_CPU_OMP_THREADS_BIND": two_cores()},
    }


def test_two_ranks_load_their_parts_and_agree_on_what_is_damaged_on_one(run: Run) -> None:
    results, printed = run(
        [
            THREE,
            OTHER,
            THREE,
            OTHER,
            {"do": "tamper", "word": "flip"},
            THREE,
            {"do": "tamper", "word": ""},
            OTHER,
            {"do": "tamper", "word": "late"},
            {"do": "refused", **FIRST},
            {"do": "tamper", "word": ""},
            FIRST,
        ],
        **two_ranks(),
    )

    cold, _, hit, _, _, damaged, _, _, _, refused, _, after = results
    assert host_hits(cold) == [0] * 3
    assert host_hits(hit) == HITS[:3]
    assert same(hit, cold)
    assert host_hits(damaged) == [0] * 3
    assert same(damaged, cold), "no request ends in an error"
    assert refused["status"] == 503, "damaged after it was verified: SGLang can only refuse it"
    assert same(after, {"rows": cold["rows"][:1]})
    assert "rank=0 ranks=2" in printed
    assert "rank=1 ranks=2" in printed


def test_after_kill_9_two_ranks_find_their_parts_on_the_disk_while_a_request_is_queued(
    run: Run, tmp_path: Path
) -> None:
    """Rank 0 sees its own part of the disk alone, of which each rank has as much."""
    pages = FIRST["lengths"][0] // PAGE
    disk = str(tmp_path / "disk")
    computed = run(
        [{"do": "store"}, FIRST, {"do": "store", "of_all": 2 * pages}, {"do": "die"}],
        **two_ranks(),
        disk=disk,
        dies=True,
    )[0][1]

    # The first request computes for long enough, and there is room for one at a time.
    both = {"lengths": [*FIRST["lengths"], 100], "last_first": True, "max_tokens": 150}
    _, queued, counts = run(
        [{"do": "store"}, both, {"do": "counts"}], **two_ranks(), disk=disk, running=1
    )[0]

    assert host_hits(queued) == [0, HITS[0]]
    assert counts["counts"]["disk_blocks_loaded"] == HITS[0] // PAGE
    count = len(computed["rows"][0]["tokens"])
    assert queued["rows"][1]["tokens"][:count] == computed["rows"][0]["tokens"]
    assert queued["rows"][1]["logprobs"][:count] == pytest.approx(
        computed["rows"][0]["logprobs"], abs=2e-4
    )
