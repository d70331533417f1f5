"""The life of an operation: every rank reports, it ends once, and gives back once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.operations import BlockFault, Outcome, Purpose
from penstock.cache.states import LeaseState
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.vocabulary.keys import OperationId
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


def saving(*, ranks: int = 1) -> tuple[Driver, ef.Copy]:
    """`a` and `ab` are being saved, and nobody holds them but the copy."""
    driver = make_driver(host=8, ranks=ranks)
    driver.compute("ab")
    return driver, driver.copy(Purpose.SAVE)


def loading(*, ranks: int = 1) -> tuple[Driver, ef.Copy]:
    """A request waits for `a` and `ab`."""
    driver = make_driver(host=8, ranks=ranks)
    driver.discover(1, "ab")
    driver.acquire("ab")
    return driver, driver.copy(Purpose.LOAD)


def ended(driver: Driver) -> list[tuple[Outcome, bool]]:
    return [(effect.outcome, effect.settled) for effect in driver.told(ef.Ended)]


# -------------------------------------------------------------------- done


def test_a_copy_names_its_cause_its_ends_and_its_deadline() -> None:
    driver = make_driver(host=8, operation_timeout_s=5.0)
    driver.now = 10.0

    granted = driver.acquire("ab", request="the request")
    driver.commit(granted.lease, "ab")

    copy = driver.copy(Purpose.SAVE)
    assert copy.cause == "the request"
    assert copy.deadline == 15.0
    assert copy.source_slots.tolist() == granted.table[:2].tolist()
    assert (copy.operation.incarnation, copy.operation.epoch) == (7, 0)


def test_an_operation_is_done_when_every_rank_has_reported() -> None:
    driver, copy = saving(ranks=3)

    outcomes = []
    for rank in (2, 0, 1):
        driver.report(copy, rank=rank)
        outcomes.append(ended(driver))

    assert outcomes == [[], [], [(Outcome.DONE, True)]]
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_target_cannot_be_matched_before_the_last_report() -> None:
    driver, copy = saving(ranks=2)

    driver.report(copy, rank=0)

    assert driver.cached_in("host") == set()


def test_source_and_target_are_held_while_a_copy_is_under_way() -> None:
    driver, _ = saving()

    held = {tier.name: tier.held for tier in driver.machine.statistics().tiers}

    assert held == {"device": 2, "host": 2}
    assert driver.leaving_order() == []


def test_nothing_is_held_after_the_end() -> None:
    driver, copy = saving()

    driver.complete(copy)

    held = {tier.name: tier.held for tier in driver.machine.statistics().tiers}
    assert held == {"device": 0, "host": 0}


# -------------------------------------------------------------------- failed


def test_the_failure_of_one_rank_fails_an_operation_for_all() -> None:
    driver, copy = saving(ranks=2)

    driver.report(copy, rank=0, failure="disk full")
    (end,) = driver.told(ef.Ended)
    driver.report(copy, rank=1)

    assert (end.outcome, end.failure, end.settled) == (Outcome.FAILED, "disk full", False)
    assert driver.cached_in("host") == set()


def test_a_failure_is_told_once_and_settled_once() -> None:
    driver, copy = saving(ranks=3)

    told = []
    for rank in range(3):
        driver.report(copy, rank=rank, failure="disk full")
        told.append((len(driver.told(ef.Ended)), len(driver.told(ef.Settled))))

    assert told == [(1, 0), (0, 0), (0, 1)]
    assert driver.machine.statistics().operations_ended["failed"] == 1


def test_a_failure_of_the_last_rank_is_settled_as_it_is_told() -> None:
    driver, copy = saving()

    driver.report(copy, failure="disk full")

    assert ended(driver) == [(Outcome.FAILED, True)]
    assert not driver.told(ef.Settled)


def test_slots_of_a_failed_copy_stay_until_every_rank_has_reported() -> None:
    driver, copy = saving(ranks=2)

    driver.report(copy, rank=0, failure="disk full")
    after_failure = driver.free_in("host")
    driver.report(copy, rank=1)

    assert after_failure == 6
    assert driver.free_in("host") == 8


def test_a_failed_save_leaves_the_block_where_it_was() -> None:
    driver, copy = saving()

    driver.report(copy, failure="disk full")

    assert driver.cached_in("device") == {"a", "ab"}
    assert driver.leaving_order() == ["ab", "a"]


def test_good_blocks_of_a_copy_with_faults_are_ready() -> None:
    driver, copy = saving(ranks=2)

    driver.report(copy, rank=0, faults=[(1, BlockFault.UNREADABLE)])
    driver.report(copy, rank=1)

    (end,) = driver.told(ef.Ended)
    assert end.outcome is Outcome.FAILED
    assert end.faults == ((1, BlockFault.UNREADABLE),)
    assert driver.cached_in("host") == {"a"}


def test_faults_of_different_ranks_add_up() -> None:
    driver, copy = saving(ranks=2)

    driver.report(copy, rank=0, faults=[(1, BlockFault.UNREADABLE)])
    driver.report(copy, rank=1, faults=[(0, BlockFault.UNREADABLE)])

    assert driver.cached_in("host") == set()
    assert driver.free_in("host") == 8


def test_an_unreadable_source_is_not_dropped() -> None:
    driver, copy = loading()

    driver.report(copy, faults=[(0, BlockFault.UNREADABLE)])

    assert driver.cached_in("host") == {"a", "ab"}
    assert driver.machine.statistics().blocks_corrupt == 0


def test_a_corrupt_source_is_dropped_and_counted() -> None:
    driver, copy = loading()

    driver.report(copy, faults=[(0, BlockFault.CORRUPT)])

    assert driver.cached_in("host") == {"ab"}
    assert driver.machine.statistics().blocks_corrupt == 1
    (drop,) = driver.told(ef.DropBlocks)
    assert (drop.tier, driver.words(drop.keys)) == (1, ["a"])


@pytest.mark.parametrize("ranks", [[0, 1], [1, 0]])
def test_one_rank_that_finds_a_block_corrupt_outweighs_one_that_cannot_read_it(
    ranks: list[int],
) -> None:
    driver, copy = loading(ranks=2)
    faults = {0: BlockFault.CORRUPT, 1: BlockFault.UNREADABLE}

    for rank in ranks:
        driver.report(copy, rank=rank, faults=[(0, faults[rank])])

    assert driver.cached_in("host") == {"ab"}


def test_a_corrupt_source_is_dropped_though_its_copy_was_given_up() -> None:
    driver, copy = loading()
    driver.handle(ev.Cancel(operation=copy.operation))

    driver.report(copy, faults=[(1, BlockFault.CORRUPT)])

    assert driver.cached_in("host") == {"a"}


def test_a_save_that_looks_corrupt_says_nothing_of_the_device() -> None:
    driver, copy = saving()

    driver.report(copy, faults=[(0, BlockFault.CORRUPT)])

    assert driver.cached_in("device") == {"a", "ab"}
    assert driver.cached_in("host") == {"ab"}


def test_a_fault_outside_the_operation_is_refused_and_changes_nothing() -> None:
    driver, copy = saving()
    before = freeze(driver.machine)

    for position in (2, -1):
        with pytest.raises(ValueError, match=f"faults: position {position} is outside"):
            driver.handle(
                ev.CopyReport(
                    operation=copy.operation, rank=0, faults=[(position, BlockFault.CORRUPT)]
                )
            )

    assert freeze(driver.machine) == before


# -------------------------------------------------------------------- cancelled and expired


def test_a_cancelled_operation_keeps_its_slots_until_all_ranks_reported() -> None:
    driver, copy = saving(ranks=2)

    driver.handle(ev.Cancel(operation=copy.operation))
    told, abandoned = ended(driver), driver.told(ef.Abandon)
    driver.report(copy, rank=0)
    after_one = driver.free_in("host")
    driver.report(copy, rank=1)

    assert told == [(Outcome.CANCELLED, False)]
    assert [effect.operation for effect in abandoned] == [copy.operation]
    assert after_one == 6
    assert driver.free_in("host") == 8
    assert [effect.operation for effect in driver.told(ef.Settled)] == [copy.operation]


def test_cancelling_twice_or_after_the_end_does_nothing() -> None:
    driver, copy = saving()

    driver.handle(ev.Cancel(operation=copy.operation))
    driver.handle(ev.Cancel(operation=copy.operation))
    second = list(driver.effects)
    driver.complete(copy)
    driver.handle(ev.Cancel(operation=copy.operation))

    assert second == driver.effects == []


def test_an_operation_expires_at_its_deadline() -> None:
    driver = make_driver(host=8, operation_timeout_s=5.0)
    driver.compute("ab")

    driver.tick(after_s=4.9)
    early = ended(driver)
    driver.tick(after_s=0.1)

    assert early == []
    assert ended(driver) == [(Outcome.EXPIRED, False)]
    assert driver.free_in("host") == 6
    driver.finish()
    assert driver.free_in("host") == 8


def test_an_expired_load_lets_its_request_compute() -> None:
    driver, copy = loading()

    driver.tick(after_s=60.0)
    (changed,) = driver.told(ef.LeaseChanged)
    driver.complete(copy)

    assert (changed.state, changed.cached_tokens) == (LeaseState.READY, 0)
    assert driver.cached_in("device") == set()


def test_a_late_success_fills_nothing() -> None:
    driver, copy = saving()
    driver.tick(after_s=60.0)

    driver.complete(copy)

    assert driver.cached_in("host") == set()
    assert driver.machine.statistics().operations_ended == {
        "done": 0,
        "failed": 0,
        "cancelled": 0,
        "expired": 1,
    }


# -------------------------------------------------------------------- reports that do not count


def test_a_second_report_of_a_rank_is_dropped_and_counted() -> None:
    driver, copy = saving(ranks=2)
    driver.report(copy, rank=0)
    before = freeze(driver.machine)

    driver.handle(ev.CopyReport(operation=copy.operation, rank=0, failure="twice"))

    assert driver.effects == []
    assert freeze(driver.machine) == before
    assert driver.machine.statistics().reports_late == 1


def test_a_report_after_the_end_is_dropped_and_counted() -> None:
    driver, copy = saving()
    driver.complete(copy)
    before = freeze(driver.machine)

    for _ in range(3):
        driver.handle(ev.CopyReport(operation=copy.operation, rank=0))

    assert freeze(driver.machine) == before
    assert driver.machine.statistics().reports_late == 3


@pytest.mark.parametrize(
    "change", [{"incarnation": 8}, {"epoch": 1}, {"sequence": 99}], ids=lambda c: next(iter(c))
)
def test_an_answer_to_another_life_is_dropped_and_counted(change: dict[str, int]) -> None:
    driver, copy = saving()
    before = freeze(driver.machine)

    driver.handle(ev.CopyReport(operation=copy.operation._replace(**change), rank=0))

    assert freeze(driver.machine) == before
    assert driver.machine.statistics().reports_late == 1


def test_a_report_of_an_unknown_rank_is_dropped_and_counted() -> None:
    driver, copy = saving(ranks=2)

    driver.handle(ev.CopyReport(operation=copy.operation, rank=2))

    assert driver.machine.statistics().reports_late == 1
    assert driver.machine.statistics().operations_running == 1


def test_operations_are_named_once() -> None:
    driver = make_driver(host=8, disk=8, operation_blocks_max=1)
    driver.store("abc")
    driver.reset()
    driver.store("abc")

    names = [OperationId(7, epoch, sequence) for epoch, sequence in _ids(driver)]

    assert len(names) == driver.machine.statistics().operations_started


def _ids(driver: Driver) -> set[tuple[int, int]]:
    return {
        (event.operation.epoch, event.operation.sequence)
        for event, _ in driver.past
        if isinstance(event, ev.CopyReport)
    }


# -------------------------------------------------------------------- through the hub


def test_a_stage_that_fails_for_one_block_loads_the_others() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "abc")
    lease = driver.acquire("abc").lease

    driver.report(driver.copy(Purpose.STAGE), faults=[(2, BlockFault.UNREADABLE)])
    load = driver.copy(Purpose.LOAD)
    driver.complete(load)

    assert driver.words(load.keys) == ["a", "ab"]
    assert driver.books.leases[lease].token_count == 4
    assert driver.books.leases[lease].state is LeaseState.READY


def test_a_stage_whose_requests_went_away_loads_nothing() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")
    driver.handle(ev.Prefetch(keys=driver.keys("ab"), cause="ahead of need"))

    driver.complete(driver.copy(Purpose.STAGE))

    assert not driver.copies
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_load_that_follows_a_stage_keeps_its_deadline() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")
    driver.acquire("ab", deadline=9.0)

    driver.now = 4.0
    driver.complete(driver.copy(Purpose.STAGE))

    assert driver.copy(Purpose.LOAD).deadline == 9.0
