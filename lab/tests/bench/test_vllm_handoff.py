"""What `lab bench vllm --handoff` does around its servers; the servers themselves need vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench.vllm_handoff import HandoffPlan, run_vllm_handoff
from lab.bench.vllm_pairs import draw_prompt
from lab.bench.vllm_servers import session_of
from penstock.bench.report import BenchReport
from penstock.errors import UnavailableError


def test_sides_get_the_same_tokens_and_share_no_cached_prefix() -> None:
    prompt, other = (draw_prompt(f"512-1-3-0~{side}", tokens=512) for side in ("plain", "nixl"))

    assert prompt.tokens == other.tokens
    assert prompt.body()["cache_salt"] != other.body()["cache_salt"]


def test_prompts_of_another_round_are_others() -> None:
    prompt, other = (draw_prompt(f"512-1-{number}-0~plain", tokens=512) for number in (1, 2))

    assert prompt.tokens[:8] != other.tokens[:8]


def test_an_environment_without_vllm_is_refused() -> None:
    report = BenchReport(version="0", command="lab bench vllm --handoff")

    with pytest.raises(UnavailableError, match="has no vLLM"):
        run_vllm_handoff(report, python=Path(sys.executable), plan=HandoffPlan())


def test_a_session_has_the_processes_that_live_in_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert session_of(leader.pid) == [leader.pid]

        os.kill(leader.pid, signal.SIGKILL)
        leader.wait(60)

        assert session_of(leader.pid) == []
