"""Blocks on their way down: write policies, watermarks, and quotas of lower tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache.eviction import POLICIES
from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver

LOW: dict[str, Any] = {"low_watermark": 0.5, "high_watermark": 0.75}


def tier(name: str, slot_count: int, write: str = "write_through", **settings: Any) -> TierSettings:
    policy = WritePolicy(kind=WriteKind(write), hits=settings.pop("hits", 2))
    return TierSettings(name=name, slot_count=slot_count, write=policy, **settings)


def purposes(driver: Driver) -> list[Purpose]:
    return [copy.purpose for copy in driver.copies.values()]


# -------------------------------------------------------------------- evicted under policy P


def test_without_lower_tiers_what_is_evicted_is_gone() -> None:
    driver = make_driver(device=4)

    driver.store("abc", "xyz")

    assert driver.tiers_with("abc") == set()


def test_under_write_through_the_hub_holds_what_the_device_evicted() -> None:
    driver = make_driver(device=4, host=8, write="write_through")

    driver.store("abc", "xyz")

    assert driver.tiers_with("abc") == {"host"}


def test_under_selective_the_hub_holds_what_was_hit_often_enough() -> None:
    driver = make_driver(device=4, host=tier("host", 8, "selective", hits=2))
    driver.store("ab")
    driver.store("ab")
    after_one_hit = driver.cached_in("host")
    driver.store("ab")

    driver.store("xyz", "uvw")

    assert after_one_hit == set()
    assert driver.tiers_with("ab") == {"host"}
    assert driver.tiers_with("xyz") == set()


def test_under_write_back_the_hub_holds_what_left_at_the_low_watermark() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")
    assert not driver.copies
    assert driver.cached_in("host") == set()

    driver.tick()
    driver.finish()

    assert driver.cached_in("device") == {"a"}
    assert driver.cached_in("host") == {"ab", "abc"}


def test_under_write_through_a_block_goes_all_the_way_down() -> None:
    driver = make_driver(device=4, host=4, disk=12)

    driver.store("abc", "xyz", "uvw")

    assert driver.tiers_with("abc") == {"disk"}


def test_each_tier_below_the_hub_has_its_own_policy() -> None:
    driver = make_driver(device=8, host=8, disk=tier("disk", 8, "selective", hits=1))
    driver.store("ab")
    before = driver.cached_in("disk")

    driver.store("ab")

    assert before == set()
    assert driver.cached_in("disk") == {"a", "ab"}


def test_the_hub_writes_back_to_the_tiers_below_it() -> None:
    driver = make_driver(device=8, host=tier("host", 4, **LOW), disk=tier("disk", 8, "write_back"))
    driver.store("abc")

    driver.tick()
    driver.finish()

    assert driver.cached_in("host") == {"a"}
    assert driver.cached_in("disk") == {"ab", "abc"}


def test_every_tier_that_waits_for_write_back_gets_its_copy() -> None:
    driver = make_driver(
        host=tier("host", 4, **LOW),
        disk=tier("disk", 8, "write_back"),
        shared=tier("shared", 8, "write_back"),
    )
    driver.store("abc")

    driver.tick()
    driver.finish()

    assert driver.cached_in("disk") == driver.cached_in("shared") == {"ab", "abc"}


# -------------------------------------------------------------------- saves


def test_a_block_is_saved_once() -> None:
    driver = make_driver(device=8, host=8)
    driver.store("ab")

    driver.compute("abc")

    assert driver.words(driver.copy(Purpose.SAVE).keys) == ["abc"]


def test_a_block_on_its_way_down_is_not_saved_again() -> None:
    driver = make_driver(device=8, host=8)
    driver.compute("ab")

    driver.preempt(driver.acquire("ab").lease)

    assert len(driver.copies) == 1


def test_a_loaded_block_is_not_written_back_where_it_came_from() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "xyz")
    granted = driver.acquire("ab")

    driver.complete(driver.copy(Purpose.LOAD))

    assert driver.books.leases[granted.lease].state is LeaseState.READY
    assert not driver.copies


def test_saving_to_a_full_tier_evicts_what_leaves_first_there() -> None:
    driver = make_driver(device=12, host=3)
    driver.store("a", "b", "c")

    driver.store("d")

    assert driver.cached_in("host") == {"b", "c", "d"}


def test_a_save_never_evicts_the_block_it_follows() -> None:
    driver = make_driver(device=8, host=1)
    driver.store("a")

    driver.store("ab")

    assert driver.cached_in("host") == {"a"}
    assert driver.machine.statistics().saves_refused == 1


def test_leading_blocks_are_saved_first_when_room_is_short() -> None:
    driver = make_driver(device=8, host=2)

    driver.store("abcd")

    assert driver.cached_in("host") == {"a", "ab"}
    assert driver.machine.statistics().saves_refused == 2


def test_nothing_is_saved_into_a_tier_that_is_off() -> None:
    driver = make_driver(device=8, host=8)
    driver.handle(ev.TierOff(tier=1, fenced=True))

    driver.compute("ab")

    assert not driver.copies


# -------------------------------------------------------------------- watermarks


def test_above_the_low_watermark_nothing_leaves() -> None:
    driver = make_driver(device=tier("device", 4, **LOW))
    driver.store("ab")

    driver.tick()

    assert driver.cached_in("device") == {"a", "ab"}


def test_below_the_low_watermark_blocks_leave_until_the_high_one() -> None:
    driver = make_driver(device=tier("device", 8, low_watermark=0.25, high_watermark=0.5))
    driver.store("abcdefg")

    driver.tick()

    assert driver.free_in("device") == 4
    assert driver.cached_in("device") == {"a", "ab", "abc", "abcd"}


def test_a_block_saved_already_leaves_without_another_copy() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8)
    driver.store("abc")

    driver.tick()

    assert not driver.copies
    assert driver.tiers_with("abc") == {"host"}


def test_a_demoted_chain_frees_all_its_slots_at_once() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")
    driver.tick()

    driver.complete(driver.copy(Purpose.DEMOTE))

    assert driver.free_in("device") == 3


def test_blocks_on_their_way_out_count_as_room_to_come() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")
    driver.tick()

    driver.tick()

    assert len(driver.copies) == 1


def test_a_demotion_that_fails_keeps_the_block() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")
    driver.tick()

    driver.report(driver.copy(Purpose.DEMOTE), failure="link down")

    assert driver.cached_in("device") == {"a", "ab", "abc"}
    assert driver.cached_in("host") == set()
    assert driver.leaving_order() == ["abc", "ab", "a"]


def test_what_the_tier_below_has_no_room_for_is_dropped() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=1, write="write_back")
    driver.store("abc")

    driver.tick()
    driver.finish()

    assert driver.cached_in("device") == {"a"}
    assert driver.cached_in("host") == {"ab"}


def test_a_block_evicted_before_it_was_written_back_is_counted() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")

    driver.store("xyz")

    assert driver.machine.statistics().blocks_dropped_unsaved == 3


def test_a_demoted_block_is_not_counted_as_dropped() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("abc")
    driver.tick()
    driver.finish()

    driver.tick()

    assert driver.machine.statistics().blocks_dropped_unsaved == 0


def test_a_block_found_corrupt_on_its_way_out_is_no_room_to_come() -> None:
    """A load read it while it was written down; its slot is free when that has ended."""
    driver = make_driver(
        device=None, host=tier("host", 4, **LOW), disk=tier("disk", 8, "write_back")
    )
    driver.discover(1, "abc")
    driver.tick()
    demotion = driver.copy(Purpose.DEMOTE)
    slots = np.arange(3, dtype=np.int32)[None]
    driver.handle(ev.Load(keys=driver.keys("abc"), slots=slots, cause="load"))

    driver.report(driver.copy(Purpose.LOAD), faults=[(2, BlockFault.CORRUPT)])

    assert driver.books.tier(1).pool.leaving_count == 1
    driver.complete(demotion)
    assert driver.books.tier(1).pool.leaving_count == 0
    assert driver.free_in("host") == 3


def test_a_tier_that_is_off_keeps_its_blocks() -> None:
    driver = make_driver(device=8, host=tier("host", 4, **LOW))
    driver.store("abc")
    driver.handle(ev.TierOff(tier=1, fenced=True))

    driver.tick()

    assert driver.cached_in("host") == {"a", "ab", "abc"}


def test_a_tick_moves_no_more_blocks_than_an_operation_may() -> None:
    device = tier("device", 8, low_watermark=0.5, high_watermark=0.9)
    driver = make_driver(device=device, operation_blocks_max=2)
    driver.store("abcdefg")

    driver.tick()

    assert driver.free_in("device") == 3


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_watermarks_take_no_block_that_is_leased_or_pinned(eviction: str) -> None:
    device = tier("device", 6, eviction=eviction, low_watermark=0.5, high_watermark=0.9)
    driver = make_driver(device=device, host=8)
    driver.store("a", "b", "c", "d")
    driver.pin("a")
    driver.acquire("b")

    driver.tick()

    assert driver.cached_in("device") == {"a", "b"}


# -------------------------------------------------------------------- quotas below the device


def test_a_lower_tier_refuses_blocks_beyond_the_quota() -> None:
    driver = make_driver(device=12, host=tier("host", 8, quotas={"ann": 0.25}))

    driver.store("abcd", tenant="ann")

    assert driver.cached_in("host") == {"a", "ab"}
    assert driver.machine.statistics().saves_refused == 2


def test_a_tenant_over_its_quota_below_evicts_its_own_blocks_first() -> None:
    driver = make_driver(device=12, host=tier("host", 8, quotas={"ann": 0.25}))
    driver.store("x", "y", tenant="bob")
    driver.store("a", "b", "c", tenant="ann")

    assert driver.cached_in("host") == {"x", "y", "b", "c"}


def test_a_save_refused_for_its_quota_evicts_nobody_elses_blocks() -> None:
    driver = make_driver(device=8, host=tier("host", 4, quotas={"ann": 0.25}))
    driver.store("v", tenant="ann")
    driver.pin("v")
    driver.store("x", "y", "z", tenant="bob")

    driver.store("w", tenant="ann")

    assert driver.cached_in("host") == {"v", "x", "y", "z"}


def test_blocks_of_several_tenants_are_demoted_each_within_its_quota() -> None:
    device = tier("device", 6, low_watermark=0.5, high_watermark=0.9)
    host = tier("host", 8, "write_back", quotas={"ann": 0.25})
    driver = make_driver(device=device, host=host)
    driver.store("v", "w", "x", tenant="ann")
    driver.store("b", "c", tenant="bob")

    driver.tick()
    driver.finish()

    assert len(driver.cached_in("host") & {"v", "w", "x"}) == 2
    assert "b" in driver.cached_in("host")


def test_a_chain_of_several_tenants_is_demoted_whole() -> None:
    driver = make_driver(device=tier("device", 4, **LOW), host=8, write="write_back")
    driver.store("ab", tenant="ann")
    driver.store("abc", tenant="bob")

    driver.tick()
    driver.finish()

    assert driver.cached_in("host") == {"ab", "abc"}


def test_blocks_of_several_tenants_are_copied_each_into_its_own_slot() -> None:
    device = tier("device", 6, low_watermark=0.5, high_watermark=0.9)
    driver = make_driver(device=device, host=8, write="write_back")
    driver.store("v", tenant="ann")
    driver.store("b", tenant="bob")
    driver.store("w", "x", "y", tenant="ann")

    driver.tick()

    copy = driver.copy(Purpose.DEMOTE)
    nodes = [driver.books.nodes.get(key) for key in copy.keys]
    assert len({int(driver.books.nodes.tenant[node]) for node in nodes}) == 2
    assert copy.source_slots.tolist() == driver.books.tier(0).slot_of[nodes].tolist()
    assert copy.target_slots.tolist() == driver.books.tier(1).slot_of[nodes].tolist()


def test_a_tenant_that_is_not_named_falls_under_the_quota_of_all() -> None:
    driver = make_driver(device=12, host=tier("host", 8, quotas={"*": 0.25, "ann": 0.5}))

    driver.store("abcd", tenant="ann")
    driver.store("wxyz", tenant="bob")

    assert driver.cached_in("host") == {"a", "ab", "abc", "abcd", "w", "wx"}
