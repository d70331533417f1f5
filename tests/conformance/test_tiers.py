"""Every tier satisfies the sentences that all tiers have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.testing.tier_suite import SumKeepingTierSuite, TierSuite
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import MemoryTier

if TYPE_CHECKING:
    from penstock.vocabulary.layout import Layout


class TestArrayTier(TierSuite):
    def make_tier(self, layout: Layout) -> ArrayTier:
        sizes = layout.buffer_bytes.values()
        return ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])


class TestMemoryTier(SumKeepingTierSuite):
    def make_tier(self, layout: Layout) -> MemoryTier:
        return MemoryTier(layout, slot_count=layout.block_count)
