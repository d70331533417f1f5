"""Moving medians and the meter of one hop."""

from __future__ import annotations

from random import Random
from statistics import median_high

import pytest

from lab.fixtures.frozen import freeze_hop, freeze_median
from penstock.cache.rates import SAMPLE_COUNT, STEPS_TO_TELL, HopMeter, MovingMedian


def sample_count(rate: MovingMedian) -> int:
    """How many samples it is the median of."""
    _, *samples = freeze_median(rate)
    return len(samples)


def test_nothing_was_measured_at_first() -> None:
    assert MovingMedian(age_s=60.0).value(0.0) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_value_is_the_median_of_the_last_samples(seed: int) -> None:
    random = Random(seed)
    rate = MovingMedian(age_s=60.0)
    samples = [float(random.randint(1, 20)) for _ in range(200)]

    for count, sample in enumerate(samples, start=1):
        rate.add(sample, 0.0)
        last = samples[max(0, count - SAMPLE_COUNT) : count]
        assert rate.value(0.0) == median_high(last)
        assert sample_count(rate) == len(last)


def test_one_sample_far_off_changes_nothing() -> None:
    rate = MovingMedian(age_s=60.0)
    for _ in range(5):
        rate.add(100.0, 0.0)

    rate.add(0.001, 0.0)

    assert rate.value(0.0) == 100.0


def test_a_rate_is_not_believed_when_its_last_sample_is_old() -> None:
    rate = MovingMedian(age_s=60.0)
    rate.add(100.0, now=0.0)
    rate.add(100.0, now=10.0)

    assert rate.value(70.0) == 100.0
    assert rate.value(70.1) is None


def test_stale_samples_do_not_outvote_a_fresh_one() -> None:
    rate = MovingMedian(age_s=60.0)
    for _ in range(SAMPLE_COUNT):
        rate.add(1.0, now=0.0)

    rate.add(100.0, now=100.0)

    assert rate.value(100.0) == 100.0
    assert sample_count(rate) == 1


@pytest.fixture
def meter() -> HopMeter:
    return HopMeter(age_s=60.0)


def test_a_copy_alone_is_measured_from_its_start_to_its_end(meter: HopMeter) -> None:
    meter.begin(10, now=1.0)
    meter.end(10, now=3.0, whole=True)

    meter.tick(3.0)

    assert meter.seen.value(3.0) == 5.0
    assert meter.queued == 0


def test_copies_that_wait_for_each_other_are_measured_together(meter: HopMeter) -> None:
    meter.begin(10, now=0.0)
    meter.begin(10, now=0.0)
    meter.end(10, now=2.0, whole=True)
    meter.end(10, now=2.0 + 1e-6, whole=True)

    meter.tick(3.0)

    assert meter.seen.value(2.0) == pytest.approx(10.0)


def test_idle_time_does_not_count(meter: HopMeter) -> None:
    meter.begin(10, now=0.0)
    meter.end(10, now=1.0, whole=True)
    meter.begin(10, now=50.0)
    meter.end(10, now=51.0, whole=True)

    meter.tick(51.0)

    assert meter.seen.value(51.0) == 10.0
    assert sample_count(meter.seen) == 2


def test_a_hop_that_is_never_idle_is_measured_all_the_same(meter: HopMeter) -> None:
    meter.begin(10, now=0.0)
    for step in range(1, 5):
        meter.begin(10, now=float(step))
        meter.end(10, now=float(step), whole=True)
        meter.tick(float(step))

    assert meter.queued == 10
    assert meter.seen.value(4.0) == 10.0
    assert sample_count(meter.seen) == 4


def test_a_copy_that_was_given_up_tells_nothing(meter: HopMeter) -> None:
    meter.begin(10, now=0.0)
    meter.begin(10, now=0.0)
    meter.end(10, now=1.0, whole=True)
    meter.end(10, now=30.0, whole=False)

    meter.tick(30.0)

    assert meter.seen.value(30.0) is None
    assert meter.queued == 0


