"""Progress: which layer of which step belongs to which prompts."""

from __future__ import annotations

import pytest

from penstock.handoff.protocol.interface import Progress, StepProgress


def test_a_layer_that_is_done_is_progress_of_every_prompt_of_its_step() -> None:
    steps = StepProgress()
    steps.begin(1, {"a": 16, "b": 7}, range(2))

    assert steps.layer_done(1, 0) == [Progress("a", 0, 16), Progress("b", 0, 7)]


def test_two_steps_may_be_in_flight_and_end_in_any_order() -> None:
    steps = StepProgress()
    steps.begin(1, {"a": 16}, range(2))
    steps.begin(2, {"a": 32}, range(2))

    done = [steps.layer_done(step, layer) for step, layer in ((1, 0), (2, 0), (2, 1), (1, 1))]

    assert [each.tokens for (each,) in done] == [16, 32, 32, 16]
    assert not steps.steps


def test_what_is_not_in_flight_is_refused() -> None:
    steps = StepProgress(step_count_max=1)
    steps.begin(1, {"a": 1}, range(1))

    with pytest.raises(ValueError, match="layer 3 of step 1 is not in flight"):
        steps.layer_done(1, 3)
    with pytest.raises(ValueError, match="step is 1, which is in flight already"):
        steps.begin(1, {}, range(1))
    with pytest.raises(ValueError, match="1 steps are in flight"):
        steps.begin(2, {}, range(1))
    steps.layer_done(1, 0)
    with pytest.raises(ValueError, match="layer 0 of step 1 is not in flight"):
        steps.layer_done(1, 0)
    with pytest.raises(ValueError, match="layers is"):
        steps.begin(3, {}, range(0))
    with pytest.raises(ValueError, match="step_count_max is 0"):
        StepProgress(step_count_max=0)


def test_an_abandoned_step_makes_room() -> None:
    steps = StepProgress(step_count_max=1)
    steps.begin(1, {"a": 1}, range(1))

    steps.abandon(1)
    steps.abandon(7)

    steps.begin(2, {"a": 1}, range(1))
