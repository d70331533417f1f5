"""What `lab bench sglang-gpu` makes of its engines' answers; the engines themselves need a GPU."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench.report import BenchReport
from lab.bench.sglang_gpu import SglangGpuPlan, _Bench, tell
from lab.bench.sglang_gpu_child import HICACHE, OURS, OWN, PLAIN
from lab.bench.vllm_engine import EngineProcess
from penstock.errors import UnavailableError

TOKENS = 4096


def rounds_of(seconds: float, *, cached: int = TOKENS, score: float = -1.0) -> list[list[Any]]:
    """A round that computes two prompts, and one in which they come again."""
    computed = {"first_s": 0.2, "cached": 0, "scores": [[7, -1.05]]}
    again = {"first_s": seconds, "cached": cached, "host": cached, "scores": [[7, score]]}
    return [[computed] * 2, [again] * 2]


def shown(**sides: list[list[Any]]) -> str:
    report = BenchReport(version="0", command="lab bench sglang-gpu")
    names = {"plain": PLAIN, "own": OWN, "hicache": HICACHE, "ours": OURS}
    tell(report, {names[each]: sides[each] for each in sides}, shape="1b", tokens=TOKENS)
    text = io.StringIO()
    report.show(text)
    return " ".join(text.getvalue().split())


def test_sides_that_answer_as_own_hits_do_are_compared() -> None:
    text = shown(
        plain=rounds_of(0.2, cached=0, score=-1.05),
        own=rounds_of(0.01),
        hicache=rounds_of(0.04),
        ours=rounds_of(0.02),
    )

    assert "penstock: 2 of 2 answers equal those of own hits, log-probabilities differ by 0" in text
    assert "own hits: 2 of 2 answers equal those of what it computed" in text
    assert "penstock / plain 0.10" in text
    assert "penstock / hicache 0.50" in text
    assert "WRONG" not in text


def test_a_side_with_other_log_probabilities_is_told_as_wrong_and_not_compared() -> None:
    text = shown(
        plain=rounds_of(0.2, cached=0), own=rounds_of(0.01), ours=rounds_of(0.02, score=-2)
    )

    assert "WRONG: penstock: 2 of 2 answers equal those of own hits" in text
    assert "penstock / plain" not in text


def test_a_side_that_computed_what_it_should_find_is_not_compared() -> None:
    text = shown(
        plain=rounds_of(0.2, cached=0), own=rounds_of(0.01), ours=rounds_of(0.1, cached=64)
    )

    assert "penstock is not compared: it found 64 of 4096 tokens below the device" in text
    assert "penstock / plain" not in text


def test_where_no_side_answers_the_benchmark_says_so() -> None:
    """The engine is a process that ends at once, as there is no such module."""
    engine = EngineProcess(PLAIN, Path(sys.executable), {}, module="lab.bench.no_such_engine")
    report = BenchReport(version="0", command="lab bench sglang-gpu")
    try:
        with pytest.raises(UnavailableError, match="warm: no side answers"):
            _Bench(report, SglangGpuPlan(), {PLAIN: engine}).warm()
    finally:
        engine.close()
