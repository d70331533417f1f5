"""When a request whose layers are still arriving may join a step."""

from __future__ import annotations

import pytest

from penstock.cache.rates import joins_step, stall_s

NEEDS = [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("arrivals", "stall"),
    [
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([0.0, 1.0, 2.0, 3.0], 0.0),
        ([0.5, 1.0, 2.0, 3.0], 0.5),
        ([0.5, 1.4, 2.3, 3.2], 0.5),
        ([0.5, 1.7, 2.0, 3.0], 0.7),
        ([1.0, 2.0, 3.0, 4.0], 1.0),
        ([0.0, 0.0, 0.0, 9.0], 6.0),
    ],
)
def test_a_step_waits_as_long_as_its_latest_layer_makes_it(
    arrivals: list[float], stall: float
) -> None:
    assert stall_s(arrivals, NEEDS) == pytest.approx(stall)


def test_the_stall_is_what_a_step_that_waits_layer_by_layer_takes_longer() -> None:
    arrivals = [0.3, 0.2, 2.9, 3.1]
    now = 0.0
    for number, arrival in enumerate(arrivals):
        now = max(now, arrival) + (NEEDS[number + 1] - NEEDS[number] if number < 3 else 1.0)

    assert stall_s(arrivals, NEEDS) == pytest.approx(now - 4.0)


def test_a_load_joins_when_the_stall_is_a_small_share_of_the_step() -> None:
    assert joins_step([0.2, 0, 0, 0], NEEDS, step_s=4.0)
    assert not joins_step([0.21, 0, 0, 0], NEEDS, step_s=4.0)
    assert joins_step([0.21, 0, 0, 0], NEEDS, step_s=4.0, stall_share_max=0.1)


def test_a_step_without_layers_waits_for_nothing() -> None:
    assert joins_step([], [], step_s=1.0, stall_share_max=0.0)


def test_layers_and_step_must_make_sense() -> None:
    with pytest.raises(ValueError, match="3 layers arrive, 4 are needed"):
        stall_s([0.0] * 3, NEEDS)
    with pytest.raises(ValueError, match="step_s is 0"):
        joins_step([0.0] * 4, NEEDS, step_s=0)
