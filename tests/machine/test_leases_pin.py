"""Pinned prefixes: a pin is on keys, not on copies."""

from __future__ import annotations

import pytest

from lab.fixtures.frozen import freeze
from penstock.cache.eviction import POLICIES
from penstock.cache.operations import Purpose
from penstock.cache.settings import TierSettings
from penstock.errors import CapacityError
from penstock.machine import events as ev
from tests.machine.conftest import make_driver


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_pinned_prefix_stays_in_every_tier(eviction: str) -> None:
    driver = make_driver(device=6, host=6, eviction=eviction)
    driver.store("ab")

    pinned = driver.pin("ab")
    driver.store("vwx", "uxy", "rst")

    assert pinned.present == 2
    assert driver.tiers_with("ab") == driver.tiers_with("a") == {"device", "host"}


def test_blocks_before_a_pinned_one_stay_with_it() -> None:
    driver = make_driver(device=6)
    driver.store("abc")
    driver.handle(ev.PinBlocks(keys=[driver.key("abc")]))

    driver.store("xy", "uv")

    assert driver.cached_in("device") >= {"a", "ab", "abc"}


def test_a_prefix_can_be_pinned_before_it_is_computed() -> None:
    driver = make_driver(device=6)

    pinned = driver.pin("ab")
    driver.store("ab", "xyz", "uvw")

    assert pinned.present == 0
    assert driver.cached_in("device") >= {"a", "ab"}


def test_a_pinned_block_that_is_lost_is_pinned_again_when_it_comes_back() -> None:
    driver = make_driver(device=6)
    driver.store("ab")
    driver.pin("ab")
    driver.handle(ev.RankLost(rank=0))
    driver.handle(ev.RankBack(rank=0))

    driver.store("ab", "xyz", "uvw")

    assert driver.cached_in("device") >= {"a", "ab"}


def test_an_unpinned_prefix_leaves_when_its_turn_comes() -> None:
    driver = make_driver(device=6)
    driver.store("ab")
    pinned = driver.pin("ab")

    driver.handle(ev.UnpinBlocks(pin=pinned.pin))
    driver.store("xyz", "uvw")

    assert driver.tiers_with("ab") == set()


def test_a_block_stays_until_its_last_pin_is_gone() -> None:
    driver = make_driver(device=8)
    driver.store("ab")
    first, second = driver.pin("ab"), driver.pin("a")

    driver.handle(ev.UnpinBlocks(pin=first.pin))
    after_first = driver.leaving_order()
    driver.handle(ev.UnpinBlocks(pin=second.pin))

    assert after_first == ["ab"]
    assert driver.leaving_order() == ["ab", "a"]


def test_a_block_being_demoted_stays_when_it_is_pinned() -> None:
    device = TierSettings(name="device", slot_count=4, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=8, write="write_back")
    driver.store("abc")
    driver.tick()

    driver.handle(ev.PinBlocks(keys=[driver.key("abc")]))
    driver.complete(driver.copy(Purpose.DEMOTE))

    assert driver.tiers_with("abc") == {"device", "host"}


def test_a_reset_takes_pinned_blocks_too() -> None:
    driver = make_driver(device=6)
    driver.store("ab")
    driver.pin("ab")

    driver.reset()

    assert driver.cached_in("device") == set()
    assert driver.machine.statistics().pins == 1


def test_pins_are_limited_to_a_share_of_the_smallest_tier() -> None:
    driver = make_driver(device=12, host=8, pin_share=0.5)
    driver.pin("abc")
    before = freeze(driver.machine)

    with pytest.raises(CapacityError) as refused:
        driver.pin("xy")

    assert (refused.value.tier, refused.value.wanted, refused.value.available) == ("host", 2, 1)
    assert freeze(driver.machine) == before


def test_a_key_pinned_twice_counts_once_against_the_limit() -> None:
    driver = make_driver(device=8, pin_share=0.5)
    driver.pin("abcd")

    pinned = driver.pin("abc")

    assert pinned.pin == 2


def test_room_for_pins_comes_back_with_unpinning() -> None:
    driver = make_driver(device=8, pin_share=0.5)
    pinned = driver.pin("abcd")

    driver.handle(ev.UnpinBlocks(pin=pinned.pin))

    assert driver.pin("wxyz").pin == 2


def test_a_key_twice_in_one_pin_is_refused() -> None:
    driver = make_driver(device=8)

    with pytest.raises(ValueError, match="a key occurs twice"):
        driver.handle(ev.PinBlocks(keys=[driver.key("a")] * 2))


def test_a_pin_ends_once() -> None:
    driver = make_driver(device=8)
    pinned = driver.pin("a")
    driver.handle(ev.UnpinBlocks(pin=pinned.pin))

    with pytest.raises(ValueError, match="pin is 1: it was unpinned, or never given"):
        driver.handle(ev.UnpinBlocks(pin=pinned.pin))
