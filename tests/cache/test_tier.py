"""One tier: where blocks lie, which may leave, and room that is made or given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache.eviction import POLICIES
from penstock.cache.nodes import NOWHERE, NodeTable
from penstock.cache.settings import TierSettings
from penstock.cache.states import SlotState
from penstock.cache.tier import Tier
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Cache:
    """One tier and its index; blocks are named by words, as they follow each other."""

    def __init__(self, slot_count: int = 8, **settings: Any) -> None:
        self.nodes = NodeTable(capacity=16)
        self.tier = Tier(
            1, TierSettings(name="host", slot_count=slot_count, **settings), self.nodes
        )
        self.tick = 0

    def add(self, prompt: str, *, after: str = "", tenant: int = 0) -> NDArray[np.int32]:
        """Blocks of a prompt after known ones, ready and in nobody's use."""
        words = [prompt[: end + 1] for end in range(len(after), len(prompt))]
        parent = self.node(after) if after else NOWHERE
        keys = [word.encode() for word in words]
        nodes = self.nodes.add_chain(keys, parent=parent, tenant=tenant)
        self.tier.fit()
        self.tick += 1
        slots = self.tier.pool.take(len(nodes))
        self.tier.place(nodes, slots, tick=self.tick)
        self.tier.pool.fill(slots)
        self.tier.offer(nodes)
        return nodes

    def node(self, word: str) -> int:
        return self.nodes.get(word.encode())

    def array(self, *words: str) -> NDArray[np.int32]:
        return np.array([self.node(word) for word in words], dtype=np.int32)

    def slots(self, *words: str) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.tier.slot_of[self.array(*words)]
        return found

    def words(self, nodes: list[int]) -> list[str]:
        return [key.decode() for key in self.nodes.keys_of(nodes)]

    def order(self) -> list[str]:
        """The order in which everything leaves; nothing is left afterwards."""
        victims = self.tier.plan_room(self.tier.pool.slot_count, None).victims
        words = self.words(victims)
        self.evict(victims)
        return words

    def evict(self, victims: list[int]) -> list[int]:
        """Blocks that were set aside leave for good; returns the slots they lay in."""
        slots: list[int] = self.tier.evict(victims, self.nodes.keys_of(victims)).tolist()
        return slots


@pytest.fixture(params=sorted(POLICIES))
def cache(request: pytest.FixtureRequest) -> Cache:
    return Cache(eviction=request.param)


def assert_leaf_first(order: list[str]) -> None:
    for position, word in enumerate(order):
        followers = [later for later in order[position:] if later != word]
        assert not [later for later in followers if later.startswith(word)], order


# -------------------------------------------------------------------- leaf-first


def test_a_chain_leaves_from_its_end(cache: Cache) -> None:
    cache.add("abc")

    assert cache.order() == ["abc", "ab", "a"]


def test_a_block_stays_until_all_its_followers_have_left(cache: Cache) -> None:
    cache.add("abc")
    cache.add("abx", after="ab")
    cache.add("ay", after="a")

    assert_leaf_first(cache.order())


def test_a_block_used_long_ago_stays_while_a_follower_is_here(cache: Cache) -> None:
    cache.add("a")
    cache.add("ab", after="a")
    cache.add("x")
    cache.tier.touch(cache.array("ab"), tick=9)

    order = cache.order()

    assert order.index("ab") < order.index("a")


def test_a_block_without_followers_in_this_tier_may_leave(cache: Cache) -> None:
    cache.add("ab")

    cache.tier.displace(cache.array("ab"), evicted=False)

    assert cache.tier.policy.candidates() == {cache.node("a")}


def test_a_follower_that_comes_later_keeps_its_parent(cache: Cache) -> None:
    cache.add("a")

    cache.add("ab", after="a")

    assert cache.tier.policy.candidates() == {cache.node("ab")}


def test_a_leaving_follower_does_not_keep_its_parent(cache: Cache) -> None:
    cache.add("ab")

    cache.tier.depart(cache.array("ab"))

    assert cache.tier.policy.candidates() == {cache.node("a")}


