"""`lab explore`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lab.cli.app import run
from lab.worlds.fleets import EXPLORED
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_world_without_findings_ends_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["explore", "handoff", "--world", "two-by-two", "--seconds", "0.1"])

    printed = capsys.readouterr().out
    assert status == 0
    assert printed.startswith("two-by-two: 1 request, 2×2 ranks, 2 layers; faults: none\n")
    assert "not exhausted: stopped by 0 seconds" in printed
    assert printed.endswith("nothing was found\n")


def test_a_finding_is_told_as_a_story_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete != 0
    )

    status = run(["explore", "handoff", "--world", "two-by-two-loss", "--seconds", "60"])

    printed = capsys.readouterr().out
    assert status == 1
    assert "violation: content: a is delivered, but D" in printed
    assert "    1  " in printed
    assert "1 with findings" in printed


def test_the_worlds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["explore", "handoff", "--list"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines] == [world.name for world in EXPLORED]


def test_a_world_that_does_not_exist_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["explore", "handoff", "--world", "atlantis"])

    assert status == 2
    assert "'atlantis' is none of " in " ".join(capsys.readouterr().err.split())


def test_json_holds_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "explore.json"

    status = run(
        ["explore", "handoff", "--world", "two-by-two", "--seconds", "0.1", "--json", str(path)]
    )

    document = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0
    assert capsys.readouterr().out
    (world,) = document["worlds"]
    assert world["world"] == "two-by-two"
    assert world["states"] > 0
    assert world["exhausted"] is False
    assert world["delays"] is None
    assert world["finding"] is None


def test_json_to_standard_output_comes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run(["explore", "handoff", "--world", "two-by-two", "--seconds", "0.1", "--json", "-"])

    assert json.loads(capsys.readouterr().out)["worlds"][0]["world"] == "two-by-two"
