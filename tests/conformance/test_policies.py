"""Every eviction policy passes the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.cache.eviction import POLICIES, AdaptivePolicy, LruPolicy
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


class TestAdaptivePolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return AdaptivePolicy(slot_count, standing)


class DecidedPolicy(AdaptivePolicy):
    """One rate after another leads, whatever was found: so it also refuses blocks."""

    rates = (3, 0, 4, 1, 2)
    turns = 0

    def add(self, nodes: NDArray[np.int32], keys: Sequence[Key], *, tick: int) -> None:
        super().add(nodes, keys, tick=tick)
        self._decide()

    def touch(self, nodes: NDArray[np.int32], *, tick: int) -> None:
        super().touch(nodes, tick=tick)
        self._decide()

    def _decide(self) -> None:
        self.turns += 1
        self._learner.follow(self.rates[self.turns // 5 % len(self.rates)])


class TestAdaptivePolicyThatChangesItsRate(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return DecidedPolicy(slot_count, standing)


class ConfidentPolicy(DecidedPolicy):
    rates = (1,)


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
    held.add(TestAdaptivePolicy().make_policy(1, lambda _: None).name)

    assert held == set(POLICIES)