def test_a_follower_that_stays_after_all_keeps_its_parent_again(cache: Cache) -> None:
    cache.add("ab")
    cache.tier.depart(cache.array("ab"))

    cache.tier.keep(cache.array("ab"))
    cache.tier.offer(cache.array("ab"))

    assert cache.tier.policy.candidates() == {cache.node("ab")}


# -------------------------------------------------------------------- who may leave


def test_a_held_block_does_not_leave(cache: Cache) -> None:
    cache.add("a")
    cache.add("x")
    cache.tier.pool.hold(cache.slots("a"))

    assert cache.order() == ["x"]


def test_a_filling_block_does_not_leave(cache: Cache) -> None:
    (node,) = cache.nodes.add_chain([b"a"], parent=NOWHERE, tenant=0)
    slots = cache.tier.pool.take(1)
    cache.tier.place(np.array([node], dtype=np.int32), slots, tick=1)
    cache.tier.offer(np.array([node], dtype=np.int32))

    assert cache.order() == []


def test_a_leaving_block_does_not_leave_twice(cache: Cache) -> None:
    cache.add("a")
    cache.tier.depart(cache.array("a"))

    assert cache.order() == []


def test_a_pinned_block_and_those_before_it_do_not_leave(cache: Cache) -> None:
    cache.add("abc")
    cache.nodes.pins[cache.node("ab")] = 1

    assert cache.order() == ["abc"]


def test_the_standing_of_a_block_that_may_leave_is_its_priority(cache: Cache) -> None:
    cache.add("ab")
    cache.nodes.priority[cache.node("ab")] = 4
    cache.tier.prioritize(cache.array("ab"))

    assert cache.tier.standing(cache.node("ab")) == 4
    assert cache.tier.standing(cache.node("a")) is None


# -------------------------------------------------------------------- places


def test_a_placed_block_lies_in_its_slot(cache: Cache) -> None:
    nodes = cache.add("ab")

    slots = cache.tier.slot_of[nodes]

    assert cache.tier.pool.node[slots].tolist() == nodes.tolist()
    assert cache.nodes.copy_count[nodes].tolist() == [1, 1]


def test_a_block_is_placed_once(cache: Cache) -> None:
    nodes = cache.add("a")
    slots = cache.tier.pool.take(1)

    with pytest.raises(InvariantViolation, match="a block was placed twice"):
        cache.tier.place(nodes, slots, tick=2)


def test_a_block_that_is_not_here_cannot_leave(cache: Cache) -> None:
    nodes = cache.add("a")
    cache.tier.displace(nodes, evicted=False)

    with pytest.raises(InvariantViolation, match="a block left that was not there"):
        cache.tier.displace(nodes, evicted=False)


def test_displacing_leaves_the_slot_to_the_caller(cache: Cache) -> None:
    nodes = cache.add("a")
    slots = cache.slots("a")

    cache.tier.displace(nodes, evicted=False)

    assert cache.tier.pool.state[slots].tolist() == [SlotState.READY]
    assert cache.tier.pool.node[slots].tolist() == [NOWHERE]


def test_ready_and_leaving_blocks_can_be_matched(cache: Cache) -> None:
    cache.add("a")
    cache.add("x")
    cache.tier.depart(cache.array("x"))

    assert sorted(cache.words(cache.tier.ready_nodes().tolist())) == ["a", "x"]


def test_the_tier_grows_with_the_index(cache: Cache) -> None:
    cache.add("ab")

    cache.nodes.add_chain([b"%d" % n for n in range(100)], parent=NOWHERE, tenant=0)
    cache.tier.fit()

    assert len(cache.tier.slot_of) == cache.nodes.capacity
    assert cache.tier.slot_of[cache.node("ab")] != NOWHERE
    assert cache.order() == ["ab", "a"]


# -------------------------------------------------------------------- room


def test_free_slots_are_used_before_anything_is_evicted(cache: Cache) -> None:
    cache.add("abc")

    room = cache.tier.plan_room(5, None)

    assert room.victims == []
    assert room.slot_count == 5


def test_as_many_blocks_are_set_aside_as_slots_are_missing(cache: Cache) -> None:
    cache.add("abcdef")

    room = cache.tier.plan_room(4, None)

    assert cache.words(room.victims) == ["abcdef", "abcde"]
    assert room.slot_count == 4


