"""The prefill speed that the connector reports."""

from __future__ import annotations

import pytest

from penstock.connectors.base.statistics import (
    STEP_TOKENS_MIN,
    STEPS_PLANNED_MAX,
    PrefillTimer,
)
from tests.connectors.conftest import Clock, FakeEngine, FakeRequest

BIG = STEP_TOKENS_MIN


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reported() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def speed(clock: Clock, reported: list[tuple[int, float]]) -> PrefillTimer:
    return PrefillTimer(lambda tokens, seconds: reported.append((tokens, seconds)), clock=clock)


def step(speed: PrefillTimer, clock: Clock, scheduled: dict[str, int], seconds: float) -> None:
    number = speed.begin(scheduled)
    clock.now += seconds
    speed.end(number)


def test_a_step_that_prefills_is_reported_with_the_time_between_its_two_calls(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    step(speed, clock, {"a": BIG, "b": BIG}, 0.5)

    assert reported == [(2 * BIG, 0.5)]


def test_the_time_between_steps_counts_for_none_of_them(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    step(speed, clock, {"a": BIG}, 0.5)
    clock.now += 60.0
    step(speed, clock, {"b": BIG}, 0.25)

    assert reported == [(BIG, 0.5), (BIG, 0.25)]


def test_a_step_that_is_planned_early_begins_when_the_one_before_it_has_ended(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    first = speed.begin({"a": BIG})
    clock.now += 0.125
    second = speed.begin({"a": 2 * BIG})
    third = speed.begin({"a": 1})
    for number, seconds in ((first, 0.375), (second, 1.0), (third, 0.25)):
        clock.now += seconds
        speed.end(number)

    assert reported == [(BIG, 0.5), (2 * BIG, 1.0)]
    assert third == 0


def test_results_of_a_step_that_never_came_are_forgotten(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    numbers = [speed.begin({"a": BIG}) for _ in range(STEPS_PLANNED_MAX + 1)]
    clock.now += 0.5

    speed.end(numbers[0])
    speed.end(numbers[1])

    assert reported == []
    step(speed, clock, {"a": BIG}, 0.5)
    assert reported == [(BIG, 0.5)]


@pytest.mark.parametrize(
    "scheduled",
    [
        {},
        {"decodes": 1},
        {"short prefill": BIG - 1},
        {f"decodes {number}": 1 for number in range(BIG)},
        {f"decodes with drafts {number}": 6 for number in range(BIG)},
        {"prefills": BIG, **{f"decodes {number}": 1 for number in range(BIG)}},
    ],
    ids=["empty", "decode", "short", "many decodes", "drafts", "half and half"],
)
def test_a_step_without_prefill_is_not_reported(
    speed: PrefillTimer,
    clock: Clock,
    reported: list[tuple[int, float]],
    scheduled: dict[str, int],
) -> None:
    step(speed, clock, scheduled, 0.5)

    assert reported == []


def test_decodes_beside_a_long_prefill_are_not_counted_but_their_time_is(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    step(speed, clock, {"prefills": 10 * BIG, "decodes": 1}, 0.5)

    assert reported == [(10 * BIG, 0.5)]


def test_results_without_a_planned_step_are_not_reported(
    speed: PrefillTimer, clock: Clock, reported: list[tuple[int, float]]
) -> None:
    step(speed, clock, {"a": BIG}, 0.5)
    clock.now += 0.001
    speed.end()

    assert reported == [(BIG, 0.5)]


def test_a_short_hit_is_computed_by_an_engine_that_prefills_it_sooner_than_it_could_load_it(
    clock: Clock,
) -> None:
    engine = FakeEngine(host=256, clock=clock)
    story = FakeRequest("story", range(BIG + 1))
    engine.run(story)
    assert engine.scheduler.find_tokens(FakeRequest("again", range(9)), 0) == 8

    # A hundred thousand tokens a second: five milliseconds are 500 of them.
    engine.allocate(FakeRequest("other", ()), 128)
    engine.scheduler.plan_step({"other": 512}, engine.tables.__getitem__)
    clock.now += 512 / 100_000
    engine.scheduler.apply_reports((), engine.scheduler.timed_step)

    assert engine.offload.statistics().prefill_tokens_per_s == pytest.approx(100_000)
    assert engine.scheduler.find_tokens(FakeRequest("short", range(9)), 0) == 0
    assert engine.offload.statistics().misses["recompute is quicker"] == 1


def test_without_a_measured_speed_every_hit_is_loaded() -> None:
    engine = FakeEngine()

    engine.run(FakeRequest("story", range(9)))

    assert engine.offload.statistics().prefill_tokens_per_s is None
    assert engine.scheduler.find_tokens(FakeRequest("again", range(9)), 0) == 8
