"""Every eviction policy passes the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.eviction import POLICIES, LearnedPolicy, LruPolicy, S3FifoPolicy
from penstock.testing.policy_suite import PolicySuite

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.eviction import EvictionPolicy, Standing
    from penstock.vocabulary.ids import Key


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


def test_every_policy_that_settings_can_name_is_held_to_the_suite() -> None:
    held = {TestLruPolicy().make_policy(1, lambda _: None).name}
    held.add(TestS3FifoPolicy().make_policy(1, lambda _: None).name)
    held.add(TestLearnedPolicy().make_policy(1, lambda _: None).name)

    assert held == set(POLICIES)
