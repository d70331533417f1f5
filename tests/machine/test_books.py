"""Which blocks leave first, and what keeps them: policies, hints, tenants, followers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cache.eviction import POLICIES
from penstock.cache.explain import MissReason
from penstock.cache.operations import Purpose
from penstock.cache.settings import TierSettings
from penstock.errors import CapacityError, InvariantViolation
from penstock.machine import effects as ef
from penstock.machine import events as ev
from tests.machine.conftest import make_driver

each_policy = pytest.mark.parametrize("eviction", sorted(POLICIES))


def assert_leaf_first(order: list[str]) -> None:
    for position, word in enumerate(order):
        assert not [later for later in order[position + 1 :] if later.startswith(word)], order


# -------------------------------------------------------------------- leaf-first


@each_policy
def test_a_chain_is_evicted_from_its_end(eviction: str) -> None:
    driver = make_driver(device=8, eviction=eviction)
    driver.store("abcde")

    driver.acquire("vwx")

    assert driver.cached_in("device") == {"a", "ab", "abc", "abcd"}


@each_policy
def test_no_block_leaves_before_those_that_follow_it(eviction: str) -> None:
    driver = make_driver(device=16, eviction=eviction)
    driver.store("abc", "abx", "ay", "q", "abc", "ay", "qr")

    order = driver.leaving_order()

    assert sorted(order) == sorted(driver.cached_in("device"))
    assert_leaf_first(order)


@each_policy
def test_leaf_first_holds_in_lower_tiers_too(eviction: str) -> None:
    driver = make_driver(device=12, host=4, eviction=eviction)

    for word in ("abc", "abx", "pqr", "pqs", "x"):
        driver.store(word)
        order = driver.leaving_order(1)
        assert set(order) == driver.cached_in("host")
        assert_leaf_first(order)


@each_policy
def test_a_long_prompt_can_make_room_for_another(eviction: str) -> None:
    driver = make_driver(device=20, eviction=eviction)
    driver.store("abcdefghijklmno")

    driver.store("ABCDEFGHIJKLMNOPQRS")

    assert not [word for word in driver.cached_in("device") if word.startswith("a")]
    assert driver.machine.statistics().blocks_evicted == 15


# -------------------------------------------------------------------- order


def test_the_least_recently_used_prompt_leaves_first() -> None:
    driver = make_driver(device=8, eviction="lru")
    driver.store("a", "b", "c")

    driver.store("a")

    assert driver.leaving_order() == ["b", "c", "a"]


def test_a_few_prompts_seen_once_wash_out_what_was_reused_with_every_policy() -> None:
    lasted = {}
    for eviction in POLICIES:
        driver = make_driver(device=10, eviction=eviction)
        driver.store("a", "a", "a", "b", "b", "b")
        for letter in "cdefghijklmnop":
            driver.store(letter)
        lasted[eviction] = driver.cached_in("device") & {"a", "b"}

    # In so short a time nothing leads: `adaptive` does as LRU.
    assert lasted == {"lru": set(), "adaptive": set()}


# -------------------------------------------------------------------- who never leaves


@each_policy
def test_leased_filling_and_pinned_blocks_never_leave(eviction: str) -> None:
    driver = make_driver(device=8, host=8, eviction=eviction)
    driver.store("a", "b", "c", "q")
    driver.pin("a")
    driver.commit(driver.acquire("b", more_tokens=1).lease, "b", more_tokens=1)
    driver.handle(ev.Prefetch(keys=driver.keys("z"), cause="nothing"))

    assert sorted(driver.leaving_order()) == ["c", "q"]


def test_a_leaving_block_is_not_evicted_in_a_hurry() -> None:
    device = TierSettings(name="device", slot_count=4, low_watermark=0.5, high_watermark=0.75)
    driver = make_driver(device=device, host=8, write="write_back")
    driver.store("abc")
    driver.tick()
    assert driver.words(driver.copy(Purpose.DEMOTE).keys) == ["ab", "abc"]

    with pytest.raises(CapacityError) as refused:
        driver.acquire("xy")

    assert refused.value.available == 2
    assert driver.cached_in("device") == {"a", "ab", "abc"}


# -------------------------------------------------------------------- hints


@each_policy
def test_low_priority_leaves_first(eviction: str) -> None:
    driver = make_driver(device=12, eviction=eviction)
    driver.store("a", priority=1)
    driver.store("b", priority=-1)
    driver.store("c", "d")

    assert driver.leaving_order() == ["b", "c", "d", "a"]


def test_a_hit_can_raise_the_priority_of_a_block() -> None:
    driver = make_driver(device=12)
    driver.store("a", "b")

    driver.store("a", priority=3)
    driver.store("b")

    assert driver.leaving_order() == ["b", "a"]


def test_the_highest_priority_wins() -> None:
    driver = make_driver(device=12)
    driver.store("a", priority=3)
    driver.store("b", priority=2)

    driver.store("a", priority=1)
    driver.store("b", priority=2)

    assert driver.leaving_order() == ["b", "a"]


def test_a_priority_does_not_outlive_its_block() -> None:
    driver = make_driver(device=12)
    driver.store("a", priority=3)
    driver.reset()

    driver.store("a", "b")

    assert driver.leaving_order() == ["a", "b"]


@each_policy
def test_a_block_leaves_first_when_its_time_to_live_has_passed(eviction: str) -> None:
    driver = make_driver(device=12, eviction=eviction)
    driver.store("a", "b")
    driver.store("c", ttl_s=5.0, priority=9)

    driver.tick(after_s=4.9)
    alive = driver.leaving_order()
    driver.tick(after_s=0.2)

    assert alive == ["a", "b", "c"]
    assert driver.leaving_order() == ["c", "a", "b"]


def test_an_expired_block_can_still_be_matched() -> None:
    driver = make_driver(device=12)
    driver.store("a", ttl_s=5.0)

    driver.tick(after_s=6.0)

    assert driver.acquire("a").cached_tokens == 2


def test_the_latest_end_of_life_wins() -> None:
    driver = make_driver(device=12)
    driver.store("a", ttl_s=10.0)
    driver.store("a", ttl_s=5.0)
    driver.store("b")

    driver.tick(after_s=7.0)

    assert driver.leaving_order() == ["a", "b"]
    assert driver.machine.next_deadline() == 10.0


def test_a_new_time_to_live_brings_an_expired_block_back() -> None:
    driver = make_driver(device=12)
    driver.store("a", ttl_s=5.0)
    driver.tick(after_s=6.0)
    driver.store("b")

    driver.store("a", ttl_s=5.0)

    assert driver.leaving_order() == ["b", "a"]


def test_nothing_happens_when_the_time_of_a_block_that_left_has_passed() -> None:
    driver = make_driver(device=3)
    driver.store("a", ttl_s=5.0)
    driver.store("xy")

    driver.tick(after_s=6.0)

    assert driver.cached_in("device") == {"x", "xy"}
    assert driver.machine.next_deadline() is None


def test_a_time_to_live_does_not_outlive_its_block() -> None:
    driver = make_driver(device=3)
    driver.store("a", ttl_s=5.0)
    driver.store("xy")
    driver.store("a", "b")

    driver.tick(after_s=6.0)

    assert driver.leaving_order() == ["a", "b"]
    assert driver.machine.next_deadline() is None


def test_hits_with_a_time_to_live_leave_no_more_behind_than_there_are_blocks() -> None:
    driver = make_driver(device=30)
    prompt = "abcdefghijklmnopqrst"
    for _ in range(300):
        driver.now += 0.01
        driver.store(prompt, ttl_s=5.0)

    assert driver.books.expiries.entry_count <= 3 * driver.books.nodes.capacity
    driver.tick(after_s=6.0)
    assert driver.books.expiries.entry_count == 0
    assert driver.machine.next_deadline() is None


@each_policy
def test_a_conversation_that_is_over_is_let_go_at_once(eviction: str) -> None:
    driver = make_driver(device=12, eviction=eviction)
    driver.store("a", "b")

    driver.store("cde", keep_blocks=0)

    assert driver.leaving_order() == ["cde", "cd", "c", "a", "b"]
    assert driver.machine.statistics().blocks_let_go == 3


def test_only_blocks_after_those_to_keep_are_let_go() -> None:
    driver = make_driver(device=12)
    driver.store("a")

    driver.store("cde", keep_blocks=2)

    assert driver.leaving_order() == ["cde", "a", "cd", "c"]


def test_what_other_conversations_begin_with_is_not_let_go() -> None:
    driver = make_driver(device=12)
    driver.store("xya", "xyb")

    driver.store("xyb", keep_blocks=0)

    assert driver.leaving_order() == ["xyb", "xya", "xy", "x"]


def test_what_another_request_uses_is_not_let_go() -> None:
    driver = make_driver(device=12)
    driver.store("ab")
    other = driver.acquire("a", more_tokens=1)

    driver.store("ab", keep_blocks=0)
    driver.release(other.lease)
    driver.store("z")

    assert driver.leaving_order() == ["ab", "a", "z"]


def test_a_block_that_was_let_go_is_found_and_stays_from_then_on() -> None:
    driver = make_driver(device=12)
    driver.store("ab", keep_blocks=0)
    driver.store("c")

    driver.store("ab")

    assert driver.machine.statistics().tokens_cached == 4
    assert driver.leaving_order() == ["c", "ab", "a"]


def test_what_will_be_let_go_is_not_written_down() -> None:
    driver = make_driver(device=12, host=12)

    driver.store("abc", keep_blocks=1)

    assert driver.cached_in("host") == {"a"}
    assert driver.cached_in("device") == {"a", "ab", "abc"}


@each_policy
def test_a_tenant_raises_no_more_blocks_than_its_share(eviction: str) -> None:
    driver = make_driver(device=12, host=4, hint_share=0.25, eviction=eviction)

    driver.store("abcd", priority=9, tenant="greedy")
    driver.store("uv", priority=9, tenant="other")

    # Three of twelve and one of four, leading blocks first, and each tenant has its own share.
    assert driver.leaving_order() == ["abcd", "abc", "ab", "a", "uv", "u"]
    assert driver.leaving_order(1) == ["ab", "uv", "a", "u"]
    assert driver.machine.statistics().hints_refused == 1 + 3 + 1


def test_a_share_is_free_again_when_raised_blocks_have_left() -> None:
    driver = make_driver(device=6, hint_share=0.4)
    driver.store("ab", priority=9, ttl_s=5.0)
    driver.tick(after_s=6.0)

    driver.store("xy", priority=9)

    assert driver.leaving_order() == ["ab", "a", "xy", "x"]
    assert driver.machine.statistics().hints_refused == 0


# -------------------------------------------------------------------- tenants


@each_policy
def test_tenants_are_forgotten_when_nothing_is_left_of_them(eviction: str) -> None:
    device = TierSettings(name="device", slot_count=8, eviction=eviction, quotas={"*": 0.5})
    driver = make_driver(device=device)
    driver.store("a", tenant="ann")
    keeper = driver.acquire("b", tenant="bob").lease

    for number in range(120):
        driver.store(chr(0x4E00 + number), tenant=f"client {number}")

    # Eight slots, and at most twice as many tenants as have blocks, or a few in any case.
    assert len(driver.books.tenants) <= 64
    assert len(list(driver.books.device.quota_policies())) == len(driver.books.tenants)
    assert "bob" in driver.books.tenants
    driver.commit(keeper, "b")
    assert driver.books.device.used_by[driver.books.tenants["bob"]] == 1
    numbers = list(driver.books.tenants.values())
    assert len(set(numbers)) == len(numbers)


@each_policy
def test_tenants_with_quotas_share_the_arrays_of_their_policies(eviction: str) -> None:
    device = TierSettings(name="device", slot_count=64, eviction=eviction, quotas={"*": 0.5})
    driver = make_driver(device=device)
    for number in range(40):
        driver.store(chr(0x4E00 + number), tenant=f"client {number}")

    policies = [policy for _, policy in driver.books.device.quota_policies()]

    arrays = {
        id(value)
        for policy in policies
        for value in vars(policy).values()
        if isinstance(value, np.ndarray)
    }
    assert len(policies) == 40
    assert len(arrays) <= 5


def test_the_namespaces_of_a_content_are_bounded() -> None:
    driver = make_driver(device=8)
    for number in range(200):
        driver.store(chr(0x4E00 + number), namespace=b"%d" % number, content=7)

    assert len(driver.books.contents[7]) <= 64
    assert driver.acquire("z", namespace=b"z", content=7).miss.reason is MissReason.NAMESPACE


@each_policy
def test_a_tenant_over_its_quota_evicts_its_own_blocks_first(eviction: str) -> None:
    device = TierSettings(name="device", slot_count=12, eviction=eviction, quotas={"ann": 0.25})
    driver = make_driver(device=device)
    driver.store("x", tenant="bob")
    driver.store("a", "b", tenant="ann")

    driver.store("c", tenant="ann", more_tokens=0)
    driver.store("d", tenant="ann", more_tokens=0)

    assert driver.cached_in("device") == {"x", "b", "c", "d"}


def test_a_tenant_without_a_quota_takes_what_there_is() -> None:
    device = TierSettings(name="device", slot_count=6, quotas={"ann": 0.5})
    driver = make_driver(device=device)
    driver.store("a", "b", tenant="ann")

    driver.store("vwxyz", tenant="bob")

    assert driver.cached_in("device") == {"v", "vw", "vwx", "vwxy", "vwxyz"}


def test_a_request_is_served_beyond_its_quota_when_its_own_blocks_are_in_use() -> None:
    device = TierSettings(name="device", slot_count=8, quotas={"ann": 0.25})
    driver = make_driver(device=device)
    driver.commit(driver.acquire("ab", tenant="ann").lease, "ab")

    granted = driver.acquire("cd", tenant="ann")

    assert len(granted.table) == 3


def test_each_victim_leaves_for_its_own_reason() -> None:
    device = TierSettings(name="device", slot_count=5, quotas={"ann": 0.4})
    driver = make_driver(device=device)
    driver.store("x", "y", tenant="bob")
    driver.store("a", "b", tenant="ann")

    driver.release(driver.acquire("cdef", tenant="ann", more_tokens=0).lease)

    reasons = {word: driver.acquire(word, store=False).miss.reason for word in ("a", "x")}
    assert reasons == {"a": MissReason.OVER_QUOTA, "x": MissReason.EVICTED}


# -------------------------------------------------------------------- tiers forget aloud


def test_a_lower_tier_that_forgets_says_where_the_block_lay() -> None:
    driver = make_driver(device=8, host=1)
    driver.store("a")
    (slot,) = driver.books.tier(1).slot_of[[driver.books.nodes.get(driver.key("a"))]]

    driver.commit(driver.acquire("b").lease, "b")

    (drop,) = driver.told(ef.DropBlocks)
    assert (drop.tier, driver.words(drop.keys), drop.slots.tolist()) == (1, ["a"], [slot])


def test_the_device_forgets_in_silence() -> None:
    driver = make_driver(device=2)
    driver.store("a")

    driver.acquire("xy", more_tokens=0)

    assert not driver.told(ef.DropBlocks)


def test_asking_for_a_tier_without_slots_of_ours_is_our_defect() -> None:
    driver = make_driver(device=None, host=4)

    with pytest.raises(InvariantViolation, match="tier 0 has no slots of ours"):
        driver.books.tier(0)


def test_the_namespaces_of_first_blocks_are_remembered_up_to_a_bound() -> None:
    driver = make_driver()

    for content in range(1, 5000):
        driver.books.remember_content(content, b"n")
    driver.books.remember_content(0, b"none given")

    assert len(driver.books.contents) == 4096
    assert 0 not in driver.books.contents
    assert 4999 in driver.books.contents


def test_a_link_to_the_block_before_is_made_once() -> None:
    driver = make_driver(host=4)
    first, second = driver.keys("ab")
    driver.handle(ev.Discovered(tier=1, keys=[second], parents=[None], slots=np.zeros(1, np.int32)))

    for _ in range(2):
        driver.store("ab")

    assert driver.leaving_order(1) == ["ab", "a"]
    assert driver.books.nodes.child_count[driver.books.nodes.get(first)] == 1
