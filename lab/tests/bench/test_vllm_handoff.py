"""What `lab bench vllm --handoff` does around its servers; the servers themselves need vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from lab.bench.report import BenchReport
from lab.bench.vllm_handoff import HandoffPlan, run_vllm_handoff
from lab.bench.vllm_pairs import draw_prompt
from lab.bench.vllm_servers import VllmServer, session_of
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


def test_a_server_is_ready_when_it_accepts_and_not_when_it_says_so(tmp_path: Path) -> None:
    """vLLM binds its port early, says that it is ready, and listens then."""
    output = tmp_path / "output"
    os.mkfifo(output)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = VllmServer("late", bound.getsockname()[1], output)
        with output.open("w") as said:
            said.write("Application startup complete\n")
            said.flush()
            waiting = Thread(target=server.wait_ready, daemon=True)
            waiting.start()
            waiting.join(0.2)
            waited = waiting.is_alive()

            bound.listen()
            waiting.join(60)

            assert waited
            assert not waiting.is_alive()


def test_a_server_that_ends_after_it_said_it_was_ready_has_not_started(tmp_path: Path) -> None:
    output = tmp_path / "output"
    os.mkfifo(output)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = VllmServer("gone", bound.getsockname()[1], output)
        output.write_text("Application startup complete\n")

        with pytest.raises(UnavailableError, match="'gone' did not start"):
            server.wait_ready()
