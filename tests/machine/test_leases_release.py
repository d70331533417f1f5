"""Leases that end, at each point of a request's life, and blocks that do not arrive."""

from __future__ import annotations

import pytest

from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

SELDOM = WritePolicy(kind=WriteKind.SELECTIVE, hits=99)
"""A tier that gets nothing unless somebody insists."""


# -------------------------------------------------------------------- release


def test_a_request_aborted_before_its_first_step_leaves_nothing() -> None:
    driver = make_driver()

    driver.release(driver.acquire("ab").lease)

    assert driver.free_in("device") == 8
    assert driver.machine.statistics().blocks_known == 0


def test_a_request_aborted_between_two_chunks_leaves_what_it_published() -> None:
    driver = make_driver()
    lease = driver.acquire("abc").lease
    driver.commit(lease, "a", more_tokens=1)

    driver.release(lease)

    assert driver.cached_in("device") == {"a"}
    assert driver.free_in("device") == 7


def test_a_request_aborted_while_it_waits_cancels_a_load_nobody_else_wants() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease
    load = driver.copy(Purpose.LOAD)

    driver.release(lease)

    assert driver.told(ef.Abandon) == [ef.Abandon(operation=load.operation)]
    assert driver.free_in("device") == 6


def test_slots_of_a_cancelled_load_come_back_when_every_rank_reported() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease
    load = driver.copy(Purpose.LOAD)

    driver.release(lease)
    driver.report(load, rank=1)
    after_one = driver.free_in("device")
    driver.report(load, rank=0)

    assert after_one == 6
    assert driver.free_in("device") == 8


def test_a_load_goes_on_while_another_request_waits_for_it() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    first, second = driver.acquire("ab"), driver.acquire("ab")

    driver.release(first.lease)
    abandoned = driver.told(ef.Abandon)
    driver.finish()

    assert not abandoned
    assert driver.books.leases[second.lease].state is LeaseState.READY


def test_a_request_aborted_while_its_blocks_are_on_the_way_to_the_hub_leaks_nothing() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")

    driver.release(driver.acquire("ab").lease)
    driver.finish()

    assert driver.free_in("device") == driver.free_in("host") == 8
    assert driver.cached_in("disk") == {"a", "ab"}


def test_a_lost_lease_is_released_like_any_other() -> None:
    driver = make_driver()
    lease = driver.acquire("ab").lease
    driver.commit(lease, "ab")
    driver.handle(ev.RankLost(rank=0))

    driver.release(lease)

    assert driver.free_in("device") == 8


def test_releasing_counts_as_a_use() -> None:
    driver = make_driver(device=12)
    first = driver.acquire("a").lease
    driver.commit(first, "a")
    driver.compute("b")

    driver.release(first)

    assert driver.leaving_order() == ["b", "a"]


# -------------------------------------------------------------------- preempt


def test_a_preempted_request_has_its_blocks_saved_whatever_the_policy() -> None:
    driver = make_driver(host=TierSettings(name="host", slot_count=8, write=SELDOM))
    lease = driver.acquire("ab").lease
    driver.commit(lease, "ab")
    before = dict(driver.copies)

    driver.preempt(lease)
    driver.finish()

    assert not before
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_preempted_request_gives_its_own_blocks_back() -> None:
    driver = make_driver(host=8)
    lease = driver.acquire("abc").lease
    driver.commit(lease, "a")

    driver.preempt(lease)
    driver.finish()

    assert driver.free_in("device") == 7
    assert not driver.books.leases


def test_a_preempted_request_finds_its_blocks_when_it_returns() -> None:
    driver = make_driver(device=4, host=TierSettings(name="host", slot_count=8, write=SELDOM))
    lease = driver.acquire("abc").lease
    driver.commit(lease, "abc")
    driver.preempt(lease)
    driver.finish()
    driver.store("xyz")

    granted = driver.acquire("abc")

    assert granted.cached_by_tier == (0, 6)


def test_blocks_computed_twice_are_saved_as_well() -> None:
    driver = make_driver(host=TierSettings(name="host", slot_count=8, write=SELDOM))
    first, second = (driver.acquire("ab").lease for _ in range(2))
    driver.commit(first, "a")
    driver.commit(second, "ab")

    driver.preempt(second)
    driver.finish()

    assert driver.cached_in("host") == {"a", "ab"}


def test_a_request_preempted_while_it_waits_gives_up_its_load() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")

    driver.preempt(driver.acquire("ab").lease)
    driver.finish()

    assert driver.free_in("device") == 8
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_preempted_request_of_an_earlier_epoch_saves_nothing() -> None:
    driver = make_driver(host=8)
    lease = driver.acquire("ab").lease
    driver.commit(lease, "ab")
    driver.finish()
    driver.reset()

    driver.preempt(lease)

    assert not driver.copies
    assert driver.free_in("device") == driver.free_in("host") == 8


def test_preempting_without_lower_tiers_is_a_release() -> None:
    driver = make_driver()
    lease = driver.acquire("ab").lease
    driver.commit(lease, "ab")

    driver.preempt(lease)

    assert driver.cached_in("device") == {"a", "ab"}


# -------------------------------------------------------------------- blocks that do not arrive


