"""The options of `lab bench vllm`; the benchmark itself needs vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.cli.app import run

if TYPE_CHECKING:
    import pytest


def test_a_workload_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "vllm", "--only", "chats,talks"]) == 2
    printed = capsys.readouterr().err
    assert "--only" in printed
    assert "chats,talks" in printed


def test_the_parts_of_the_handoff_are_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "vllm", "--handoff", "--only", "chats"]) == 2
    assert "first-token" in capsys.readouterr().err


def test_lengths_of_prompts_must_be_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "vllm", "--handoff", "--tokens", "512,0"]) == 2
    printed = capsys.readouterr().err
    assert "--tokens" in printed
    assert "512,0" in printed


def test_a_side_that_shares_nothing_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "shared-prefix", "--only", "carrier pigeons"]) == 2
    assert "carrier pigeons" in capsys.readouterr().err
