"""What makes the seeds of the scenario `handoff` good, and its command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lab.cli.app import run
from lab.sim.handoff import HandoffSimulation
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_there_are_worlds_of_every_size() -> None:
    scenes = [HandoffSimulation(seed).scene for seed in range(400)]

    assert {scene.decode_count for scene in scenes} >= {1, 2, 3, 4, 5, 6, 8}
    assert {scene.prefill_count for scene in scenes} >= {1, 2, 3, 4, 6, 8}
    assert {scene.stages for scene in scenes} == {1, 2}
    assert any(scene.prefill_count % scene.decode_count for scene in scenes)
    assert {len(scene.prompts) for scene in scenes} == {1, 2, 3, 4}
    grids = [
        grid
        for scene in scenes
        for prompt in scene.prompts.values()
        for sources in prompt.wanted.values()
        for _, grid in sources
    ]
    assert any(grid.block_first for grid in grids)
    assert any(
        prompt.chunk_tokens < prompt.token_count
        for scene in scenes
        for prompt in scene.prompts.values()
    )


def test_there_are_worlds_of_eight_by_eight_ranks_with_two_prompts() -> None:
    # Ranks that hear of two handoffs in different orders are what other designs deadlock on.
    scenes = [HandoffSimulation(seed).scene for seed in range(1000)]

    largest = [scene for scene in scenes if (scene.prefill_count, scene.decode_count) == (8, 8)]

    assert largest
    assert all(len(scene.prompts) == 2 for scene in largest)


def test_a_calm_world_delivers_everything_however_bad_its_network() -> None:
    calm = [world for world in map(HandoffSimulation, range(120)) if world.conditions.calm]
    bad = [world for world in calm if world.conditions.loss > 0.1]

    for world in bad:
        world.run()

    assert len(bad) > 5
    for world in bad:
        assert set(world.decode_scheduler.ended.values()) == {HandoffOutcome.DELIVERED}


def test_the_command_runs_the_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run(
        ["sim", "--scenario", "handoff", "--seeds", "5", "--json", str(tmp_path / "sim.json")]
    )

    document = json.loads((tmp_path / "sim.json").read_text(encoding="utf-8"))
    assert status == 0
    assert document["scenario"] == "handoff"
    assert document["handoff_kinds"]["decode delivered"]["count"] > 0
    assert document["event_kinds"]["hears Claim"]["count"] > 0
    assert capsys.readouterr().out.endswith("nothing was found\n")


def test_a_seed_that_fails_is_told_with_the_command_that_tells_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete != 0
    )

    status = run(["sim", "--scenario", "handoff", "--seeds", "20"])

    printed = capsys.readouterr().out
    assert status == 1
    assert "lab sim --scenario handoff --seed " in printed
