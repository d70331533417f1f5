"""Tiers whose rooms add up: what lies above need not lie below, until it is about to leave."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache.operations import BlockFault, Purpose
from penstock.cache.settings import TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

if TYPE_CHECKING:
    from tests.machine.conftest import Driver

EXCLUSIVE = WritePolicy(kind=WriteKind.EXCLUSIVE)


def tier(name: str, slot_count: int, **settings: Any) -> TierSettings:
    return TierSettings(name=name, slot_count=slot_count, **{"write": EXCLUSIVE, **settings})


def kept(driver: Driver) -> set[str]:
    return driver.cached_in("device") | driver.cached_in("host")


def dropped(driver: Driver) -> int:
    return driver.machine.statistics().blocks_dropped_unsaved


@pytest.mark.parametrize(("write", "count"), [("write_through", 8), ("exclusive", 14)])
def test_rooms_add_up_but_for_what_leaves_next(write: str, count: int) -> None:
    driver = make_driver(device=8, host=8, write=write)

    driver.store(*string.ascii_lowercase)

    # Each prompt takes two slots, of which one is free again; and one block is kept twice.
    assert len(kept(driver)) == count
    assert kept(driver) == set(string.ascii_lowercase[-count:])


def test_while_there_is_free_room_blocks_are_saved_at_once() -> None:
    driver = make_driver(device=16, host=4, write="exclusive")

    driver.store("ab", "c", "def")

    assert driver.cached_in("host") == {"a", "ab", "c", "d"}
    assert driver.cached_in("device") == {"a", "ab", "c", "d", "de", "def"}


def test_a_full_tier_is_not_written_to_while_nothing_is_about_to_leave() -> None:
    driver = make_driver(device=16, host=2, write="exclusive")
    driver.store("ab")

    driver.compute("c")

    assert not driver.copies


def until_one_is_saved(driver: Driver) -> tuple[ef.Copy, str]:
    """Computes prompts until the first copy of a block that is about to leave, and its word."""
    for word in "cdefgh":
        driver.compute(word)
        if driver.copies:
            break
    save = driver.copy(Purpose.SAVE)
    return save, driver.words(save.keys)[-1]


def test_a_block_that_is_about_to_leave_is_saved_and_leaves_without_a_copy() -> None:
    driver = make_driver(device=6, host=2, write="exclusive")
    driver.store("a", "b")
    save, word = until_one_is_saved(driver)
    assert word in driver.cached_in("device")

    driver.complete(save)
    driver.store("x", "y", "z", "v", "w")

    assert word not in driver.cached_in("device")
    assert dropped(driver) == 0


def test_no_block_is_evicted_while_it_is_saved() -> None:
    driver = make_driver(device=6, host=2, write="exclusive")
    driver.store("a", "b")
    save, word = until_one_is_saved(driver)

    driver.acquire("xyz")

    assert word in driver.cached_in("device")
    driver.complete(save)
    assert word in driver.cached_in("host")


def test_a_save_that_fails_leaves_the_block_where_it_is() -> None:
    driver = make_driver(device=6, host=2, write="exclusive")
    driver.store("a", "b")
    save, word = until_one_is_saved(driver)

    driver.report(save, failure="link down")

    assert word in driver.cached_in("device")
    assert word not in driver.cached_in("host")


def test_copies_that_the_tier_above_keeps_longest_make_room_first() -> None:
    driver = make_driver(device=8, host=4, write="exclusive")
    driver.store("a", "b", "c", "d", "e", "f")
    driver.store("b")  # Used again: the device keeps it longer than all others.

    driver.store("g", "h", "i", "j")

    assert driver.tiers_with("b") == {"device"}
    assert {"a", "c", "d"} <= kept(driver)


def test_the_copy_of_a_block_makes_room_even_if_others_follow_it() -> None:
    driver = make_driver(device=8, host=4, write="exclusive")
    driver.store("abc")
    for word in "stuvwxyz":
        driver.store(word, "a")

    # The device has the first block; what follows it is found below.
    assert driver.tiers_with("a") == {"device"}


def test_a_block_that_was_loaded_gives_its_room_below_to_others() -> None:
    driver = make_driver(device=6, host=4, write="exclusive")
    driver.store(*"abcdefgh")
    assert "c" in driver.cached_in("host") - driver.cached_in("device")

    driver.store("c", "x")

    assert driver.tiers_with("c") == {"device"}


def test_what_a_longer_request_than_before_takes_is_counted() -> None:
    driver = make_driver(device=12, host=4, write="exclusive")
    driver.store(*"abcdefghijkl")

    driver.store("mnopqrstuv")

    assert dropped(driver) > 0


def test_what_nobody_expects_to_come_back_is_not_saved() -> None:
    driver = make_driver(device=6, host=1, write="exclusive")
    driver.store("a")

    driver.store("b", "c", "d", "e", keep_blocks=0)

    assert driver.cached_in("host") == {"a"}


def test_a_tier_that_comes_back_empty_is_given_what_leaves_next() -> None:
    driver = make_driver(device=6, host=8, write="exclusive")
    driver.store("a", "b", "c", "d", "e")
    driver.handle(ev.TierOff(tier=1, fenced=True))
    driver.store("f")
    driver.handle(ev.TierOn(tier=1, kept=False))
    driver.finish()

    driver.store("g", "h")

    assert {"b", "c"} <= driver.cached_in("host")


def test_a_request_waits_until_what_it_evicts_is_saved() -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store(*"abcdefghijklmno")

    granted = driver.acquire("vwxyz")
    before = kept(driver)
    driver.finish()

    assert granted.state is LeaseState.LOADING
    assert dropped(driver) == 0
    assert not {"k", "l", "m"} <= before
    assert {"j", "k", "l", "m", "n", "o"} <= kept(driver)
    assert driver.books.leases[granted.lease].state is LeaseState.READY
    driver.commit(granted.lease, "vwxyz")
    driver.release(granted.lease)
    driver.finish()
    assert "vwxyz" in driver.cached_in("device")


def test_a_request_that_leaves_does_not_end_the_saves_it_waited_for() -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store(*"abcdefghijklmno")
    granted = driver.acquire("vwxyz")
    copies = list(driver.copies.values())

    driver.release(granted.lease)

    assert {copy.purpose for copy in copies} == {Purpose.SAVE}
    assert driver.told(ef.Abandon) == []
    free = driver.free_in("device")
    driver.finish()
    assert driver.free_in("device") > free
    assert dropped(driver) == 0


def test_when_saves_fail_the_request_computes_all_the_same() -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store(*"abcdefghijklmno")
    granted = driver.acquire("vwxyz")

    while driver.copies:
        driver.report(next(iter(driver.copies.values())), failure="link down")

    assert driver.books.leases[granted.lease].state is LeaseState.READY
    driver.commit(granted.lease, "vwxyz")


def test_a_request_whose_load_fails_still_waits_for_what_it_evicted() -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store("abc", *"defghijk")
    granted = driver.acquire("abcxyz")
    assert {copy.purpose for copy in driver.copies.values()} == {Purpose.LOAD, Purpose.SAVE}

    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.UNREADABLE)])

    assert driver.books.leases[granted.lease].state is LeaseState.LOADING
    driver.finish()
    assert driver.books.leases[granted.lease].state is LeaseState.READY


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_is_lost_if_a_rank_may_still_read_where_it_computes(ranks: int) -> None:
    driver = make_driver(device=8, host=8, write="exclusive", ranks=ranks)
    driver.store(*"abcdefghijklmno")
    granted = driver.acquire("vwxyz")

    for save in list(driver.copies.values()):
        driver.report(save, failure="link down")

    found = driver.books.leases[granted.lease].state
    assert found is (LeaseState.READY if ranks == 1 else LeaseState.LOST)


def test_what_was_found_is_not_evicted_for_what_has_to_leave() -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store("abc", *"defghijk")
    assert driver.tiers_with("abc") == {"host"}

    granted = driver.acquire("abcxyz")
    driver.finish()

    assert granted.cached_by_tier == (0, 6)
    assert driver.books.leases[granted.lease].cached_by_tier == (0, 6)


@pytest.mark.parametrize("wish", [{"deadline": 99.0}, {"search_until": 99.0}])
def test_a_request_in_a_hurry_does_not_wait_for_saves(wish: dict[str, float]) -> None:
    driver = make_driver(device=8, host=8, write="exclusive")
    driver.store(*"abcdefghijklmno")

    driver.acquire("vwxyz", **wish)

    assert dropped(driver) > 0


def test_what_a_tier_below_gets_at_once_passes_through_a_full_one() -> None:
    driver = make_driver(
        device=16, host=tier("host", 2), disk=tier("disk", 16, write=WritePolicy())
    )

    driver.store("a", "b", "c", "d", "e")

    assert driver.cached_in("disk") == {"a", "b", "c", "d", "e"}


def test_what_is_hit_often_enough_passes_through_a_full_tier() -> None:
    earned = WritePolicy(kind=WriteKind.SELECTIVE, hits=1)
    driver = make_driver(device=16, host=tier("host", 2), disk=tier("disk", 16, write=earned))
    driver.store("a", "b", "c", "d")
    assert driver.cached_in("disk") == set()

    driver.store("d")

    assert driver.cached_in("disk") == {"d"}


def test_rooms_of_three_tiers_add_up() -> None:
    driver = make_driver(device=6, host=6, disk=6, write="exclusive")

    driver.store(*string.ascii_lowercase)

    everywhere = kept(driver) | driver.cached_in("disk")
    assert len(everywhere) > 10
    assert everywhere == set(string.ascii_lowercase[-len(everywhere) :])


def test_nothing_is_asked_of_a_rank_that_came_back_before_its_tiers_are_known() -> None:
    """Which of them it has, it says right after that."""
    driver = make_driver(device=6, host=6, disk=6, write="exclusive")
    driver.store(*string.ascii_lowercase)
    for word in string.ascii_uppercase:
        driver.compute(word)
        while saves := [each for each in driver.copies.values() if each.source == 0]:
            driver.complete(saves[0])
        if driver.copies:
            break
    (down,) = driver.copies.values()
    driver.handle(ev.RankLost(rank=0))

    driver.handle(ev.RankBack(rank=0))

    assert not driver.told(ef.Copy)
    driver.handle(ev.Tick())
    assert [(each.source, each.target) for each in driver.told(ef.Copy)] == [
        (down.source, down.target)
    ]


def test_a_tenant_over_its_quota_finds_what_it_had_to_give_up() -> None:
    device = TierSettings(name="device", slot_count=16, quotas={"ann": 0.25})
    driver = make_driver(device=device, host=tier("host", 4))
    driver.store("w", "x", "y", "z", tenant="bob")
    driver.store("a", "b", "c", "d", "e", "f", tenant="ann")

    assert {"c", "d", "e", "f"} <= kept(driver)


def test_a_block_that_turns_out_corrupt_below_is_computed() -> None:
    driver = make_driver(device=6, host=6, write="exclusive")
    driver.store(*"abcdefgh")
    (word, *_) = sorted(driver.cached_in("host") - driver.cached_in("device"))

    driver.acquire(word)
    driver.report(driver.copy(Purpose.LOAD), faults=[(0, BlockFault.CORRUPT)])

    assert word not in kept(driver)


def test_pinned_copies_do_not_make_room() -> None:
    driver = make_driver(device=8, host=4, write="exclusive")
    driver.pin("a")
    driver.store("a", "b", "c", "d")
    driver.store("a")

    driver.store("e", "f", "g", "h")

    assert driver.tiers_with("a") == {"device", "host"}
