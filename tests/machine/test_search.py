"""A lease waits for a store to say which of its blocks it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings
from penstock.cache.states import LeaseState
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from penstock.vocabulary.keys import LeaseId
    from tests.machine.conftest import Driver

STORE = 2


@pytest.fixture
def driver() -> Driver:
    store = TierSettings(name="store", slot_count=32, stored=True)
    return make_driver(device=16, host=16, disk=store)


def answer(driver: Driver, lease: LeaseId, prompt: str) -> None:
    """The store has the blocks of a prompt."""
    keys = driver.keys(prompt)
    if keys:
        parents = [None, *keys[:-1]]
        driver.handle(ev.Discovered(tier=STORE, keys=keys, parents=parents, wanted=True))
    driver.handle(ev.Searched(lease=lease))


def state(driver: Driver, lease: LeaseId) -> LeaseState:
    return driver.books.leases[lease].state


def test_what_the_store_has_is_loaded_into_the_room_of_the_lease(driver: Driver) -> None:
    granted = driver.acquire("abcd", search_until=1.0)
    assert (granted.state, granted.cached_tokens) == (LeaseState.LOADING, 0)
    assert granted.searching

    answer(driver, granted.lease, "abc")
    (change,) = driver.told(ef.LeaseChanged)
    assert (change.state, change.cached_tokens) == (LeaseState.LOADING, 6)
    assert change.cached_by_tier == (0, 0, 6)
    driver.finish()

    assert state(driver, granted.lease) is LeaseState.READY
    assert driver.books.leases[granted.lease].table.tolist() == granted.table.tolist()
    driver.commit(granted.lease, "abcd")
    assert "abcd" in driver.cached_in("device")
    driver.release(granted.lease)


def test_what_was_known_is_loaded_while_the_store_is_asked(driver: Driver) -> None:
    driver.store("ab")
    driver.handle(ev.EmptyDevice(why="test"))
    granted = driver.acquire("abcd", search_until=1.0)
    assert granted.cached_tokens == 4
    driver.complete(driver.copy(Purpose.LOAD))
    assert state(driver, granted.lease) is LeaseState.LOADING

    answer(driver, granted.lease, "abcd")
    driver.finish()

    assert state(driver, granted.lease) is LeaseState.READY
    assert driver.books.leases[granted.lease].token_count == 8


def test_an_answer_that_nothing_is_there_ends_the_wait(driver: Driver) -> None:
    granted = driver.acquire("abc", search_until=1.0)

    answer(driver, granted.lease, "")

    (change,) = driver.told(ef.LeaseChanged)
    assert (change.state, change.cached_tokens) == (LeaseState.READY, 0)
    assert change.miss.reason is MissReason.NEVER_SEEN
    assert driver.machine.statistics().misses["never seen"] == 1


def test_a_lease_waits_no_longer_than_it_said(driver: Driver) -> None:
    granted = driver.acquire("abc", search_until=1.0)
    assert driver.machine.next_deadline() == 1.0

    driver.tick(after_s=1.0)
    assert state(driver, granted.lease) is LeaseState.READY

    answer(driver, granted.lease, "abc")  # Too late for this one.
    assert driver.books.leases[granted.lease].token_count == 0
    assert driver.acquire("abcd").cached_tokens == 6


def test_blocks_that_others_have_brought_to_the_device_meanwhile_are_shared(
    driver: Driver,
) -> None:
    one = driver.acquire("ab", search_until=1.0)
    other = driver.acquire("ab", search_until=1.0)

    answer(driver, one.lease, "ab")
    answer(driver, other.lease, "")
    driver.finish()

    first, second = (driver.books.leases[each.lease] for each in (one, other))
    assert first.state is second.state is LeaseState.READY
    assert first.table[:2].tolist() == second.table[:2].tolist()
    assert first.token_count == second.token_count == 4
    driver.release(one.lease)
    driver.release(other.lease)
    assert driver.free_in("device") == 14


def test_a_prompt_that_is_found_whole_is_not_looked_for(driver: Driver) -> None:
    driver.store("abc")

    granted = driver.acquire("abc", search_until=1.0)

    assert granted.state is LeaseState.READY
    assert not granted.searching


@pytest.mark.parametrize("wish", [{"load": False}, {"reuse": False}])
def test_nothing_is_looked_for_that_would_not_be_used(
    driver: Driver, wish: dict[str, bool]
) -> None:
    assert driver.acquire("abc", search_until=1.0, **wish).state is LeaseState.READY


def test_a_lease_may_be_released_or_lost_while_a_store_is_asked(driver: Driver) -> None:
    released = driver.acquire("ab", search_until=1.0)
    lost = driver.acquire("xy", search_until=1.0)

    driver.release(released.lease)
    driver.reset()
    assert state(driver, lost.lease) is LeaseState.LOST
    answer(driver, released.lease, "ab")
    answer(driver, lost.lease, "")
    driver.release(lost.lease)

    assert driver.machine.next_deadline() is None
    statistics = driver.machine.statistics()
    assert sum(statistics.misses.values()) == statistics.requests == 2


def test_a_block_that_the_store_turns_out_not_to_have_is_computed(driver: Driver) -> None:
    granted = driver.acquire("abc", search_until=1.0)
    answer(driver, granted.lease, "abc")

    driver.report(driver.copy(Purpose.STAGE), faults=[(1, BlockFault.MISSING)])
    driver.finish()

    lease = driver.books.leases[granted.lease]
    assert (lease.state, lease.token_count) == (LeaseState.READY, 2)
    driver.commit(granted.lease, "abc")


def test_it_can_be_neither_joined_nor_computed_on_while_a_store_is_asked(driver: Driver) -> None:
    driver.store("a")
    driver.handle(ev.EmptyDevice(why="test"))
    granted = driver.acquire("abc", search_until=1.0)

    assert driver.copies
    assert driver.machine.loads_of(granted.lease) == ()


def test_nothing_is_loaded_for_a_lease_whose_time_to_load_is_over(driver: Driver) -> None:
    granted = driver.acquire("abc", search_until=2.0, deadline=1.0)
    driver.tick(after_s=1.5)

    answer(driver, granted.lease, "abc")

    assert state(driver, granted.lease) is LeaseState.READY
    assert not driver.copies


def test_a_time_that_is_none_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="search_until is inf, must be a time"):
        driver.acquire("a", search_until=float("inf"))
