"""Acquire: matches, pins, allocates the rest, all or nothing; never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.eviction import POLICIES
from penstock.cache.explain import MissReason
from penstock.cache.operations import Purpose
from penstock.cache.states import LeaseState, SlotState
from penstock.errors import CapacityError, LeaseError, UnavailableError
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver


def slot_states(driver: Driver, table: Any) -> list[SlotState]:
    return [SlotState(int(driver.books.device.pool.state[slot])) for slot in table]


# -------------------------------------------------------------------- what is found


def test_an_unknown_prompt_gets_slots_for_all_its_tokens() -> None:
    driver = make_driver(device=8)

    granted = driver.acquire("ab", more_tokens=1)

    assert granted.state is LeaseState.READY
    assert granted.cached_tokens == 0
    assert len(granted.table) == 3
    assert slot_states(driver, granted.table) == [SlotState.FILLING] * 3


def test_the_longest_known_prefix_is_found() -> None:
    driver = make_driver(device=16)
    driver.store("abc", "abx", "q")

    granted = driver.acquire("abxyz")

    assert granted.cached_tokens == 6
    assert granted.state is LeaseState.READY


def test_found_blocks_are_the_ones_that_were_stored() -> None:
    driver = make_driver(device=8)
    first = driver.compute("abc")

    second = driver.acquire("abc")

    assert second.table[:3].tolist() == first.table[:3].tolist()


def test_a_prefix_is_matched_over_all_tiers_in_one_ordered_list() -> None:
    driver = make_driver(device=4, host=8, disk=8)
    driver.discover(2, "abcd")
    driver.store("ab")
    lease = driver.acquire("a")

    granted = driver.acquire("abc", more_tokens=0)

    assert driver.tiers_with("a") == {"device", "host", "disk"}
    assert granted.cached_tokens == 4
    assert granted.table[0] == lease.table[0]


def test_blocks_of_device_and_host_may_alternate() -> None:
    driver = make_driver(device=6, host=8)
    driver.store("abc")
    middle = driver.books.nodes.get(driver.key("ab"))
    slots = driver.books.device.slot_of[[middle]]
    driver.books.condemn(driver.books.device, slots, MissReason.LOST, 0.0, "test")
    assert [driver.tiers_with(word) for word in ("a", "ab", "abc")] == [
        {"device", "host"},
        {"host"},
        {"device", "host"},
    ]

    granted = driver.acquire("abc")
    load = driver.copy(Purpose.LOAD)
    driver.complete(load)

    assert granted.cached_by_tier == (4, 2)
    assert granted.state is LeaseState.LOADING
    assert driver.words(load.keys) == ["ab"]
    assert load.target_slots.tolist() == [granted.table[1]]
    keys = driver.books.nodes.keys_of(driver.books.device.pool.node[granted.table[:3]].tolist())
    assert keys == driver.keys("abc")


def test_tokens_are_counted_for_the_nearest_tier_they_were_found_in() -> None:
    driver = make_driver(device=4, host=8, disk=8)
    driver.discover(2, "abc")
    driver.store("a")

    granted = driver.acquire("abc")

    assert granted.cached_by_tier == (2, 0, 4)


def test_whole_blocks_alone_are_matched() -> None:
    driver = make_driver(device=8)
    granted = driver.acquire("ab", more_tokens=1)
    driver.commit(granted.lease, "ab", more_tokens=1)

    again = driver.acquire("ab", more_tokens=1)

    assert again.cached_tokens == 4
    assert again.table[2] != granted.table[2]


# -------------------------------------------------------------------- a hit on everything


def test_a_hit_on_the_whole_prompt_leaves_a_token_to_compute() -> None:
    driver = make_driver(device=8)
    driver.store("abc")

    granted = driver.acquire("abc", more_tokens=0)

    assert granted.cached_tokens == 4
    assert granted.miss.reason is MissReason.NONE


def test_a_hit_on_the_whole_prompt_does_not_rewrite_a_shared_block() -> None:
    driver = make_driver(device=8)
    first = driver.compute("abc")

    granted = driver.acquire("abc", more_tokens=0)

    assert granted.table[2] not in first.table[:3]
    assert slot_states(driver, granted.table[2:]) == [SlotState.FILLING]


def test_the_block_computed_again_for_a_whole_hit_leaves_no_second_copy() -> None:
    driver = make_driver(device=8)
    driver.store("abc")

    driver.store("abc")
    granted = driver.acquire("abc", more_tokens=0)
    driver.commit(granted.lease, "abc")
    driver.release(granted.lease)

    assert driver.free_in("device") == 5


def test_a_prompt_of_one_token_finds_nothing_and_gets_a_block() -> None:
    driver = make_driver(device=8)

    granted = driver.acquire("", more_tokens=1)

    assert granted.cached_tokens == 0
    assert len(granted.table) == 1
    assert granted.miss.reason is MissReason.NONE


# -------------------------------------------------------------------- what is not matched


def test_a_block_that_is_being_computed_is_not_matched() -> None:
    driver = make_driver(device=8)
    driver.acquire("ab")

    granted = driver.acquire("ab")

    assert granted.cached_tokens == 0


def test_a_block_not_filled_on_every_rank_is_not_matched_as_ready() -> None:
    driver = make_driver(device=8, host=8, ranks=2)
    driver.discover(1, "ab")
    first = driver.acquire("ab")
    load = driver.copy(Purpose.LOAD)

    driver.report(load, rank=1)
    second = driver.acquire("ab")
    states_before = [driver.books.leases[granted.lease].state for granted in (first, second)]
    driver.report(load, rank=0)

    assert states_before == [LeaseState.LOADING, LeaseState.LOADING]
    assert {lease.state for lease in driver.books.leases.values()} == {LeaseState.READY}


def test_a_block_saved_on_some_ranks_alone_is_not_matched() -> None:
    driver = make_driver(device=8, host=8, ranks=2)
    granted = driver.acquire("ab")
    driver.commit(granted.lease, "ab")
    driver.report(driver.copy(Purpose.SAVE), rank=0)
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))
    driver.release(granted.lease)

    again = driver.acquire("ab")

    assert again.cached_tokens == 0
    assert again.miss.reason is MissReason.FILLING


def test_a_block_being_saved_again_is_not_staged_from_below_at_the_same_time() -> None:
    driver = make_driver(device=8, host=2, disk=8, ranks=2)
    driver.store("a", "x", "y")
    assert driver.tiers_with("a") == {"device", "disk"}
    driver.preempt(driver.acquire("a").lease)
    driver.report(driver.copy(Purpose.SAVE), rank=0)
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))

    granted = driver.acquire("a")
    driver.finish()

    assert driver.books.leases[granted.lease].state is LeaseState.READY
    assert "host" in driver.tiers_with("a")


def test_a_hit_is_a_use_in_every_tier_that_has_the_block() -> None:
    driver = make_driver(device=8, host=8, disk=8)
    driver.store("a", "b")

    driver.release(driver.acquire("a").lease)

    assert [driver.leaving_order(tier) for tier in range(3)] == [["b", "a"]] * 3


def test_a_request_may_opt_out_of_reuse() -> None:
    driver = make_driver(device=8)
    driver.store("ab")

    granted = driver.acquire("ab", reuse=False)

    assert granted.cached_tokens == 0
    assert granted.miss.reason is MissReason.OPTED_OUT


def test_a_request_may_opt_out_of_loading() -> None:
    driver = make_driver(device=4, host=8)
    driver.store("abc", "a")
    driver.store("x")
    assert driver.tiers_with("a") == {"device", "host"}
    assert driver.tiers_with("abc") == {"host"}

    granted = driver.acquire("abc", load=False)

    assert granted.cached_by_tier[1] == 0
    assert granted.miss.reason is MissReason.OPTED_OUT
    assert not driver.copies


# -------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_refused_request_changes_nothing(eviction: str) -> None:
    driver = make_driver(device=6, host=8, eviction=eviction)
    driver.store("abc", "x", "x", "x")
    driver.acquire("q")
    before, order = freeze(driver.machine), driver.leaving_order()

    with pytest.raises(CapacityError) as refused:
        driver.acquire("abxyz")

    assert freeze(driver.machine) == before
    assert driver.leaving_order() == order
    assert (refused.value.tier, refused.value.wanted, refused.value.available) == ("device", 4, 2)


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_refused_request_is_not_felt_later_either(eviction: str) -> None:
    def life(*, with_refusal: bool) -> list[str]:
        driver = make_driver(device=6, eviction=eviction)
        driver.store("x", "x", "x", "y", "y", "y", *"pqrstu", "x", "x")
        driver.acquire("", more_tokens=1)
        if with_refusal:
            with pytest.raises(CapacityError, match="can give 5 slots, wanted: 6"):
                driver.acquire("abcde")
        driver.store("y")
        return driver.leaving_order()

    assert life(with_refusal=True) == life(with_refusal=False)


def test_a_refused_request_is_counted() -> None:
    driver = make_driver(device=2)

    with pytest.raises(CapacityError):
        driver.acquire("abc")

    statistics = driver.machine.statistics()
    assert (statistics.requests, statistics.requests_refused) == (0, 1)


def test_a_refused_request_can_be_served_later() -> None:
    driver = make_driver(device=4)
    lease = driver.acquire("xyz").lease
    with pytest.raises(CapacityError):
        driver.acquire("ab")

    driver.release(lease)

    assert driver.acquire("ab").state is LeaseState.READY


def test_found_blocks_are_not_evicted_to_make_room_for_the_rest() -> None:
    driver = make_driver(device=4)
    driver.store("abc", "x")

    granted = driver.acquire("abq")

    assert granted.cached_tokens == 4
    assert driver.cached_in("device") == {"a", "ab"}


def test_a_lease_keeps_its_blocks_from_eviction() -> None:
    driver = make_driver(device=4)
    lease = driver.acquire("ab").lease
    driver.commit(lease, "ab")

    with pytest.raises(CapacityError):
        driver.acquire("xy")

    assert driver.cached_in("device") == {"a", "ab"}


@pytest.mark.parametrize(
    ("keys", "token_count", "says"),
    [(0, 0, "at least one token"), (1, 4, "1 keys for 4 tokens"), (3, 4, "3 keys for 4 tokens")],
)
def test_a_request_that_makes_no_sense_is_refused(keys: int, token_count: int, says: str) -> None:
    driver = make_driver(device=8)
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match=says):
        driver.handle(
            ev.Acquire(request="r", keys=driver.keys("abc")[:keys], token_count=token_count)
        )

    assert freeze(driver.machine) == before


def test_a_prompt_with_a_key_twice_is_refused() -> None:
    driver = make_driver(device=8)
    driver.store("a")
    before = freeze(driver.machine)

    with pytest.raises(ValueError, match="a key occurs twice"):
        driver.handle(ev.Acquire(request="r", keys=[driver.key("a")] * 2, token_count=5))

    assert freeze(driver.machine) == before


def test_no_request_is_served_while_a_rank_is_lost() -> None:
    driver = make_driver(device=8, ranks=3)
    driver.handle(ev.RankLost(rank=2))

    with pytest.raises(UnavailableError, match="rank 2 is lost"):
        driver.acquire("ab")


def test_an_engine_that_manages_its_own_slots_cannot_acquire() -> None:
    driver = make_driver(device=None, host=8)

    with pytest.raises(ValueError, match="use lookup, load and save"):
        driver.acquire("ab")


def test_a_lease_that_was_released_cannot_be_used() -> None:
    driver = make_driver(device=8)
    lease = driver.acquire("ab").lease
    driver.release(lease)

    for event in (
        ev.ReleaseLease(lease=lease),
        ev.Preempt(lease=lease),
        ev.Grow(lease=lease, token_count=9),
        ev.Commit(lease=lease, token_count=5, keys=driver.keys("ab")),
        ev.Fork(lease=lease, request="fork"),
    ):
        with pytest.raises(LeaseError, match="was released, or never given"):
            driver.handle(event)


def test_a_lease_that_waits_cannot_compute() -> None:
    driver = make_driver(device=8, host=8)
    driver.discover(1, "ab")
    lease = driver.acquire("ab").lease
    before = freeze(driver.machine)

    for event in (
        ev.Grow(lease=lease, token_count=9),
        ev.Commit(lease=lease, token_count=5, keys=[]),
        ev.Fork(lease=lease, request="fork"),
    ):
        with pytest.raises(LeaseError, match="is loading"):
            driver.handle(event)

    assert freeze(driver.machine) == before


def test_what_a_refused_request_had_matched_may_leave_for_another() -> None:
    driver = make_driver(device=6, pin_share=0.5)
    driver.store("xy", "ab")
    driver.pin("xy")

    with pytest.raises(CapacityError):
        driver.acquire("abcd")

    assert len(driver.acquire("klm").table) == 4