def test_evicting_frees_the_slots_of_the_blocks_set_aside(cache: Cache) -> None:
    cache.add("abcdefgh")
    room = cache.tier.plan_room(2, None)
    expected = cache.tier.slot_of[room.victims].tolist()

    freed = cache.evict(room.victims)

    assert freed == expected
    assert cache.tier.pool.free_count == 2
    assert cache.nodes.copy_count[room.victims].tolist() == [0, 0]


def test_a_plan_says_how_much_could_be_had_when_it_is_not_enough(cache: Cache) -> None:
    cache.add("abc")
    cache.tier.pool.hold(cache.slots("ab"))

    room = cache.tier.plan_room(8, None)

    assert room.slot_count == 6


def long_chain(eviction: str) -> Cache:
    """A chain with a branch, a pinned block, one of another priority and one used later."""
    cache = Cache(slot_count=60, eviction=eviction)
    chain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"
    cache.add(chain)
    cache.add(chain[:40] + "-", after=chain[:40])
    cache.nodes.pins[cache.node(chain[:4])] = 1
    cache.nodes.priority[cache.node(chain[:20])] = 2
    cache.tier.prioritize(cache.array(chain))
    cache.tier.touch(cache.array(chain[:30]), tick=99)
    return cache


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_a_long_chain_leaves_in_the_same_order_at_once_as_one_by_one(eviction: str) -> None:
    at_once, one_by_one = long_chain(eviction), long_chain(eviction)

    victims = at_once.tier.plan_room(60, None).victims
    singles = []
    while (victim := one_by_one.tier.pop_victim()) is not None:
        singles.append(victim)

    assert at_once.words(victims) == one_by_one.words(singles)
    assert len(victims) == 47
    assert_leaf_first(at_once.words(victims))


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("wanted", [10, 20, 25, 40, 60])
def test_a_plan_for_part_of_a_long_chain_is_put_back_whole(eviction: str, wanted: int) -> None:
    planned, other = long_chain(eviction), long_chain(eviction)

    planned.tier.put_back(planned.tier.plan_room(wanted, None).victims)

    assert planned.tier.children.tolist() == other.tier.children.tolist()
    assert planned.tier.pool.holders.tolist() == other.tier.pool.holders.tolist()
    assert planned.tier.policy.candidates() == other.tier.policy.candidates()
    assert planned.order() == other.order()


def test_a_victim_can_be_written_down_before_it_leaves(cache: Cache) -> None:
    cache.add("ab")
    victim = cache.tier.pop_victim()
    assert victim == cache.node("ab")

    cache.tier.depart_victim(victim)

    assert cache.tier.pool.state[cache.slots("ab")].tolist() == [SlotState.LEAVING]
    assert cache.tier.pool.holders.tolist() == [0] * 8
    assert cache.tier.policy.candidates() == {cache.node("a")}


def test_no_room_is_planned_when_none_is_wanted(shared: Cache) -> None:
    shared.add("abcd", tenant=1)

    room = shared.tier.plan_room(0, 1)

    assert room.victims == []


def test_a_block_set_aside_is_not_set_aside_again(cache: Cache) -> None:
    cache.add("ab")

    first, second, third = (cache.tier.pop_victim() for _ in range(3))

    assert (first, second) == (cache.node("ab"), cache.node("a"))
    assert third is None


def test_those_of_given_blocks_that_may_leave_are_set_aside(cache: Cache) -> None:
    cache.add("abc")
    cache.add("x")

    victims = cache.tier.set_aside_leaves(cache.array("abc", "ab", "x").tolist())

    assert cache.words(victims) == ["abc", "ab", "x"]


def test_a_given_block_with_a_follower_is_not_set_aside(cache: Cache) -> None:
    cache.add("abc")

    victims = cache.tier.set_aside_leaves(cache.array("a", "ab").tolist())

    assert victims == []


# -------------------------------------------------------------------- tenants


@pytest.fixture(params=sorted(POLICIES))
def shared(request: pytest.FixtureRequest) -> Cache:
    """Tenant 1 may have a quarter of eight slots, tenant 2 half, tenant 0 all."""
    quotas = {"ann": 0.25, "*": 0.5, "free": 1.0}
    cache = Cache(eviction=request.param, quotas=quotas)
    for tenant, name in enumerate(("free", "ann", "bob")):
        cache.tier.introduce(tenant, name)
    return cache