@pytest.mark.parametrize("fault", list(BlockFault))
def test_a_request_computes_from_the_first_block_that_did_not_arrive(fault: BlockFault) -> None:
    driver = make_driver(host=8)
    driver.discover(1, "abcd")
    granted = driver.acquire("abcd")

    driver.report(driver.copy(Purpose.LOAD), faults=[(1, fault), (3, fault)])

    (changed,) = driver.told(ef.LeaseChanged)
    assert changed.state is LeaseState.READY
    assert changed.cached_tokens == 2
    assert changed.table[0] == granted.table[0]
    assert len(changed.table) == 5


def test_slots_of_blocks_that_did_not_arrive_are_not_computed_into() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.discover(1, "ab")
    granted = driver.acquire("ab")
    load = driver.copy(Purpose.LOAD)

    driver.report(load, rank=0, failure="link down")

    (changed,) = driver.told(ef.LeaseChanged)
    assert changed.state is LeaseState.READY
    assert not set(changed.table.tolist()) & set(granted.table[:2].tolist())


def test_a_request_that_computes_what_did_not_arrive_publishes_it() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "abc")
    lease = driver.acquire("abc").lease
    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.CORRUPT)])

    driver.commit(lease, "abc")
    driver.release(lease)
    driver.finish()

    assert driver.cached_in("device") == driver.cached_in("host") == {"a", "ab", "abc"}
    assert driver.free_in("device") == 5


def test_a_block_that_arrived_behind_a_missing_one_stays_cached() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "abc")
    driver.acquire("abc")

    driver.report(driver.copy(Purpose.LOAD), faults=[(1, BlockFault.UNREADABLE)])

    assert driver.cached_in("device") == {"a", "abc"}


def test_a_request_leaves_copies_that_bring_it_nothing_any_more() -> None:
    driver = make_driver(host=8, operation_blocks_max=1)
    driver.discover(1, "abc")
    lease = driver.acquire("abc").lease
    first = next(iter(driver.copies.values()))

    driver.report(first, faults=[(0, BlockFault.UNREADABLE)])

    assert driver.books.leases[lease].state is LeaseState.READY
    assert len(driver.told(ef.Abandon)) == 2
    driver.finish()
    assert driver.free_in("device") == 8 - 4


def test_a_request_is_lost_when_there_is_no_room_to_compute_what_did_not_arrive() -> None:
    driver = make_driver(device=3, host=8, ranks=2)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease

    driver.report(driver.copy(Purpose.LOAD), rank=0, failure="link down")

    (changed,) = driver.told(ef.LeaseChanged)
    assert (changed.lease, changed.state) == (lease, LeaseState.LOST)
    assert driver.machine.statistics().leases_lost == 1


def test_after_a_lost_lease_everything_comes_back() -> None:
    driver = make_driver(device=3, host=8, ranks=2)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease
    driver.report(driver.copy(Purpose.LOAD), rank=0, failure="link down")

    with pytest.raises(CapacityError):
        driver.acquire("xy")
    driver.finish()
    driver.release(lease)

    assert driver.free_in("device") == 3
    assert driver.acquire("ab").cached_tokens == 4


def test_a_request_that_waits_for_two_copies_is_told_once() -> None:
    driver = make_driver(host=8, operation_blocks_max=1)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease

    told = []
    while driver.copies:
        driver.complete(next(iter(driver.copies.values())))
        told += driver.told(ef.LeaseChanged)

    assert [(changed.lease, changed.state) for changed in told] == [(lease, LeaseState.READY)]


def test_two_copies_that_fail_at_once_leave_one_request_that_computes() -> None:
    driver = make_driver(device=12, host=8, operation_blocks_max=1)
    driver.discover(1, "abc")
    lease = driver.acquire("abc").lease

    driver.handle(ev.TierOff(tier=1, fenced=True))

    assert driver.books.leases[lease].state is LeaseState.READY
    assert driver.books.leases[lease].token_count == 0


def test_of_two_requests_that_lose_their_blocks_at_once_one_finds_room_to_compute() -> None:
    driver = make_driver(device=5, host=8, operation_blocks_max=1)
    driver.discover(1, "abc")
    first, second = driver.acquire("abc").lease, driver.acquire("abc").lease

    driver.handle(ev.TierOff(tier=1, fenced=True))

    states = {lease: driver.books.leases[lease].state for lease in (first, second)}
    assert states == {first: LeaseState.READY, second: LeaseState.LOST}
    driver.release(first)
    driver.release(second)
    assert driver.free_in("device") == 5


def test_what_one_request_gives_back_serves_another_that_lost_the_same_blocks() -> None:
    driver = make_driver(device=8, host=8, ranks=2)
    driver.discover(1, "ab")
    small = driver.acquire("ab").lease
    large = driver.acquire("abcde").lease
    shared = driver.copy(Purpose.LOAD)
    assert driver.free_in("device") == 1
    driver.acquire("", more_tokens=1)

    driver.report(shared, rank=0)
    driver.report(shared, rank=1, failure="link down")

    # Both let go of the two slots that they shared, and these are enough for one of them.
    states = {lease: driver.books.leases[lease].state for lease in (small, large)}
    assert states == {small: LeaseState.READY, large: LeaseState.LOST}


def test_a_lease_is_lost_once() -> None:
    driver = make_driver(ranks=2)
    driver.acquire("a")

    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankLost(rank=1))

    assert not driver.told(ef.LeaseChanged)
    assert driver.machine.statistics().leases_lost == 1
