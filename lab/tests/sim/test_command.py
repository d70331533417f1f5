"""`lab sim`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lab.cli.app import run
from penstock.machine import copies, machine
from penstock.machine.audit import audit

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.machine.books import Books


@pytest.fixture
def _broken_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache whose third event is found wanting."""

    def refuse(books: Books) -> None:
        audit(books)
        if books.tick == 3:
            raise ValueError("the third event is one too many")

    monkeypatch.setattr(machine, "audit", refuse)


def test_seeds_that_find_nothing_end_with_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["sim", "--scenario", "cache", "--seeds", "3"])

    printed = capsys.readouterr().out
    assert status == 0
    assert printed.startswith("3 seeds, ")
    assert printed.endswith("nothing was found\n")


@pytest.mark.usefixtures("_broken_audit")
def test_a_seed_that_fails_is_named_and_ends_with_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run(["sim", "--start", "7", "--seeds", "1"])

    printed = capsys.readouterr().out
    assert status == 1
    assert "1 failed: ValueError: the third event is one too many" in printed
    assert "lab sim --scenario cache --seed 7 --trace" in printed


def test_a_trace_tells_events_and_effects_with_their_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run(["sim", "--seed", "4", "--trace"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert any("→ " in line for line in lines)
    assert any(line.strip().startswith("0.000  ") for line in lines)
    assert lines[-1].startswith("seed 4: ")


@pytest.mark.usefixtures("_broken_audit")
def test_a_trace_of_a_seed_that_fails_ends_with_the_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = run(["sim", "--seed", "4", "--trace"])

    assert status == 1
    assert "seed 4 failed: ValueError: the third" in capsys.readouterr().out.splitlines()[-1]


def test_a_trace_without_a_seed_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status = run(["sim", "--seeds", "3", "--trace"])

    assert status == 2
    assert "--seed" in capsys.readouterr().err


def test_json_goes_to_a_file_beside_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["sim", "--start", "5", "--seeds", "2", "--json", str(tmp_path / "sim.json")])

    document = json.loads((tmp_path / "sim.json").read_text(encoding="utf-8"))
    assert status == 0
    assert (document["scenario"], document["start"], document["seeds"]) == ("cache", 5, 2)
    assert document["failures"] == []
    assert document["event_kinds"]["Tick"]["count"] > 0
    assert capsys.readouterr().out.startswith("2 seeds, ")


def test_json_to_standard_output_comes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run(["sim", "--seeds", "1", "--json", "-"])

    assert json.loads(capsys.readouterr().out)["seeds"] == 1


def test_a_planted_bug_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(copies, "_give_back", lambda *_: None)

    status = run(["sim", "--seeds", "5"])

    assert status == 1
    assert "failed: " in capsys.readouterr().out
