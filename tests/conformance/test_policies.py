"""Every eviction policy passes the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.eviction import POLICIES, LearnedPolicy, LruPolicy, S3FifoPolicy
from penstock.testing.policy_suite import HISTORIES, PolicySuite

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.eviction import EvictionPolicy, Standing
    from penstock.vocabulary.keys import Key


class TestLruPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return LruPolicy(slot_count, standing)


class TestS3FifoPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return S3FifoPolicy(slot_count, standing)


class TestLearnedPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return LearnedPolicy(slot_count, standing)


class PassingTimePolicy(LearnedPolicy):
    """Each event comes some time after the last, so that ages differ."""

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:
        self.advance(7.0 * tick)
        super().add(nodes, keys, tick=tick)

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:
        self.advance(7.0 * tick)
        super().touch(nodes, tick=tick)


class TestLearnedPolicyWhileTimePasses(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return PassingTimePolicy(slot_count, standing)


class ConfidentPolicy(PassingTimePolicy):
    """It is sure that it knows better than LRU, so that it refuses blocks."""

    def __init__(self, slot_count: int, standing: Standing) -> None:
        super().__init__(slot_count, standing)
        curves = self._curves
        curves._own_hits = curves._ahead = 1e9
        curves.ranking = curves._by_value


class ConfidentSuite(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return ConfidentPolicy(slot_count, standing)


@pytest.mark.parametrize(
    "sentence",
    [
        PolicySuite.test_a_judge_admits_some_of_the_blocks_and_obeys_priorities,
        PolicySuite.test_asking_who_may_enter_changes_nothing,
        PolicySuite.test_a_refused_block_is_no_candidate_and_may_enter_later,
        PolicySuite.test_exactly_the_blocks_that_may_leave_are_candidates,
    ],
)
def test_a_policy_that_refuses_blocks_satisfies(sentence: Callable[[PolicySuite], None]) -> None:
    sentence(ConfidentSuite())


def test_some_blocks_are_refused_and_others_are_not() -> None:
    judged = set()
    for seed in HISTORIES:
        shelf = ConfidentSuite().lived_in(seed)
        judge = shelf.judge_of("a", "b")
        assert judge is not None
        judged |= {judge(victim) for victim in shelf.may_leave()}

    assert judged == {0, 2}


def test_every_policy_that_settings_can_name_is_held_to_the_suite() -> None:
    held = {TestLruPolicy().make_policy(1, lambda _: None).name}
    held.add(TestS3FifoPolicy().make_policy(1, lambda _: None).name)
    held.add(TestLearnedPolicy().make_policy(1, lambda _: None).name)

    assert held == set(POLICIES)
