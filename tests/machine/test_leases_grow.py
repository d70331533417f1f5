"""Leases that go on: room for more tokens, forks, and copy on write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import Purpose
from penstock.cache.settings import TierSettings
from penstock.cache.states import LeaseState
from penstock.errors import CapacityError, LeaseError
from penstock.machine import effects as ef
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


def with_tail(driver: Driver, prompt: str) -> ef.Granted:
    """A lease whose last block is half computed."""
    granted = driver.acquire(prompt, more_tokens=1)
    driver.commit(granted.lease, prompt, more_tokens=1)
    return granted


# -------------------------------------------------------------------- grow


def test_a_lease_grows_by_the_blocks_it_lacks() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", more_tokens=1)

    grown = driver.grow(granted.lease, 9)

    assert grown.table[:3].tolist() == granted.table.tolist()
    assert len(grown.table) == 5
    assert grown.state is LeaseState.READY


def test_a_lease_that_has_room_does_not_grow() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", more_tokens=1)

    grown = driver.grow(granted.lease, 6)

    assert grown.table.tolist() == granted.table.tolist()


def test_growing_evicts_what_nobody_holds() -> None:
    driver = make_driver(device=4)
    driver.store("xy")
    granted = driver.acquire("", more_tokens=1)

    driver.grow(granted.lease, 5)

    assert driver.cached_in("device") == {"x"}


def test_a_lease_that_cannot_grow_is_as_it_was() -> None:
    driver = make_driver(device=4)
    driver.store("x")
    granted = with_tail(driver, "a")
    driver.acquire("", more_tokens=1)
    before, order = freeze(driver.machine), driver.leaving_order()

    with pytest.raises(CapacityError) as refused:
        driver.grow(granted.lease, 8)

    assert freeze(driver.machine) == before
    assert driver.leaving_order() == order
    assert (refused.value.wanted, refused.value.available) == (2, 1)


@pytest.mark.parametrize("token_count", [2.5, -1, None, "9"])
def test_room_for_what_is_no_number_of_tokens_is_refused(token_count: int) -> None:
    driver = make_driver(device=4)
    granted = with_tail(driver, "a")
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=r"token_count is .*, must be an int of at least 0"):
        driver.grow(granted.lease, token_count)

    assert freeze(driver.machine) == before


def test_growing_by_nothing_evicts_nothing() -> None:
    driver = make_driver(device=TierSettings(name="device", slot_count=12, quotas={"ann": 0.25}))
    granted = driver.acquire("k", tenant="ann")
    driver.compute("vwxy", tenant="ann")
    before = driver.cached_in("device")

    driver.grow(granted.lease, 3)

    assert driver.cached_in("device") == before


def test_a_table_in_use_does_not_change_when_its_lease_grows() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", more_tokens=1)
    in_use = granted.table.tolist()

    driver.grow(granted.lease, 9)

    assert granted.table.tolist() == in_use


# -------------------------------------------------------------------- fork


def test_a_fork_shares_every_filled_block() -> None:
    driver = make_driver()
    granted = with_tail(driver, "ab")

    fork = driver.fork(granted.lease)

    assert fork.table.tolist() == granted.table.tolist()
    assert fork.cached_tokens == 5
    assert fork.state is LeaseState.READY
    assert fork.miss.reason is MissReason.NONE
    assert driver.free_in("device") == 5


def test_a_fork_has_no_room_that_its_origin_has_not_filled() -> None:
    driver = make_driver()
    granted = driver.acquire("abc")
    driver.commit(granted.lease, "a")

    fork = driver.fork(granted.lease)

    assert fork.table.tolist() == granted.table[:1].tolist()


def test_blocks_shared_with_a_fork_stay_until_both_are_released() -> None:
    driver = make_driver(device=3)
    granted = with_tail(driver, "ab")
    fork = driver.fork(granted.lease)

    driver.release(granted.lease)
    with pytest.raises(CapacityError):
        driver.acquire("")
    driver.release(fork.lease)

    assert driver.free_in("device") == 1
    assert driver.cached_in("device") == {"a", "ab"}


def test_an_unfinished_block_shared_with_a_fork_is_not_written_before_it_is_copied() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    before = freeze(driver.machine)

    for lease in (granted.lease, fork.lease):
        with pytest.raises(LeaseError, match="shares its unfinished block with a fork: grow it"):
            driver.commit(lease, "ab")

    assert freeze(driver.machine) == before


def test_growing_copies_an_unfinished_block_that_is_shared() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)

    grown = driver.grow(fork.lease, 4)
    duplicate = driver.copy(Purpose.DUPLICATE)
    driver.complete(duplicate)

    assert grown.state is LeaseState.LOADING
    assert (duplicate.source, duplicate.target) == (0, 0)
    assert duplicate.source_slots.tolist() == [granted.table[1]]
    assert duplicate.target_slots.tolist() == [grown.table[1]]
    assert grown.table[0] == granted.table[0]
    assert grown.table[1] != granted.table[1]
    (changed,) = driver.told(ef.LeaseChanged)
    assert changed.state is LeaseState.READY


def test_only_one_of_two_has_to_copy() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    driver.grow(fork.lease, 4)
    driver.finish()

    grown = driver.grow(granted.lease, 4)

    assert grown.state is LeaseState.READY
    assert grown.table.tolist() == granted.table.tolist()
    assert not driver.copies


def test_forks_go_on_to_different_blocks() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    driver.grow(fork.lease, 4)
    driver.finish()

    driver.commit(granted.lease, "ab")
    driver.commit(fork.lease, "ac")
    driver.release(granted.lease)
    driver.release(fork.lease)

    assert driver.cached_in("device") == {"a", "ab", "ac"}
    assert driver.free_in("device") == 5


def test_a_fork_at_the_end_of_a_block_needs_no_copy() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", more_tokens=0)
    driver.commit(granted.lease, "ab")
    fork = driver.fork(granted.lease)

    grown = driver.grow(fork.lease, 6)
    driver.commit(fork.lease, "abc")

    assert grown.state is LeaseState.READY
    assert not driver.copies
    assert driver.cached_in("device") == {"a", "ab", "abc"}


def test_the_last_of_three_forks_writes_in_place() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    forks = [driver.fork(granted.lease, f"fork {number}") for number in range(2)]

    for fork in forks:
        driver.grow(fork.lease, 4)
        driver.finish()
    last = driver.grow(granted.lease, 4)

    assert last.table.tolist() == granted.table.tolist()
    tails = {int(lease.table[1]) for lease in driver.books.leases.values()}
    assert len(tails) == 3


def test_a_fork_released_without_a_step_leaves_nothing_behind() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    driver.release(driver.fork(granted.lease).lease)

    driver.commit(granted.lease, "ab")
    driver.release(granted.lease)

    assert driver.free_in("device") == 6


@pytest.mark.parametrize("first_to_go", ["origin", "fork"])
def test_both_sides_of_a_copy_come_back_when_it_ends_after_their_leases(first_to_go: str) -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    driver.grow(fork.lease, 4)
    leases = [granted.lease, fork.lease]

    for lease in leases if first_to_go == "origin" else leases[::-1]:
        driver.release(lease)
    while_copying = driver.free_in("device")
    driver.finish()

    assert while_copying == 5
    assert driver.free_in("device") == 7


def test_a_copy_on_write_that_fails_loses_the_lease_that_wanted_it() -> None:
    driver = make_driver()
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    driver.grow(fork.lease, 4)

    driver.report(driver.copy(Purpose.DUPLICATE), failure="no luck")

    (changed,) = driver.told(ef.LeaseChanged)
    assert (changed.lease, changed.state) == (fork.lease, LeaseState.LOST)
    assert driver.books.leases[granted.lease].state is LeaseState.READY
    driver.release(fork.lease)
    driver.release(granted.lease)
    assert driver.free_in("device") == 7


def test_copy_on_write_without_room_changes_nothing() -> None:
    driver = make_driver(device=2)
    granted = with_tail(driver, "a")
    fork = driver.fork(granted.lease)
    before = freeze(driver.machine)

    with pytest.raises(CapacityError):
        driver.grow(fork.lease, 4)

    assert freeze(driver.machine) == before


def test_a_fork_of_a_request_that_opted_out_of_storing_stores_nothing_either() -> None:
    driver = make_driver()
    granted = driver.acquire("ab", more_tokens=0, store=False)
    driver.commit(granted.lease, "ab")
    fork = driver.fork(granted.lease)

    driver.grow(fork.lease, 6)
    driver.commit(fork.lease, "abc")
    driver.release(fork.lease)
    driver.release(granted.lease)

    assert driver.free_in("device") == 8
