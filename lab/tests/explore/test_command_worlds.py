"""The worlds of `lab explore handoff` are as the figures of docs/simulator.md say."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.explore import Bounds
from lab.worlds.fleets import EXPLORED, AnyWorld

FIGURES = Path(__file__).parents[3] / "docs" / "measurements" / "explorer.csv"

QUICK = ("one-any-fault",)
"""Some seconds of one core, and each kind of fault."""

AMPLE_S = 3600.0
"""Far more than any of them takes, however busy the machine is."""


class Figures(NamedTuple):
    """What is published of a world."""

    state_count: int
    exhausted: bool


def published() -> dict[str, Figures]:
    with FIGURES.open(encoding="utf-8", newline="") as file:
        return {
            row["world"]: Figures(int(row["states"]), row["exhausted"] == "yes")
            for row in csv.DictReader(file)
        }


def test_figures_of_every_world_are_published() -> None:
    assert [*published()] == [world.name for world in EXPLORED]


@pytest.mark.parametrize(
    "world", [world for world in EXPLORED if world.name in QUICK], ids=lambda world: world.name
)
def test_a_world_that_is_called_exhausted_is_exhausted(world: AnyWorld) -> None:
    result = world.look(Bounds(seconds=AMPLE_S))

    assert result.finding is None
    assert result.exhausted
    assert published()[world.name] == (result.state_count, True)


@pytest.mark.long
@pytest.mark.parametrize(
    "world", [world for world in EXPLORED if world.name not in QUICK], ids=lambda world: world.name
)
def test_so_is_every_other_and_one_that_is_not_is_without_findings(world: AnyWorld) -> None:
    said = published()[world.name]

    result = world.look(Bounds(seconds=AMPLE_S if said.exhausted else 100.0))

    assert result.finding is None
    assert result.exhausted is said.exhausted
    if said.exhausted:
        assert result.state_count == said.state_count
