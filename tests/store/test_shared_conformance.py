"""The tier in a shared store satisfies the sentences that all tiers of the store have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from penstock.store.shared import SharedTier
from penstock.testing.store_tier_suite import StoreTierSuite

if TYPE_CHECKING:
    from pathlib import Path


class TestSharedTier(StoreTierSuite):
    def setup_method(self) -> None:
        self._server = MemoryServer()

    def make_tier(self, folder: Path) -> SharedTier:  # noqa: ARG002 - it lives in memory
        return SharedTier(MemoryBlobs(self._server), ask_s=60)
