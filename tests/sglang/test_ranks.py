"""Two ranks: each has its own part of every page, and both load or both compute."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from oracle import HITS, OTHERS, SIX, host_hits, same

if TYPE_CHECKING:
    from conftest import Run

pytestmark = pytest.mark.sglang

THREE = {**SIX, "lengths": SIX["lengths"][:3]}
OTHER = {**OTHERS, "lengths": OTHERS["lengths"][:3]}
FIRST = {**SIX, "lengths": SIX["lengths"][:1]}


def two_cores() -> str:
    """A core for each of two ranks, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


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
        linker=True,
        pool=1024,
        options={"tp_size": 2},
        # Without it SGLang wants a NUMA node for each rank.
        environment={"SGLANG_CPU_OMP_THREADS_BIND": two_cores()},
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
