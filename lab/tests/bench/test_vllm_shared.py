"""What `lab bench shared-prefix` makes of its replicas; the replicas themselves need vLLM."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from lab.bench.report import BenchReport
from lab.bench.store_servers import StoreServers
from lab.bench.vllm_shared import RECOMPUTE, SharedPlan, SharingSide, run_vllm_shared, tell

TOKENS = 1024


def side_that(
    name: str, *seconds: float, cached: int = TOKENS, logprob: float = -1.0
) -> SharingSide:
    """A side that answered so."""
    folder = Path("nowhere")
    plan = SharedPlan(python=folder, model=folder, tokens=TOKENS, prompts=len(seconds))
    side = SharingSide(name, plan, folder, StoreServers(folder, folder))
    side.computed = [{"seconds": 9.0, "cached": 0, "logprob": -1.0} for _ in seconds]
    side.found = [{"seconds": each, "cached": cached, "logprob": logprob} for each in seconds]
    return side


def shown(*sides: SharingSide) -> str:
    report = BenchReport(version="0", command="lab bench shared-prefix")
    tell(report, sides, tokens=TOKENS)
    text = io.StringIO()
    report.show(text)
    return " ".join(text.getvalue().split())


def test_a_side_says_how_much_was_found_and_how_much_sooner_its_first_token_came() -> None:
    text = shown(
        side_that(RECOMPUTE, 8.0, 9.0, 10.0, cached=0),
        side_that("penstock redis", 1.0, 1.0, 2.0),
        side_that("lmcache redis", 2.0, 3.0, 4.0, cached=TOKENS - 32),
    )

    assert "penstock redis: [1024, 1024, 1024] of 1024 tokens were found" in text
    assert "penstock redis: sooner than recomputing, times 8.00 " in text
    assert "penstock redis: sooner than lmcache redis, times 2.00 " in text
    assert "lmcache redis: sooner than recomputing, times: 3.00" in text


def test_a_side_whose_answers_differ_is_told_as_wrong_and_not_compared() -> None:
    text = shown(
        side_that(RECOMPUTE, 8.0, cached=0), side_that("penstock redis", 1.0, logprob=-1.5)
    )

    assert "WRONG: log-probabilities of penstock redis differ by 0.5" in text
    assert "sooner" not in text


def test_a_side_that_did_not_find_the_prefix_is_not_compared() -> None:
    text = shown(side_that(RECOMPUTE, 8.0, cached=0), side_that("vllm mooncake", 1.0, cached=512))

    assert "vllm mooncake is not compared: it had to compute what was not found" in text
    assert "sooner" not in text


def test_sides_that_cannot_run_are_told_with_the_reason(tmp_path: Path) -> None:
    """With an environment that has no vLLM, but pretends to make a model."""
    python = tmp_path / "python"
    kept = f'*) exec {sys.executable} -S "$@"'
    python.write_text(f'#!/bin/sh\ncase "$2" in *make_handoff_model*) ;; {kept};; esac\n')
    python.chmod(0o755)
    report = BenchReport(version="0", command="lab bench shared-prefix")
    names = (RECOMPUTE, "lmcache redis")

    run_vllm_shared(report, python=python, tokens=TOKENS, prompts=1, sides=names)

    text = io.StringIO()
    report.show(text)
    assert f"no side {RECOMPUTE}: the environment of {python} lacks vllm" in text.getvalue()
    assert (
        f"no side lmcache redis: the environment of {python} lacks vllm lmcache" in text.getvalue()
    )
