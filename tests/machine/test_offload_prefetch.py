"""Offload, below the hub: what is pending, and bringing it up ahead of need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


@pytest.fixture
def driver() -> Driver:
    """`abc` lies on disk, below the hub."""
    driver = make_driver(device=None, host=8, disk=8)
    driver.discover(2, "abc")
    return driver


def prefetch(driver: Driver, prompt: str) -> ef.Started:
    return driver.answer(ev.Prefetch(keys=driver.keys(prompt), cause="ahead of need"), ef.Started)


def look(driver: Driver, prompt: str) -> ef.Found:
    return driver.answer(ev.Lookup(keys=driver.keys(prompt)), ef.Found)


def test_blocks_below_the_hub_are_pending_until_somebody_asks(driver: Driver) -> None:
    found = look(driver, "abcd")

    assert (found.ready, found.pending, found.below) == (0, 3, 3)
    assert (found.miss.reason, found.miss.block) == (MissReason.NEVER_SEEN, 3)


def test_blocks_on_their_way_are_pending_but_not_below(driver: Driver) -> None:
    prefetch(driver, "ab")

    found = look(driver, "abc")

    assert (found.ready, found.pending, found.below) == (0, 3, 1)


def test_prefetched_blocks_are_ready(driver: Driver) -> None:
    started = prefetch(driver, "abc")
    driver.finish()

    assert started.accepted == (0, 1, 2)
    assert started.miss.reason is MissReason.NONE
    assert look(driver, "abc").ready == 3
    assert driver.cached_in("host") == {"a", "ab", "abc"}


def test_a_prefetch_names_the_operations_it_started(driver: Driver) -> None:
    started = prefetch(driver, "abc")

    stage = driver.copy(Purpose.STAGE)
    assert started.operations == (stage.operation,)
    assert (stage.source, stage.target, stage.cause) == (2, 1, "ahead of need")


def test_what_is_in_the_hub_is_not_fetched_again(driver: Driver) -> None:
    prefetch(driver, "ab")
    driver.finish()

    started = prefetch(driver, "abc")

    assert started.accepted == (2,)


def test_a_prefetch_goes_on_behind_what_is_on_its_way(driver: Driver) -> None:
    prefetch(driver, "ab")

    started = prefetch(driver, "abc")

    assert started.accepted == (2,)


def test_a_prefetch_takes_leading_blocks_when_room_is_short() -> None:
    driver = make_driver(device=None, host=2, disk=8)
    driver.discover(2, "abc")

    started = prefetch(driver, "abc")

    assert started.accepted == (0, 1)
    assert (started.miss.reason, started.miss.block) == (MissReason.NO_ROOM, 2)


def test_a_prefetch_does_not_evict_what_it_leads_to() -> None:
    driver = make_driver(device=None, host=2, disk=8)
    driver.discover(2, "abc")
    prefetch(driver, "ab")
    driver.finish()

    started = prefetch(driver, "abc")

    assert started.accepted == ()
    assert driver.cached_in("host") == {"a", "ab"}


def test_a_prefetch_says_where_its_chain_ends(driver: Driver) -> None:
    started = prefetch(driver, "abx")

    assert started.accepted == (0, 1)
    assert (started.miss.reason, started.miss.block) == (MissReason.NEVER_SEEN, 2)


def test_a_cancelled_prefetch_leaves_its_blocks_below(driver: Driver) -> None:
    (operation,) = prefetch(driver, "abc").operations

    driver.handle(ev.Cancel(operation=operation))
    driver.finish()

    assert driver.free_in("host") == 8
    assert driver.cached_in("disk") == {"a", "ab", "abc"}
    assert look(driver, "abc").below == 3


def test_blocks_are_fetched_from_whichever_tier_has_them() -> None:
    driver = make_driver(device=None, host=8, disk=8, shared=8)
    first, second = driver.keys("ab")
    for tier, key, parent in ((2, first, None), (3, second, first)):
        driver.handle(
            ev.Discovered(tier=tier, keys=[key], parents=[parent], slots=np.zeros(1, np.int32))
        )

    prefetch(driver, "ab")
    sources = sorted(copy.source for copy in driver.copies.values())
    driver.finish()

    assert sources == [2, 3]
    assert driver.cached_in("host") == {"a", "ab"}


def test_nothing_can_be_fetched_through_a_hub_that_is_off(driver: Driver) -> None:
    driver.handle(ev.TierOff(tier=1, fenced=True))

    started = prefetch(driver, "abc")

    assert started.operations == ()
    assert started.miss.reason is MissReason.TIER_OFF


def test_a_managed_engine_may_prefetch_too() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "ab")

    prefetch(driver, "ab")
    driver.finish()

    assert driver.acquire("ab").cached_by_tier == (0, 0, 4)


def test_a_block_that_is_still_being_written_below_cannot_be_fetched_from_there() -> None:
    """Its copy in the hub was found corrupt while it was written down."""
    driver = make_driver(device=None, host=8, disk=8)
    keys, slots = driver.keys("a"), np.array([[3]], dtype=np.int32)
    driver.answer(ev.Save(keys=keys, slots=slots, cause="save"), ef.Started)
    (down,) = driver.copies.values()
    driver.complete(down)
    (lower,) = driver.copies.values()
    assert (lower.source, lower.target) == (1, 2)
    driver.answer(ev.Load(keys=keys, slots=slots, cause="load"), ef.Started)

    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])

    found = look(driver, "a")
    assert (found.ready, found.pending, found.miss.reason) == (0, 0, MissReason.FILLING)
    assert prefetch(driver, "a").accepted == ()


def tokens_by_tier(driver: Driver) -> list[int]:
    return driver.books.counters.tokens_cached_by_tier


def test_the_first_load_of_prefetched_blocks_counts_for_the_tier_they_came_from(
    driver: Driver,
) -> None:
    slots = np.arange(3, dtype=np.int32)[None]
    prefetch(driver, "abc")
    driver.finish()

    driver.handle(ev.Load(keys=driver.keys("abc"), slots=slots, cause="load"))
    driver.finish()
    assert tokens_by_tier(driver) == [0, 0, 6]

    driver.handle(ev.Load(keys=driver.keys("abc"), slots=slots, cause="load"))
    assert tokens_by_tier(driver) == [0, 6, 6]


def test_the_first_request_for_prefetched_blocks_is_told_where_they_came_from() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "abc")
    driver.handle(ev.Prefetch(keys=driver.keys("abc"), cause="ahead of need"))

    assert driver.acquire("ab").cached_by_tier == (0, 0, 4)
    driver.finish()
    assert driver.acquire("abc").cached_by_tier == (4, 0, 2)


def test_prefetched_blocks_that_left_and_were_computed_count_for_the_hub() -> None:
    driver = make_driver(device=None, host=2, disk=8)
    driver.discover(2, "ab")
    prefetch(driver, "ab")
    driver.finish()
    slots = np.arange(2, dtype=np.int32)[None]
    driver.handle(ev.Save(keys=driver.keys("xy"), slots=slots, cause="save"))
    driver.finish()
    driver.handle(ev.Save(keys=driver.keys("ab"), slots=slots, cause="save"))
    driver.finish()

    driver.handle(ev.Load(keys=driver.keys("ab"), slots=slots, cause="load"))

    assert tokens_by_tier(driver) == [0, 4, 0]
