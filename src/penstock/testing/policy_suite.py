"""What every eviction policy must satisfy, as sentences to inherit.

    class TestMyPolicy(PolicySuite):
        def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
            return MyPolicy(slot_count, standing)

The suite knows nothing of the order that a policy prefers, only what holds for any order:
blocks that may leave do, others do not, priorities come first, and looking changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import compress
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.eviction import Admits

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.eviction import EvictionPolicy, Judge, Standing
    from penstock.vocabulary.keys import Key

NODE_CAPACITY = 64
"""Node numbers that the suite uses; more than any shelf has slots."""
SLOT_COUNT = 24
HISTORIES = range(25)
"""Seeds of the histories that are compared; each is short, and they differ."""
SOME_HISTORIES = HISTORIES[:6]


class Shelf:
    """A tier in miniature: knows which blocks may leave, and calls its policy as a tier would.

    A block is a node number, and its key follows from the number and how often it was given.
    """

    def __init__(
        self, make: Callable[[int, Standing], EvictionPolicy], slot_count: int = SLOT_COUNT
    ) -> None:
        self._standing: dict[int, int] = {}
        self._keys: dict[int, Key] = {}
        self._tick = 0
        self.policy = make(slot_count, self._standing.get)
        self.policy.resize(NODE_CAPACITY)

    def enter(self, *nodes: int, priority: int | None = None, name: str = "") -> None:
        """New blocks, in use; with a priority they may leave at once."""
        self._tick += 1
        keys = [f"{name}{node}".encode() for node in nodes]
        self._keys.update(zip(nodes, keys, strict=True))
        self.policy.add(np.array(nodes, dtype=np.int32), keys, tick=self._tick)
        if priority is not None:
            self.let_leave(*nodes, priority=priority)

    def allow(self, *nodes: int, priority: int = 0) -> None:
        """Nothing needs these blocks now, but the policy does not know yet."""
        self._standing.update(dict.fromkeys(nodes, priority))

    def let_leave(self, *nodes: int, priority: int = 0) -> None:
        self.allow(*nodes, priority=priority)
        self.policy.offer(nodes)

    def hold(self, *nodes: int) -> None:
        """Somebody needs these blocks; as in a tier, the policy is not called."""
        for node in nodes:
            self._standing.pop(node, None)

    def touch(self, *nodes: int) -> None:
        """A hit; as in a tier, blocks that may leave are offered anew."""
        self._tick += 1
        self.policy.touch(np.array(nodes, dtype=np.int32), tick=self._tick)
        self.policy.offer(nodes)

    def remove(self, *nodes: int, evicted: bool) -> None:
        self.hold(*nodes)
        keys = [self._keys.pop(node) for node in nodes]
        self.policy.forget(list(nodes), keys, evicted=evicted)

    def evict(self) -> int | None:
        """The next block leaves for good."""
        node = self.policy.pop()
        if node is not None:
            self.remove(node, evicted=True)
        return node

    def set_aside(self, count: int) -> dict[int, int]:
        """Pops up to `count` blocks and holds them, as when room is planned."""
        aside: dict[int, int] = {}
        self.policy.mark()
        while len(aside) < count and (node := self.policy.pop()) is not None:
            aside[node] = self._standing.pop(node)
        return aside

    def put_back(self, aside: dict[int, int]) -> None:
        """The room was not to be had: blocks that were set aside are as before."""
        self._standing.update(aside)
        self.policy.rollback()
        self.policy.offer(aside)

    def judge_of(self, *names: str, priority: int = 0) -> Judge | None:
        """What the policy thinks of blocks that want to enter, if it refuses any at all."""
        if not isinstance(self.policy, Admits):
            return None
        return self.policy.admit([name.encode() for name in names], priority=priority)

    def refuse(self, *nodes: int, name: str = "") -> None:
        """Blocks did not get in; as in a tier, they come and leave at once."""
        self.enter(*nodes, name=name)
        self.remove(*nodes, evicted=True)

    def drain(self) -> list[int]:
        """All blocks that leave, in their order."""
        order: list[int] = []
        while (node := self.evict()) is not None:
            order.append(node)
        return order

    def may_leave(self) -> set[int]:
        """The blocks that may leave now."""
        return set(self._standing)

    def spare_numbers(self, count: int) -> list[int]:
        """Node numbers that stand for no block now."""
        return sorted(set(range(NODE_CAPACITY)) - set(self._keys))[:count]

    def live(self, random: Random, steps: int) -> None:
        """A stretch of life: blocks come, are used, held, let go, and leave."""
        for _ in range(steps):
            inside = sorted(self._keys)
            outside = sorted(set(range(NODE_CAPACITY)) - set(inside))
            some = random.sample(inside, min(len(inside), random.randint(1, 3)))
            match random.choice(("enter", "enter", "touch", "touch", "hold", "let", "leave")):
                case "enter" if len(inside) < SLOT_COUNT:
                    priority = random.choice((None, 0, 0, 0, 1))
                    self.enter(*random.sample(outside, 2), priority=priority)
                case "touch":
                    self.touch(*some)
                case "hold":
                    self.hold(*some)
                case "let":
                    self.let_leave(*some, priority=random.choice((0, 0, 0, 1)))
                case _:
                    self.evict()


class PolicySuite(ABC):
    """Inherit, name the class `Test...`, and say how the policy is made."""

    @abstractmethod
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        """The policy under test, for a tier of `slot_count` slots."""

    def make_shelf(self) -> Shelf:
        """A shelf without blocks."""
        return Shelf(self.make_policy)

    def lived_in(self, seed: int, steps: int = 40) -> Shelf:
        """A shelf with a past; the same for the same seed."""
        shelf = self.make_shelf()
        shelf.live(Random(seed), steps)
        return shelf

    def test_nothing_leaves_an_empty_tier(self) -> None:
        assert self.make_shelf().policy.pop() is None

    def test_a_policy_has_a_name(self) -> None:
        assert self.make_shelf().policy.name

    def test_a_block_that_was_never_offered_stays(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1)

        assert shelf.policy.pop() is None
        assert shelf.policy.candidates() == set()

    def test_every_block_that_may_leave_does_so_once(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, 3, priority=0)
        shelf.enter(4, 5)

        assert sorted(shelf.drain()) == [1, 2, 3]

    def test_a_block_offered_while_in_use_stays(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1)

        shelf.policy.offer([1])

        assert shelf.policy.pop() is None

    def test_a_block_in_use_again_stays(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        shelf.hold(1)

        assert shelf.policy.candidates() == {2}
        assert shelf.drain() == [2]

    def test_a_block_that_was_in_use_in_between_leaves_once(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, priority=0)
        shelf.hold(1)

        shelf.let_leave(1)

        assert shelf.drain() == [1]

    def test_a_block_offered_often_leaves_once(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        for _ in range(500):
            shelf.policy.offer([1, 2])

        assert sorted(shelf.drain()) == [1, 2]

    def test_a_hit_block_can_still_leave(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        for _ in range(5):
            shelf.touch(1)

        assert shelf.policy.candidates() == {1, 2}
        assert sorted(shelf.drain()) == [1, 2]

    def test_low_priority_leaves_first_whatever_was_used_last(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, priority=1)
        shelf.enter(2, priority=0)
        shelf.enter(3, priority=-5)
        shelf.touch(2, 3)
        shelf.touch(2, 3)

        assert shelf.drain() == [3, 2, 1]

    def test_a_raised_priority_counts_once_the_block_is_offered_again(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        shelf.let_leave(1, priority=3)

        assert shelf.drain() == [2, 1]

    def test_a_lowered_priority_counts_once_the_block_is_offered_again(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        shelf.let_leave(2, priority=-3)

        assert shelf.drain() == [2, 1]

    def test_a_block_that_is_gone_does_not_leave_again(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, 2, priority=0)

        shelf.remove(1, evicted=False)

        assert shelf.policy.candidates() == {2}
        assert shelf.drain() == [2]

    def test_the_number_of_a_block_that_is_gone_can_stand_for_another(self) -> None:
        shelf = self.make_shelf()
        shelf.enter(1, priority=0)
        shelf.remove(1, evicted=True)

        shelf.enter(1, name="another")
        while_in_use = shelf.policy.pop()
        shelf.let_leave(1)

        assert while_in_use is None
        assert shelf.drain() == [1]

    def test_more_node_numbers_do_not_change_the_order(self) -> None:
        for seed in HISTORIES:
            grown, other = self.lived_in(seed), self.lived_in(seed)

            grown.policy.resize(4 * NODE_CAPACITY)

            assert grown.drain() == other.drain()

    def test_exactly_the_blocks_that_may_leave_are_candidates(self) -> None:
        for seed in HISTORIES:
            shelf = self.lived_in(seed)
            may_leave = shelf.may_leave()

            candidates = shelf.policy.candidates()

            assert candidates == may_leave
            assert sorted(shelf.drain()) == sorted(may_leave)

    def test_asking_for_candidates_changes_nothing(self) -> None:
        for seed in HISTORIES:
            asked, other = self.lived_in(seed), self.lived_in(seed)

            asked.policy.candidates()

            assert asked.drain() == other.drain()

    def test_the_same_life_gives_the_same_order(self) -> None:
        for seed in HISTORIES:
            assert self.lived_in(seed).drain() == self.lived_in(seed).drain()

    def test_a_plan_that_is_put_back_leaves_the_order_as_it_was(self) -> None:
        self._compare_after_plan(steps_afterwards=0)

    def test_a_plan_that_is_put_back_is_not_felt_later_either(self) -> None:
        self._compare_after_plan(steps_afterwards=15)

    def test_a_plan_that_is_carried_out_is_the_same_as_evicting_one_by_one(self) -> None:
        for seed in HISTORIES:
            planned, other = self.lived_in(seed), self.lived_in(seed)

            victims = list(planned.set_aside(count=4))
            planned.remove(*victims, evicted=True)

            assert victims == [other.evict() for _ in victims]
            assert planned.drain() == other.drain()

    def test_an_earlier_plan_is_not_undone_with_a_later_one(self) -> None:
        for seed in HISTORIES:
            planned, other = self.lived_in(seed), self.lived_in(seed)

            for shelf in (planned, other):
                shelf.remove(*shelf.set_aside(count=3), evicted=True)
            planned.put_back(planned.set_aside(count=2))

            assert planned.drain() == other.drain()

    def test_offering_and_popping_at_once_is_the_same_as_one_after_the_other(self) -> None:
        for seed in HISTORIES:
            at_once, in_turn = self.lived_in(seed), self.lived_in(seed)
            (node,) = at_once.spare_numbers(1)
            for shelf in (at_once, in_turn):
                shelf.enter(node)
                shelf.allow(node)

            first = at_once.policy.offer_and_pop(node)
            in_turn.policy.offer([node])
            second = in_turn.policy.pop()

            assert first == second
            assert first is not None
            for shelf in (at_once, in_turn):
                shelf.remove(first, evicted=True)
            assert at_once.drain() == in_turn.drain()

    def test_blocks_said_to_leave_together_leave_one_after_the_other(self) -> None:
        for seed in HISTORIES:
            shelf = self.lived_in(seed)
            *before, last = shelf.spare_numbers(4)
            shelf.enter(*before, last)
            shelf.touch(*before, last)
            shelf.let_leave(last)
            while shelf.evict() != last:
                pass

            together = shelf.policy.leave_together(last, np.array(before, dtype=np.int32))

            assert len(together) == len(before)
            for node in compress(before, np.logical_and.accumulate(together)):
                shelf.allow(node)
                assert shelf.policy.offer_and_pop(node) == node

    def test_a_long_life_never_lets_a_block_leave_that_may_not(self) -> None:
        shelf, random = self.make_shelf(), Random(0)

        for _ in range(1500):
            shelf.live(random, 1)
            assert shelf.policy.candidates() == shelf.may_leave()

    def test_a_judge_admits_some_of_the_blocks_and_obeys_priorities(self) -> None:
        for seed in SOME_HISTORIES:
            shelf = self.lived_in(seed)
            low, same, high = (shelf.judge_of("a", "b", priority=level) for level in (-9, 0, 9))
            if low and same and high:
                for victim in shelf.may_leave():
                    assert 0 <= same(victim) <= 2
                    assert (low(victim), high(victim)) == (0, 2)

    def test_asking_who_may_enter_changes_nothing(self) -> None:
        for seed in SOME_HISTORIES:
            asked, other = self.lived_in(seed), self.lived_in(seed)

            judge = asked.judge_of("a", "b")
            if judge is not None:
                for victim in asked.may_leave():
                    judge(victim)
            for shelf in (asked, other):
                shelf.live(Random(seed), 15)

            assert asked.drain() == other.drain(), f"seed {seed}"

    def test_a_refused_block_is_no_candidate_and_may_enter_later(self) -> None:
        for seed in SOME_HISTORIES:
            shelf = self.lived_in(seed)
            (node,) = shelf.spare_numbers(1)

            shelf.refuse(node, name="refused ")
            after_refusal = shelf.policy.candidates()
            shelf.enter(node, priority=0, name="refused ")

            assert after_refusal == shelf.may_leave() - {node}
            assert shelf.policy.candidates() == shelf.may_leave()

    def _compare_after_plan(self, steps_afterwards: int) -> None:
        for seed in HISTORIES:
            planned, other = self.lived_in(seed), self.lived_in(seed)

            planned.put_back(planned.set_aside(count=1 + seed))
            for shelf in (planned, other):
                shelf.live(Random(seed), steps_afterwards)

            assert planned.drain() == other.drain(), f"seed {seed}"
