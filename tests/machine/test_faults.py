"""When the world changes: resets, ranks and tiers that come and go, blocks that are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.explain import MissReason
from penstock.cache.operations import Outcome, Purpose
from penstock.cache.states import LeaseState
from penstock.errors import UnavailableError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


def outcomes(driver: Driver) -> list[Outcome]:
    return [effect.outcome for effect in driver.told(ef.Ended)]


# -------------------------------------------------------------------- reset


def test_a_reset_voids_everything_in_every_tier() -> None:
    driver = make_driver(host=8, disk=8)
    driver.store("ab")

    driver.reset()

    assert driver.machine.kv_snapshot().blocks == {"device": [], "host": [], "disk": []}
    assert [driver.free_in(name) for name in ("device", "host", "disk")] == [8, 8, 8]
    assert driver.machine.statistics().blocks_known == 0


def test_a_reset_begins_a_new_epoch() -> None:
    driver = make_driver(host=8)
    driver.compute("ab")
    before = driver.copy(Purpose.SAVE).operation

    driver.reset()
    driver.finish()
    driver.compute("ab")

    after = driver.copy(Purpose.SAVE).operation
    assert (before.epoch, after.epoch) == (0, 1)
    assert driver.machine.statistics().epoch == 1


def test_a_running_request_keeps_its_blocks_through_a_reset() -> None:
    driver = make_driver(device=4)
    granted = driver.acquire("ab")
    driver.commit(granted.lease, "a")

    driver.reset()

    lease = driver.books.leases[granted.lease]
    assert lease.state is LeaseState.READY
    assert lease.table.tolist() == granted.table.tolist()
    assert driver.free_in("device") == 1


def test_a_request_from_before_a_reset_publishes_nothing_after_it() -> None:
    driver = make_driver(host=8)
    lease = driver.acquire("abc").lease
    driver.commit(lease, "a")
    driver.finish()
    driver.reset()

    driver.commit(lease, "abc")
    driver.grow(lease, 9)
    driver.release(lease)

    assert driver.cached_in("device") == set()
    assert not driver.copies
    assert driver.free_in("device") == 8


def test_a_request_that_waits_is_lost_in_a_reset() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    granted = driver.acquire("ab")

    driver.reset()

    (changed,) = driver.told(ef.LeaseChanged)
    assert (changed.lease, changed.state) == (granted.lease, LeaseState.LOST)


def test_a_reset_cancels_what_is_under_way_and_a_late_result_is_dropped() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.compute("ab")
    save = driver.copy(Purpose.SAVE)
    driver.report(save, rank=0)

    driver.reset()
    told = outcomes(driver)
    free_before = driver.free_in("device"), driver.free_in("host")
    driver.report(save, rank=1)

    assert told == [Outcome.CANCELLED]
    assert free_before == (6, 6)
    assert driver.cached_in("host") == set()
    assert (driver.free_in("device"), driver.free_in("host")) == (8, 8)


def test_a_result_of_the_old_epoch_does_not_touch_the_same_block_of_the_new_one() -> None:
    driver = make_driver(host=8)
    driver.compute("ab")
    old = driver.copy(Purpose.SAVE)
    driver.reset()
    driver.compute("ab")

    driver.report(old, failure="too late")
    driver.finish()

    assert driver.tiers_with("ab") == {"device", "host"}


def test_a_forked_request_survives_a_reset_and_leaks_nothing() -> None:
    driver = make_driver(host=8)
    granted = driver.acquire("ab")
    driver.commit(granted.lease, "a", more_tokens=1)
    fork = driver.fork(granted.lease)

    driver.reset()
    driver.grow(fork.lease, 4)
    driver.finish()
    driver.release(fork.lease)
    driver.release(granted.lease)

    assert driver.free_in("device") == driver.free_in("host") == 8


def test_pins_outlive_a_reset() -> None:
    driver = make_driver(device=5)
    driver.pin("a")
    driver.store("a")

    driver.reset()
    driver.store("a", "xyz")

    assert driver.tiers_with("a") == {"device"}


def test_a_time_to_live_does_not_outlive_a_reset() -> None:
    driver = make_driver()
    driver.store("a", ttl_s=10.0)
    driver.reset()
    driver.store("a", "b")

    driver.tick(after_s=11.0)
    driver.store("a")

    assert driver.leaving_order() == ["b", "a"]


def test_two_resets_in_a_row_are_two_epochs() -> None:
    driver = make_driver(host=8)
    driver.compute("ab")

    driver.reset()
    driver.reset()
    driver.finish()

    assert driver.machine.statistics().epoch == 2
    assert driver.free_in("host") == 8


# -------------------------------------------------------------------- ranks


def test_a_rank_that_dies_fails_what_waits_for_it() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.compute("ab")
    save = driver.copy(Purpose.SAVE)

    driver.handle(ev.RankLost(rank=1))
    (end,) = driver.told(ef.Ended)
    driver.report(save, rank=0)

    assert (end.outcome, end.failure) == (Outcome.FAILED, "rank 1 is lost")
    assert driver.cached_in("host") == set()
    assert driver.free_in("host") == 8


def test_a_dead_rank_need_not_report_any_more() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.compute("ab")
    save = driver.copy(Purpose.SAVE)
    driver.report(save, rank=0)

    driver.handle(ev.RankLost(rank=1))

    assert driver.machine.statistics().operations_ending == 0
    assert driver.free_in("device") == driver.free_in("host") == 8


def test_a_report_of_a_dead_rank_is_late() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.compute("ab")
    save = driver.copy(Purpose.SAVE)
    driver.handle(ev.RankLost(rank=1))

    driver.report(save, rank=1)
    driver.report(save, rank=0)

    assert driver.machine.statistics().reports_late == 1
    assert driver.free_in("host") == 8


def test_no_device_block_is_whole_without_a_rank() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.store("ab")

    driver.handle(ev.RankLost(rank=0))

    assert driver.cached_in("device") == set()
    assert driver.cached_in("host") == {"a", "ab"}


def test_every_lease_is_lost_with_a_rank() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.discover(1, "ab")
    running, waiting = driver.acquire("x").lease, driver.acquire("ab").lease

    driver.handle(ev.RankLost(rank=0))

    states = {changed.lease: changed.state for changed in driver.told(ef.LeaseChanged)}
    assert states == {running: LeaseState.LOST, waiting: LeaseState.LOST}


def test_losing_a_rank_twice_is_losing_it_once() -> None:
    driver = make_driver(ranks=2)
    driver.acquire("a")
    driver.handle(ev.RankLost(rank=0))

    driver.handle(ev.RankLost(rank=0))

    assert driver.effects == []
    assert driver.machine.statistics().lost_ranks == (0,)


def test_requests_are_served_again_when_every_rank_is_back() -> None:
    driver = make_driver(host=8, ranks=2)
    driver.store("ab")
    for rank in (0, 1):
        driver.handle(ev.RankLost(rank=rank))
    driver.handle(ev.RankBack(rank=0))
    with pytest.raises(UnavailableError, match="rank 1 is lost"):
        driver.acquire("ab")

    driver.handle(ev.RankBack(rank=1))
    granted = driver.acquire("ab")
    driver.finish()

    assert granted.cached_by_tier == (0, 4)
    assert driver.books.leases[granted.lease].state is LeaseState.READY


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    driver = make_driver(ranks=2)

    for event in (ev.RankLost(rank=rank), ev.RankBack(rank=rank)):
        with pytest.raises(ValueError, match=f"rank is {rank}, must be from 0 to 1"):
            driver.handle(event)


# -------------------------------------------------------------------- tiers


def test_a_tier_that_is_off_fails_what_is_under_way_there() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    granted = driver.acquire("ab")

    driver.handle(ev.TierOff(tier=1, fenced=False))

    assert outcomes(driver) == [Outcome.FAILED]
    assert driver.books.leases[granted.lease].state is LeaseState.READY
    assert driver.books.leases[granted.lease].token_count == 0


def test_slots_of_a_tier_that_is_off_are_quiet_only_when_it_is_fenced() -> None:
    driver = make_driver(host=8)
    driver.compute("ab")

    driver.handle(ev.TierOff(tier=1, fenced=False))
    unfenced = driver.free_in("host")
    driver.handle(ev.TierOff(tier=1, fenced=True))

    assert unfenced == 6
    assert driver.free_in("host") == 8
    assert len(driver.told(ef.Settled)) == 1


def test_blocks_of_a_tier_that_is_off_wait_for_it() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "xyz")

    driver.handle(ev.TierOff(tier=1, fenced=True))
    while_off = driver.acquire("ab")
    driver.release(while_off.lease)
    driver.handle(ev.TierOn(tier=1, kept=True))

    assert while_off.miss.reason is MissReason.TIER_OFF
    assert driver.acquire("ab").cached_by_tier == (0, 4)


def test_a_tier_that_lost_its_bytes_has_lost_its_blocks() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("ab", "xyz")
    driver.handle(ev.TierOff(tier=1, fenced=True))

    driver.handle(ev.TierOn(tier=1, kept=False))

    assert driver.cached_in("host") == set()
    assert driver.free_in("host") == 8
    assert driver.acquire("ab").miss.reason is MissReason.LOST


def test_a_tier_that_lost_its_bytes_without_a_word_fails_what_is_under_way() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")
    granted = driver.acquire("ab")

    driver.handle(ev.TierOn(tier=1, kept=False))
    driver.finish()

    lease = driver.books.leases[granted.lease]
    assert (lease.state, lease.token_count) == (LeaseState.READY, 0)
    assert driver.cached_in("host") == set()


def test_a_tier_below_a_hub_that_is_off_cannot_be_reached() -> None:
    driver = make_driver(host=8, disk=8)
    driver.discover(2, "ab")

    driver.handle(ev.TierOff(tier=1, fenced=True))

    assert driver.acquire("ab").cached_tokens == 0


def test_a_tier_below_that_is_off_leaves_the_hub_alone() -> None:
    driver = make_driver(device=4, host=8, disk=8)
    driver.store("ab", "xyz")

    driver.handle(ev.TierOff(tier=2, fenced=True))

    assert driver.acquire("ab").cached_by_tier == (0, 4, 0)


@pytest.mark.parametrize("tier", [-1, 0, 2])
def test_a_tier_that_is_not_below_the_device_is_refused(tier: int) -> None:
    driver = make_driver(host=8)

    for event in (ev.TierOff(tier=tier, fenced=True), ev.TierOn(tier=tier, kept=True)):
        with pytest.raises(ValueError, match=f"tier is {tier}, must be from 1 to 1"):
            driver.handle(event)


# -------------------------------------------------------------------- discovered


def test_discovered_blocks_can_be_matched() -> None:
    driver = make_driver(host=8)

    driver.discover(1, "ab")

    assert driver.cached_in("host") == {"a", "ab"}
    assert driver.acquire("ab").cached_by_tier == (0, 4)


def test_blocks_in_a_foreign_form_are_known_but_of_no_use() -> None:
    driver = make_driver(host=8)

    driver.discover(1, "ab", foreign=True)

    assert driver.free_in("host") == 8
    assert driver.acquire("ab").miss.reason is MissReason.FORM


def test_a_block_of_our_own_form_outweighs_a_foreign_one() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab", foreign=True)

    driver.store("ab")

    assert driver.acquire("ab").cached_tokens == 4


def test_what_is_discovered_twice_is_there_once() -> None:
    driver = make_driver(host=8)
    driver.discover(1, "ab")
    before = freeze(driver.machine)

    driver.discover(1, "ab")

    assert freeze(driver.machine) == before


def test_a_block_discovered_before_the_one_it_follows_leaves_before_it() -> None:
    driver = make_driver(host=2)
    first, second = driver.keys("ab")
    slots = np.array([0, 1], dtype=np.int32)
    driver.handle(ev.Discovered(tier=1, keys=[second, first], parents=[first, None], slots=slots))

    driver.release(driver.acquire("a", ttl_s=1.0).lease)
    driver.finish()
    driver.tick(after_s=2.0)

    assert driver.leaving_order(1) == ["ab", "a"]


def test_a_block_discovered_without_the_one_it_follows_waits_for_it() -> None:
    driver = make_driver(host=8)
    first, second = driver.keys("ab")
    driver.handle(
        ev.Discovered(tier=1, keys=[second], parents=[first], slots=np.zeros(1, np.int32))
    )

    alone = driver.acquire("ab")
    driver.commit(alone.lease, "a")
    driver.release(alone.lease)
    driver.finish()

    assert alone.cached_tokens == 0
    assert driver.acquire("ab").cached_by_tier == (2, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": np.array([0, 5], np.int32)}, "slot 0 of tier 'host' is not free"),
        ({"slots": np.array([5, 8], np.int32)}, "slot 8 is outside of tier 'host'"),
        ({"slots": np.array([5, -1], np.int32)}, "slot -1 is outside of tier 'host'"),
        ({"slots": np.array([5, 5], np.int32)}, "occurs twice"),
        ({"slots": np.array([5], np.int32)}, "2 keys, 2 parents and 1 slot"),
        ({"parents": [None]}, "2 keys, 1 parent and 2 slots"),
    ],
)
def test_a_discovery_that_makes_no_sense_changes_nothing(change: dict[str, Any], says: str) -> None:
    driver = make_driver(host=8)
    driver.discover(1, "a")
    keys = driver.keys("xy")
    event: dict[str, Any] = {
        "tier": 1,
        "keys": keys,
        "parents": [None, keys[0]],
        "slots": np.array([5, 6], np.int32),
    }
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=says):
        driver.handle(ev.Discovered(**(event | change)))

    assert freeze(driver.machine) == before


def test_a_block_that_follows_itself_is_refused() -> None:
    driver = make_driver(host=8)
    keys = driver.keys("a")
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="parents"):
        driver.handle(ev.Discovered(tier=1, keys=keys, parents=keys, slots=np.zeros(1, np.int32)))

    assert freeze(driver.machine) == before


def test_blocks_that_follow_each_other_in_a_circle_are_refused() -> None:
    driver = make_driver(host=8)
    keys = driver.keys("ab")
    slots = np.arange(2, dtype=np.int32)
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="parents"):
        driver.handle(ev.Discovered(tier=1, keys=keys, parents=keys[::-1], slots=slots))

    assert freeze(driver.machine) == before
