"""`lab demo`: a toy engine over three tiers."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from lab.cli import demo
from lab.cli.app import run
from lab.demo import Demonstration, run_demo

if TYPE_CHECKING:
    from pathlib import Path

SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a run of the command left behind."""

    status: int
    text: str
    document: dict[str, Any]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    path: Path = tmp_path_factory.mktemp("demo") / "demo.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = run(["demo", "--seed", str(SEED), "--json", str(path)])
    return Shown(status=status, text=printed.getvalue(), document=json.loads(path.read_text()))


@pytest.fixture(scope="module")
def played() -> Demonstration:
    return run_demo(SEED)


def test_the_demonstration_ends_well_when_every_byte_is_right(shown: Shown) -> None:
    assert shown.status == 0
    assert "All bytes were right" in shown.text
    assert shown.document["fine"]
    assert shown.document["bytes_verified"] > 10_000_000


def test_it_needs_every_tier(shown: Shown) -> None:
    found = shown.document["tokens"]["found"]

    assert list(found) == ["device", "host", "archive"]
    assert all(found.values())


def test_it_shows_requests_that_missed_for_many_reasons(shown: Shown) -> None:
    reasons = {"never seen", "evicted", "namespace", "over quota", "corrupt", "reset"}

    assert reasons <= shown.document["misses"].keys()
    assert sum(shown.document["misses"].values()) == shown.document["requests"]


def test_it_finds_every_block_that_it_damages(shown: Shown) -> None:
    checksums = shown.document["checksums"]

    assert checksums["blocks_corrupt"] == checksums["bytes_damaged"] == 2
    assert checksums["checked"] > 1000


def test_it_tells_a_story_and_explains_a_miss(shown: Shown) -> None:
    assert any("load failed" in line for line in shown.document["story"]["told"])
    assert "was not found" in shown.document["explained"]
    assert f"The story of {shown.document['story']['of']!r}" in shown.text


def test_one_seed_always_plays_the_same(shown: Shown, played: Demonstration) -> None:
    of_the_run = {"penstock", "seconds"}
    told = {name: value for name, value in shown.document.items() if name not in of_the_run}

    assert told == played.document()


def test_a_finding_ends_the_demonstration_with_status_one(
    played: Demonstration, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = "acme/ada turn 2: the KV of 16 of 320 tokens is not what the model computes"
    monkeypatch.setattr(demo, "run_demo", lambda _seed: replace(played, findings=(finding,)))

    status = run(["demo"])

    printed = capsys.readouterr().out
    assert status == 1
    assert finding in printed
    assert "All bytes were right" not in printed


def test_json_to_standard_output_is_alone(
    played: Demonstration, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda _seed: played)

    status = run(["demo", "--json", "-"])

    assert status == 0
    assert json.loads(capsys.readouterr().out)["seed"] == SEED
