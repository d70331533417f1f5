"""Reports that never arrive: the owner sees it, and what they told of fails in time."""

from __future__ import annotations

import logging

import pytest

from penstock.cache.operations import Outcome
from penstock.machine import effects as ef
from penstock.runtime import rank_links
from penstock.runtime.messages import NAME_BYTES_MAX, decode_plan
from penstock.runtime.rank_links import ASK_S, GRACE_S, SequenceNumbers
from penstock.vocabulary.keys import OperationId
from tests.runtime.conftest import Fleet


class Clock:
    """The owner's time, which passes when the test says so."""

    def __init__(self, fleet: Fleet) -> None:
        self.now = 1000.0
        fleet.owner._driver._clock = lambda: self.now


def step(fleet: Fleet, *, losing: int | None = None) -> None:
    """A step of everybody; what one of the ranks reports does not arrive."""
    fleet.plan()
    for number, rank in enumerate(fleet.ranks):
        report = rank.step()
        if report is not None and number != losing:
            fleet.owner.ranks.receive(report)


def outcomes(fleet: Fleet) -> list[tuple[Outcome, str, bool]]:
    ended = [each for each in fleet.owner.poll() if isinstance(each, ef.Ended)]
    return [(each.outcome, each.failure, each.settled) for each in ended]


def test_a_gap_between_reports_fails_what_the_missing_one_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    fleet = Fleet(ranks=2)
    clock = Clock(fleet)
    lost, other = fleet.keys(2), fleet.keys(2, first=100)
    fleet.owner.save(lost, [0, 1], cause="lost")
    step(fleet, losing=1)
    fleet.owner.save(other, [2, 3], cause="other")
    step(fleet)
    assert outcomes(fleet) == [(Outcome.DONE, "", True)]

    step(fleet)  # The gap is seen, and may still be a message that was overtaken.
    early = outcomes(fleet)
    clock.now += GRACE_S
    step(fleet)

    assert early == []
    assert outcomes(fleet) == [(Outcome.FAILED, "the report of rank 1 on it was lost", True)]
    assert not fleet.owner.busy
    assert fleet.owner.lookup(other).ready == 2
    assert fleet.owner.statistics().reports_lost == 1
    assert [record.getMessage() for record in caplog.records] == ["reports lost: rank=1 count=1"]
    fleet.owner.audit()


def test_what_a_rank_still_has_in_hand_is_not_given_up() -> None:
    fleet = Fleet(ranks=1)
    clock = Clock(fleet)
    rank = fleet.ranks[0]
    fleet.owner.save(fleet.keys(1), [0], cause="lost")
    fleet.plan()
    assert rank.step() is not None  # And nobody hears it.
    fleet.owner.save(fleet.keys(1, first=100), [1], cause="heard")
    fleet.owner.save(fleet.keys(4, first=200), [2, 3, 4, 5], cause="slow")
    fleet.plan()
    report = rank.step(budget_bytes=0)  # A block: the first of them is through.
    assert report is not None
    fleet.owner.ranks.receive(report)
    fleet.owner.step()
    clock.now += GRACE_S
    fleet.plan()

    told = []
    while rank.busy:
        report = rank.step(budget_bytes=0)
        if report is not None:
            fleet.owner.ranks.receive(report)
        told += outcomes(fleet)

    assert [outcome for outcome, _, _ in told] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]


def test_a_report_that_was_overtaken_is_not_lost() -> None:
    fleet = Fleet(ranks=1)
    clock = Clock(fleet)
    reports = []
    for chain in range(3):
        fleet.owner.save(fleet.keys(1, first=100 * chain), [chain], cause=f"chain {chain}")
        fleet.plan()
        report = fleet.ranks[0].step()
        assert report is not None
        reports.append(report)
    for report in (reports[2], reports[0]):
        fleet.owner.ranks.receive(report)
    fleet.owner.step()
    clock.now += GRACE_S / 2

    fleet.owner.ranks.receive(reports[1])
    clock.now += GRACE_S
    fleet.owner.step()

    assert fleet.owner.ranks.take_plan() is None
    assert fleet.owner.statistics().reports_lost == 0
    assert [outcome for outcome, _, _ in outcomes(fleet)] == [Outcome.DONE] * 3


def test_the_last_report_of_all_is_missed_when_its_operation_is_overdue() -> None:
    fleet = Fleet(ranks=2, settings="operation_timeout_s = 10.0")
    clock = Clock(fleet)
    fleet.owner.save(fleet.keys(2), [0, 1], cause="lost")
    step(fleet, losing=0)
    clock.now += 10.0
    step(fleet)
    expired = outcomes(fleet)
    still_out_of_use = fleet.owner.busy

    clock.now += max(GRACE_S, ASK_S)
    step(fleet)

    ((outcome, _, settled),) = expired
    assert (outcome, settled, still_out_of_use) == (Outcome.EXPIRED, False, True)
    assert not fleet.owner.busy
    assert [type(each) for each in fleet.owner.poll()] == [ef.Settled]
    fleet.owner.audit()


def test_an_idle_owner_wakes_when_a_gap_has_lasted_long_enough() -> None:
    fleet = Fleet(ranks=1)
    clock = Clock(fleet)
    fleet.owner.save(fleet.keys(1), [0], cause="lost")
    step(fleet, losing=0)
    fleet.owner.save(fleet.keys(1, first=100), [1], cause="heard")
    step(fleet)
    fleet.owner.step()

    assert fleet.owner._driver.next_due() == clock.now + GRACE_S


def test_an_idle_owner_wakes_for_the_gap_that_was_seen_first() -> None:
    fleet = Fleet(ranks=2)
    clock = Clock(fleet)
    for number, losing in enumerate((0, 1, None)):
        fleet.owner.save(fleet.keys(1, first=100 * number), [number], cause=f"save {number}")
        step(fleet, losing=losing)
        fleet.owner.step()
        clock.now += GRACE_S / 4

    assert fleet.owner._driver.next_due() == clock.now - 2 * GRACE_S / 4 + GRACE_S


@pytest.mark.parametrize(
    ("came", "missing"),
    [([], 0), ([1], 0), ([2], 1), ([3, 1], 1), ([5], 4), ([3, 1, 2], 0), ([1, 1, 3, 3], 1)],
)
def test_numbers_know_what_is_missing(came: list[int], missing: int) -> None:
    numbers = SequenceNumbers()
    for number in came:
        numbers.add(number)

    assert numbers.missing == missing
    assert numbers.skip_missing() == missing
    assert numbers.missing == 0


def test_a_plan_has_a_bound_whatever_it_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(ranks=1)
    monkeypatch.setattr(rank_links, "PLAN_BYTES", 10 * NAME_BYTES_MAX)
    queue = fleet.owner._driver.links
    names = [OperationId(7, 0, number) for number in range(1, 26)]
    for name in names:
        queue.order(ef.Abandon(operation=name))
        queue.ask(name)
        queue.ask(name)  # A question that waits is not asked twice.

    plans = []
    while (plan := queue.take_plan()) is not None:
        plans.append(decode_plan(plan))

    assert [len(plan.abandoned) for plan in plans] == [10, 10, 5, 0, 0]
    assert [len(plan.asked) for plan in plans] == [0, 0, 5, 10, 10]
    assert [each.sequence for plan in plans for each in plan.asked] == list(range(1, 26))
