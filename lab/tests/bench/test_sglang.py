"""What `lab bench sglang` makes of its processes; the processes themselves need SGLang."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from lab.bench.report import BenchReport
from lab.bench.sglang import PLAIN, SglangSide, run_sglang, tell

TOKENS = 1024


def side_that(
    name: str, *seconds: float, cached: int = TOKENS, logprob: float = -1.0
) -> SglangSide:
    """A side that answered so."""
    folder = Path("nowhere")
    side = SglangSide(name, folder, folder, {}, lambda: 0)
    side.answers = [
        {
            "seconds": each,
            "cached": cached,
            "logprob": logprob,
            "thread_s": each / 2,
            "process_s": each,
        }
        for each in seconds
    ]
    return side


def shown(*sides: SglangSide) -> str:
    report = BenchReport(version="0", command="lab bench sglang")
    tell(report, sides, tokens=TOKENS)
    text = io.StringIO()
    report.show(text)
    return " ".join(text.getvalue().split())


def test_a_side_says_what_was_found_and_how_much_sooner_its_first_token_came() -> None:
    text = shown(
        side_that(PLAIN, 8.0, 9.0, 10.0, cached=0),
        side_that("hicache file", 2.0, 3.0, 4.0),
        side_that("penstock storage", 1.0, 1.0, 2.0),
    )

    assert "penstock storage: [1024, 1024, 1024] of 1024 tokens were found" in text
    assert "penstock storage: sooner than plain, times 8.00 " in text
    assert "penstock storage: sooner than hicache file, times 2.00 " in text
    assert "CPU of the scheduler's thread" in text


def test_a_side_whose_answers_differ_is_told_as_wrong_and_not_compared() -> None:
    text = shown(side_that(PLAIN, 8.0, cached=0), side_that("penstock linker", 1.0, logprob=-1.5))

    assert "WRONG: log-probabilities of penstock linker differ by 0.5" in text
    assert "sooner" not in text


def test_a_side_that_did_not_find_all_of_a_prompt_is_not_compared() -> None:
    text = shown(side_that(PLAIN, 8.0, cached=0), side_that("penstock linker", 1.0, cached=512))

    assert "penstock linker is not compared: it had to compute what was not found" in text
    assert "sooner" not in text


def test_sides_that_cannot_run_are_told_with_the_reason(tmp_path: Path) -> None:
    """With an environment that has no SGLang, but pretends to make a model."""
    python = tmp_path / "python"
    kept = f'*) exec {sys.executable} -S "$@"'
    python.write_text(f'#!/bin/sh\ncase "$2" in *make_model*) ;; {kept};; esac\n')
    python.chmod(0o755)
    report = BenchReport(version="0", command="lab bench sglang")
    names = (PLAIN, "penstock storage")

    run_sglang(report, python=python, tokens=TOKENS, prompts=1, sides=names)

    text = io.StringIO()
    report.show(text)
    assert "no side penstock storage: the engine of side 'penstock storage' ended" in (
        text.getvalue()
    )
    assert f"no side {PLAIN}: the engine of side '{PLAIN}' ended" in text.getvalue()
