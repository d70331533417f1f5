"""Acquire, where blocks come from below: loads, shared loads, and blocks on their way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.explain import MissReason
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings
from penstock.cache.states import LeaseState
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


def test_what_is_missing_on_the_device_is_a_load() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "wxy")

    granted = driver.acquire("ab")
    load = driver.copy(Purpose.LOAD)
    driver.complete(load)

    assert granted.state is LeaseState.LOADING
    assert (load.source, load.target) == (1, 0)
    assert driver.words(load.keys) == ["a", "ab"]
    (changed,) = driver.told(ef.LeaseChanged)
    assert (changed.lease, changed.state) == (granted.lease, LeaseState.READY)
    assert changed.cached_tokens == 4


def test_a_block_below_the_hub_travels_through_it() -> None:
    driver = make_driver(device=4, host=8, disk=8)
    driver.discover(2, "ab")

    granted = driver.acquire("ab")
    stage = driver.copy(Purpose.STAGE)
    driver.complete(stage)
    load = driver.copy(Purpose.LOAD)
    driver.complete(load)

    assert (stage.source, stage.target) == (2, 1)
    assert (load.source, load.target) == (1, 0)
    assert load.source_slots.tolist() == stage.target_slots.tolist()
    assert load.target_slots.tolist() == granted.table[:2].tolist()
    assert driver.books.leases[granted.lease].state is LeaseState.READY


def test_requests_that_need_the_same_block_share_its_load() -> None:
    driver = make_driver(device=5, host=8)
    driver.store("ab", "vwxy")

    first = driver.acquire("ab")
    second = driver.acquire("ab")
    copies = list(driver.copies.values())
    driver.finish()

    assert len(copies) == 1
    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert second.state is LeaseState.LOADING
    assert {lease.state for lease in driver.books.leases.values()} == {LeaseState.READY}


def test_requests_share_a_load_that_is_still_on_its_way_to_the_hub() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "ab")

    first = driver.acquire("ab")
    second = driver.acquire("abx")
    driver.complete(driver.copy(Purpose.STAGE))
    driver.complete(driver.copy(Purpose.LOAD))

    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert {lease.state for lease in driver.books.leases.values()} == {LeaseState.READY}


def test_a_prefetch_under_way_is_passed_on_to_the_device() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "ab")
    driver.handle(ev.Prefetch(keys=driver.keys("ab"), cause="ahead of need"))
    stage = driver.copy(Purpose.STAGE)

    granted = driver.acquire("ab")
    started = driver.told(ef.Copy)
    driver.complete(stage)
    load = driver.copy(Purpose.LOAD)
    driver.complete(load)

    assert granted.state is LeaseState.LOADING
    assert not started
    assert load.target_slots.tolist() == granted.table[:2].tolist()
    assert driver.books.leases[granted.lease].state is LeaseState.READY


def test_a_prefix_that_joins_several_copies_waits_for_all_of_them() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.discover(2, "abcd")
    driver.acquire("ab")
    driver.acquire("abcd")

    granted = driver.acquire("abcd")
    assert len(driver.copies) == 2
    while driver.copies:
        assert driver.books.leases[granted.lease].state is LeaseState.LOADING
        driver.complete(next(iter(driver.copies.values())))

    assert driver.books.leases[granted.lease].state is LeaseState.READY


def test_a_long_load_is_split_into_operations_of_bounded_size() -> None:
    driver = make_driver(device=8, host=8, operation_blocks_max=2)
    driver.discover(1, "abcde")

    granted = driver.acquire("abcde")
    sizes = [len(copy.keys) for copy in driver.copies.values()]
    driver.finish()

    assert sizes == [2, 2, 1]
    assert driver.books.leases[granted.lease].state is LeaseState.READY


def test_a_match_ends_earlier_when_the_hub_has_no_room_to_bring_it_through() -> None:
    driver = make_driver(device=12, host=2, disk=8)
    driver.discover(2, "abcd")

    granted = driver.acquire("abcd")

    assert granted.cached_tokens == 4
    assert granted.miss.reason is MissReason.NO_ROOM
    assert granted.miss.block == 2


def test_a_load_expires_at_the_deadline_of_its_request() -> None:
    driver = make_driver(device=8, host=8)
    driver.discover(1, "ab")

    driver.acquire("ab", deadline=3.0)

    assert driver.copy(Purpose.LOAD).deadline == 3.0
    assert driver.machine.next_deadline() == 3.0


# -------------------------------------------------------------------- blocks on their way out


def demoting() -> Driver:
    """`x` and `a` are being demoted from the device."""
    device = TierSettings(name="device", slot_count=4, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=8, write="write_back")
    driver.compute("x")
    driver.compute("a")
    driver.compute("z")
    driver.tick()
    return driver


def test_a_block_being_demoted_is_matched_again_at_once() -> None:
    driver = demoting()
    demotion = driver.copy(Purpose.DEMOTE)
    assert driver.words(demotion.keys) == ["a", "x"]

    granted = driver.acquire("x")

    assert granted.state is LeaseState.READY
    assert granted.cached_by_tier == (2, 0)


def test_a_block_matched_while_being_demoted_stays_when_the_demotion_ends() -> None:
    driver = demoting()
    granted = driver.acquire("x")
    driver.release(granted.lease)

    driver.complete(driver.copy(Purpose.DEMOTE))

    assert driver.tiers_with("x") == {"device", "host"}
    assert driver.tiers_with("a") == {"host"}


def test_a_block_leased_again_while_being_demoted_keeps_its_slot() -> None:
    driver = demoting()
    granted = driver.acquire("x")

    driver.complete(driver.copy(Purpose.DEMOTE))

    assert driver.tiers_with("x") == {"device", "host"}
    assert granted.table[0] not in driver.books.device.pool.free_slots()


def test_a_slot_given_up_by_its_request_is_filled_for_those_who_wait_for_the_same_stage() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")
    both = driver.acquire("ab")
    first = driver.acquire("a")
    driver.release(both.lease)

    stage = driver.copy(Purpose.STAGE)
    driver.complete(stage)

    load = driver.copy(Purpose.LOAD)
    assert load.target_slots.tolist() == both.table[:2].tolist()
    assert not set(load.target_slots.tolist()) & set(driver.books.device.pool.free_slots().tolist())
    driver.finish()
    assert driver.books.leases[first.lease].state is LeaseState.READY
    assert driver.tiers_with("ab") == {"device", "host", "disk"}


def test_a_corrupt_block_below_the_hub_is_computed_by_everybody_who_waits() -> None:
    driver = make_driver(device=12, host=8, disk=8)
    driver.discover(2, "abc")
    leases = [driver.acquire("abc").lease for _ in range(2)]

    driver.report(driver.copy(Purpose.STAGE), faults=[(1, BlockFault.CORRUPT)])
    driver.finish()

    assert [driver.books.leases[lease].token_count for lease in leases] == [2, 2]
    assert driver.cached_in("disk") == {"a", "abc"}


def test_blocks_on_their_way_out_are_void_after_a_reset() -> None:
    driver = demoting()

    driver.reset()
    driver.finish()

    assert driver.cached_in("device") == driver.cached_in("host") == set()
    assert (driver.free_in("device"), driver.free_in("host")) == (4, 8)


def test_blocks_on_their_way_out_arrive_though_a_rank_that_reported_dies() -> None:
    device = TierSettings(name="device", slot_count=4, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=8, write="write_back", ranks=2)
    for word in ("x", "a", "z"):
        driver.compute(word)
    driver.tick()
    demotion = driver.copy(Purpose.DEMOTE)

    driver.report(demotion, rank=0)
    driver.handle(ev.RankLost(rank=0))
    driver.report(demotion, rank=1)

    assert driver.cached_in("host") == {"a", "x"}
    assert driver.free_in("device") == 4
