"""What makes a seed worth having, and seeds of old bugs."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.frozen import freeze
from lab.sim.campaign import run_seeds
from lab.sim.conditions import Plenty
from lab.sim.scenarios import Scenario
from lab.sim.world import World
from penstock.cache.settings import WriteKind
from penstock.errors import CapacityError, LeaseError, UnavailableError
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from penstock.machine.effects import Effect
    from penstock.machine.events import Event

SEEDS_FILE = Path(__file__).with_name("seeds.txt")


def seeds_of_old_bugs() -> list[tuple[Scenario, int]]:
    lines = SEEDS_FILE.read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    named = {f"{scenario.value}:": scenario for scenario in Scenario}
    return [(named.get(word, Scenario.CACHE), int(seed)) for seed, word, *_ in words]


@pytest.mark.parametrize(("scenario", "seed"), seeds_of_old_bugs())
def test_what_once_failed_does_not_fail_again(scenario: Scenario, seed: int) -> None:
    assert run_seeds(range(seed, seed + 1), scenario).failures == []


@pytest.mark.parametrize("seed", [3, 4, 7])
def test_the_events_of_a_world_lead_a_second_machine_to_the_same_state(seed: int) -> None:
    world = World(seed)
    handle = world.machine.handle
    events: list[tuple[Event, float]] = []

    def record(event: Event, now: float) -> list[Effect]:
        events.append((event, now))
        return handle(event, now)

    world.machine.handle = record  # type: ignore[method-assign]
    world.run()
    second = CacheMachine(world.conditions.settings, incarnation=world.incarnation)
    for event, now in events:
        with contextlib.suppress(CapacityError, LeaseError, UnavailableError, ValueError):
            second.handle(event, now)

    assert freeze(second) == freeze(world.machine)


def test_the_weather_knows_worlds_of_every_kind() -> None:
    weathers = [World(seed).conditions for seed in range(400)]

    assert {conditions.plenty for conditions in weathers} == set(Plenty)
    assert {conditions.managed for conditions in weathers} == {True, False}
    assert {conditions.settings.rank_count for conditions in weathers} == {1, 2, 3}
    assert {len(conditions.settings.tiers) for conditions in weathers} == {0, 1, 2, 3}
    policies = {tier.write.kind for conditions in weathers for tier in conditions.settings.tiers}
    assert policies == set(WriteKind) - {WriteKind.NONE}


def test_a_world_with_plenty_has_no_faults() -> None:
    healthy = [w for w in (World(seed).conditions for seed in range(400)) if w.healthy]

    rates = ("fail", "unreadable", "hang", "rot", "death", "tier_trouble", "reset", "cancel")
    assert healthy
    assert not [w for w in healthy if any(getattr(w, rate) for rate in rates)]
