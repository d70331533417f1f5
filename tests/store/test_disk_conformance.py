"""The disk tier satisfies the sentences that all tiers of the store have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.fixtures.store_tier_suite import StoreTierSuite
from penstock.store.disk.tier import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

SIZE_BYTES = 8 << 20


class TestDiskTier(StoreTierSuite):
    def make_tier(self, folder: Path) -> DiskTier:
        return DiskTier(folder, SIZE_BYTES)


class TestBufferedDiskTier(StoreTierSuite):
    def make_tier(self, folder: Path) -> DiskTier:
        return DiskTier(folder, SIZE_BYTES, direct=False)