def test_what_took_no_time_tells_nothing(meter: HopMeter) -> None:
    meter.begin(10, now=1.0)
    meter.end(10, now=1.0, whole=True)
    meter.tick(1.0)
    meter.begin(10, now=2.0)
    meter.end(10, now=3.0, whole=True)
    meter.tick(3.0)

    assert meter.seen.value(3.0) == 10.0


def test_a_copy_that_ends_within_a_few_steps_decides_nothing(meter: HopMeter) -> None:
    meter.begin(10, now=0.0)
    for step in range(1, STEPS_TO_TELL):
        meter.tick(step / 10)

    meter.end(10, now=1.0, whole=True)
    meter.tick(1.0)

    assert meter.seen.value(1.0) == 10.0
    assert meter.bound.value(1.0) is None


def test_of_a_copy_that_takes_longer_than_a_few_steps_the_time_before_these_decides(
    meter: HopMeter,
) -> None:
    meter.begin(10, now=0.0)
    for step in range(1, 20):
        meter.tick(step / 10)

    meter.end(10, now=2.0, whole=True)
    meter.tick(2.0)

    assert meter.seen.value(2.0) == 5.0
    assert meter.bound.value(2.0) == pytest.approx(10 / 1.5)


def test_quick_loads_that_a_long_step_hides_do_not_look_slow(meter: HopMeter) -> None:
    """Eight requests come at once: nothing is computed until the first is loaded, then a lot is."""
    for _ in range(8):
        meter.begin(100, now=0.0)
    for step in range(1, 11):
        meter.tick(step / 1000)
    meter.end(100, now=0.010, whole=True)
    meter.tick(0.011)
    for _ in range(7):
        meter.end(100, now=0.300, whole=True)
    meter.tick(0.301)

    assert meter.seen.value(0.301) == pytest.approx(10_000)
    assert meter.bound.value(0.301) == pytest.approx(10_000)
    assert sample_count(meter.seen) == 2
    assert sample_count(meter.bound) == 1, "the seven ended at some time in the long step"


def test_while_a_copy_waits_for_those_before_it_all_time_counts(meter: HopMeter) -> None:
    for _ in range(3):
        meter.begin(100, now=0.0)
    for step in range(1, 31):
        if step % 10 == 0:
            meter.end(100, now=float(step), whole=True)
        meter.tick(float(step))

    # The third had nothing behind it: it was under way until five ticks before its end, at least.
    assert [*meter.bound._recent] == pytest.approx([10.0, 10.0, 20.0])


def test_copies_one_after_the_other_are_not_overdue_together(meter: HopMeter) -> None:
    for step in range(20):
        meter.begin(10, now=float(step))
        meter.tick(float(step))
        if step:
            meter.end(10, now=float(step), whole=True)

    assert sample_count(meter.seen) > 10
    assert meter.bound.value(20.0) is None


def test_a_backlog_that_the_hop_does_not_work_off_decides(meter: HopMeter) -> None:
    for step in range(1, 20):
        meter.begin(20, now=float(step))
        meter.tick(float(step))
        meter.end(10, now=float(step), whole=True)

    assert meter.bound.value(20.0) == 10.0


def test_meters_with_different_numbers_of_overdue_blocks_are_not_in_the_same_state() -> None:
    """Both have three blocks under way: of one, all were asked for long ago, of the other, one."""
    all_late, one_late = HopMeter(age_s=60.0), HopMeter(age_s=60.0)
    all_late.begin(3, now=0.0)
    one_late.begin(2, now=0.0)
    for meter in (all_late, one_late):
        for step in range(STEPS_TO_TELL):
            meter.tick(float(step))
    one_late.begin(2, now=0.0)
    one_late.end(1, now=0.0, whole=False)

    assert all_late.queued == one_late.queued
    assert freeze_hop(all_late) != freeze_hop(one_late)