def test_blocks_are_counted_by_tenant(shared: Cache) -> None:
    shared.add("ab", tenant=1)
    shared.add("x", tenant=2)
    counted = dict(shared.tier.used_by)

    shared.tier.displace(shared.array("ab", "x"), evicted=False)

    assert counted == {1: 2, 2: 1}
    assert shared.tier.used_by == {1: 1}


def test_a_tenant_is_over_its_quota_by_what_exceeds_its_share(shared: Cache) -> None:
    shared.add("a", tenant=1)

    assert shared.tier.over_quota(1, 1) == 0
    assert shared.tier.over_quota(1, 3) == 2
    assert shared.tier.over_quota(2, 5) == 1


def test_a_tenant_without_a_quota_is_never_over_it() -> None:
    cache = Cache(quotas={"ann": 0.25})
    cache.tier.introduce(0, "bob")

    assert cache.tier.over_quota(0, 100) == 0


def test_a_tenant_over_its_quota_evicts_its_own_blocks_first(shared: Cache) -> None:
    shared.add("x", tenant=2)
    shared.add("ab", tenant=1)

    room = shared.tier.plan_room(1, 1)

    assert shared.words(room.victims) == ["ab"]
    assert room.own_count == 1


def test_a_tenant_within_its_quota_evicts_whatever_is_next(shared: Cache) -> None:
    shared.add("uvwxyz", tenant=0)
    shared.add("ab", tenant=1)

    room = shared.tier.plan_room(1, 2)

    assert room.own_count == 0
    assert len(room.victims) == 1


def test_the_rest_comes_from_others_when_own_blocks_do_not_suffice(shared: Cache) -> None:
    shared.add("uvwxyz", tenant=0)
    shared.add("ab", tenant=1)

    room = shared.tier.plan_room(4, 1)

    assert shared.words(room.victims)[:2] == ["ab", "a"]
    assert room.own_count == 2
    assert len(room.victims) == 4


def test_own_blocks_leave_leaf_first_too(shared: Cache) -> None:
    shared.add("ab", tenant=1)

    room = shared.tier.plan_room(2, 1)
    shared.evict(room.victims)

    assert shared.tier.used_by == {}
    assert all(not policy.candidates() for _, policy in shared.tier.quota_policies())


def test_a_tenant_gets_room_beyond_its_quota_when_its_own_blocks_do_not_suffice(
    shared: Cache,
) -> None:
    shared.add("ab", tenant=1)
    shared.tier.pool.hold(shared.slots("ab"))

    room = shared.tier.plan_room(3, 1)

    assert room.slot_count == 3


def test_a_strict_quota_gives_no_more_than_own_blocks_leave(shared: Cache) -> None:
    shared.add("uvwxyz", tenant=0)
    shared.add("ab", tenant=1)
    shared.tier.pool.hold(shared.slots("a"))

    room = shared.tier.plan_room(3, 1, strict=True)

    assert shared.words(room.victims) == ["ab"]
    assert room.slot_count == 1


def test_a_strict_quota_that_is_used_up_takes_nothing_from_others(shared: Cache) -> None:
    shared.add("uvwxyz", tenant=0)
    shared.add("ab", tenant=1)
    shared.tier.pool.hold(shared.slots("a", "ab"))

    room = shared.tier.plan_room(3, 1, strict=True)

    assert room.victims == []
    assert room.slot_count == 0


def test_own_and_other_victims_are_put_back_alike(shared: Cache) -> None:
    shared.add("uvwxyz", tenant=0)
    shared.add("ab", tenant=1)
    before = {tenant: policy.candidates() for tenant, policy in shared.tier.quota_policies()}

    room = shared.tier.plan_room(5, 1)
    shared.tier.put_back(room.victims)

    after = {tenant: policy.candidates() for tenant, policy in shared.tier.quota_policies()}
    assert after == before
    assert shared.tier.policy.candidates() == {shared.node("uvwxyz"), shared.node("ab")}
