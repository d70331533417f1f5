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
