"""`lab routing`: what it prints, and how it ends."""

from __future__ import annotations

import json

import pytest

from lab.cli.app import run

FEW = ("routing", "--engines", "2", "--seconds", "5", "--traffic", "chats", "--faults", "")


def test_runs_are_a_table_or_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*FEW, "--policies", "ours"]) == 0
    assert "chats, faults: none" in capsys.readouterr().out

    assert run([*FEW, "--policies", "ours,round-robin", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["policy"] for run in found["runs"]] == ["ours", "round-robin"]
    assert found["runs"][0]["requests"] == found["runs"][1]["requests"] > 0


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--engines", "0", "has '0', must be numbers from 1"),
        ("--policies", "best", "has 'best', must be of ours, round-robin"),
        ("--faults", "fire", "has 'fire', must be of deaths, rack"),
        ("--traffic", "none", "is 'none', must be one of conversation"),
    ],
)
def test_a_wrong_option_is_named(
    option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*FEW, option, value]) == 2
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert problem in printed
