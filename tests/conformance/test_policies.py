"""Every eviction policy passes the same sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.eviction import POLICIES, LruPolicy, S3FifoPolicy
from penstock.testing.policy_suite import PolicySuite

if TYPE_CHECKING:
    from penstock.cache.eviction import EvictionPolicy, Standing


class TestLruPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return LruPolicy(slot_count, standing)


class TestS3FifoPolicy(PolicySuite):
    def make_policy(self, slot_count: int, standing: Standing) -> EvictionPolicy:
        return S3FifoPolicy(slot_count, standing)


def test_every_policy_that_settings_can_name_is_held_to_the_suite() -> None:
    held = {TestLruPolicy().make_policy(1, lambda _: None).name}
    held.add(TestS3FifoPolicy().make_policy(1, lambda _: None).name)

    assert held == set(POLICIES)
