"""The examples run as they are, and show what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs_and_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")

    assert capsys.readouterr().out


def test_the_chat_finds_second_turns_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    assert "client 1, turn 1: 180 tokens, found 0, 0 (device, host); block 0: never seen" in lines
    assert (
        "client 8, turn 2: 244 tokens, found 96, 96 (device, host); block 12: never seen" in lines
    )
    assert lines[-1] == "65% of 3392 prompt tokens were found."
