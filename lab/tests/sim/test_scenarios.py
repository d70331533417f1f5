"""A share of the seeds of every scenario in every test run, and all of them in a long one."""

from __future__ import annotations

import pytest

from lab.sim.campaign import run_campaign, run_seeds
from lab.sim.scenarios import Scenario, world_of


def story_of(scenario: Scenario, seed: int) -> list[str]:
    lines: list[str] = []
    world_of(scenario, seed, log=lines.append).run()
    return lines


@pytest.mark.parametrize(
    ("scenario", "first", "count", "events_mean"),
    [
        (Scenario.CACHE, 0, 50, 50),
        (Scenario.CACHE, 50, 50, 50),
        (Scenario.DISK, 0, 10, 0),
        (Scenario.DISK, 10, 10, 0),
        (Scenario.HANDOFF, 0, 50, 100),
        (Scenario.HANDOFF, 50, 50, 100),
        (Scenario.PAIRS, 0, 45, 100),
        (Scenario.PAIRS, 45, 45, 100),
        (Scenario.RUNTIME, 0, 25, 60),
        (Scenario.RUNTIME, 25, 25, 60),
        (Scenario.SHARED, 0, 8, 0),
        (Scenario.SHARED, 8, 8, 0),
    ],
)
def test_no_promise_is_broken_in_a_share_of_the_worlds(
    scenario: Scenario, first: int, count: int, events_mean: int
) -> None:
    outcome = run_seeds(range(first, first + count), scenario)

    assert outcome.failures == []
    assert outcome.coverage.events_mean > events_mean


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "count"),
    [
        (Scenario.CACHE, 20_000),
        (Scenario.DISK, 5000),
        (Scenario.HANDOFF, 20_000),
        (Scenario.PAIRS, 20_000),
        (Scenario.RUNTIME, 5000),
        (Scenario.SHARED, 2000),
    ],
)
def test_thousands_of_worlds_see_everything_and_find_nothing(
    scenario: Scenario, count: int
) -> None:
    outcome = run_campaign(range(count), scenario, jobs=2)

    assert outcome.failures == []
    assert outcome.coverage.shortfalls() == []


@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [
        (Scenario.CACHE, (1, 5, 8)),
        (Scenario.DISK, (11,)),
        (Scenario.HANDOFF, (1, 5, 8)),
        (Scenario.PAIRS, (1, 5)),
        (Scenario.RUNTIME, (2, 11, 20)),
        (Scenario.SHARED, (3,)),
    ],
)
def test_a_seed_tells_the_same_story_every_time(scenario: Scenario, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        story = story_of(scenario, seed)

        assert story == story_of(scenario, seed)
        assert len(story) > 20


@pytest.mark.parametrize("scenario", [Scenario.CACHE, Scenario.HANDOFF])
def test_different_seeds_tell_different_stories(scenario: Scenario) -> None:
    assert story_of(scenario, 1) != story_of(scenario, 2)
