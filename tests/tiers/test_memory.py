"""Packed blocks in the memory of this process."""

from __future__ import annotations

import numpy as np
import pytest

from lab.fixtures.extents import block_extents
from penstock.testing.tier_suite import LAYOUTS, read_slots
from penstock.tiers.base import KeepsSums
from penstock.tiers.host import MemoryTier


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_block_lies_in_one_run_of_bytes(kind: str) -> None:
    tier = MemoryTier(LAYOUTS[kind], slot_count=5)

    (extent,) = block_extents(tier.layout, 3)

    assert extent.length == LAYOUTS[kind].block_bytes
    assert extent.offset == 3 * LAYOUTS[kind].block_bytes


def test_it_may_have_more_slots_than_the_device() -> None:
    layout = LAYOUTS["K and V apart"]

    tier = MemoryTier(layout, slot_count=10 * layout.block_count)

    assert tier.slot_count == tier.layout.block_count == 10 * layout.block_count


def test_it_keeps_a_table_of_sums_for_every_slot() -> None:
    tier = MemoryTier(LAYOUTS["two groups"], slot_count=7)

    sums = tier.sums(np.arange(7, dtype=np.int32))

    assert isinstance(tier, KeepsSums)
    assert sums.shape == (7, len(LAYOUTS["two groups"].cells))


def test_a_fresh_tier_holds_zeros() -> None:
    tier = MemoryTier(LAYOUTS["opaque"], slot_count=3)

    assert not read_slots(tier, range(3)).any()
