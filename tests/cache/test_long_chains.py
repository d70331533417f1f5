"""Long chains leave a tier in the same order, and in the same number, as short ones."""

from __future__ import annotations

import pytest

from penstock.cache.eviction import POLICIES
from tests.cache.test_tier import Cache, assert_leaf_first

LETTERS = "abcdefghijklmnopqrst"


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("wanted", [9, 10, 12, 19, 20])
def test_of_a_long_chain_no_more_blocks_are_set_aside_than_slots_are_missing(
    eviction: str, wanted: int
) -> None:
    cache = Cache(slot_count=len(LETTERS), eviction=eviction)
    cache.add(LETTERS)

    room = cache.tier.plan_room(wanted, None)

    ends = range(len(LETTERS), len(LETTERS) - wanted, -1)
    assert cache.words(room.victims) == [LETTERS[:end] for end in ends]


def test_a_block_used_later_than_its_followers_waits_for_its_turn() -> None:
    cache = Cache(eviction="lru")
    cache.add("ab")
    cache.add("x")
    cache.tier.touch(cache.array("a"), tick=9)

    assert cache.order() == ["ab", "x", "a"]


def test_the_part_of_a_long_chain_that_was_used_later_waits_for_its_turn() -> None:
    cache = Cache(slot_count=len(LETTERS) + 1, eviction="lru")
    cache.add(LETTERS)
    cache.add("x")
    used = [LETTERS[:end] for end in range(1, 11)]
    cache.tier.touch(cache.array(*used), tick=9)

    order = cache.order()

    assert order.index("x") == len(LETTERS) - len(used)
    assert order[order.index("x") + 1 :] == used[::-1]


def test_a_block_numbered_before_a_long_chain_does_not_leave_with_it() -> None:
    """It has a follower here, as each block of the chain but the last has."""
    cache = Cache(slot_count=len(LETTERS), eviction="lru")
    cache.add("X")
    cache.add(LETTERS[:10])
    cache.add("XY", after="X")
    cache.tier.touch(cache.array("X"), tick=2)
    assert cache.node("X") == cache.node("a") - 1

    victims = cache.tier.plan_room(len(LETTERS), None).victims

    assert_leaf_first(cache.words(victims))
    assert cache.words(victims)[-2:] == ["XY", "X"]
