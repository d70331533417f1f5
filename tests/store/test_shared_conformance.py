"""The tier in a shared store satisfies the sentences that all tiers of the store have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import MemoryStore

from lab.fixtures.memory_blobs import MemoryBlobs, MemoryServer
from lab.fixtures.store_tier_suite import StoreTierSuite
from penstock.store.clients.folder import FolderBlobs
from penstock.store.clients.objects import ObjectBlobs
from penstock.store.shared.tier import SharedTier

if TYPE_CHECKING:
    from pathlib import Path


class TestSharedTier(StoreTierSuite):
    def setup_method(self) -> None:
        self._server = MemoryServer()

    def make_tier(self, folder: Path) -> SharedTier:  # noqa: ARG002 - it lives in memory
        return SharedTier(MemoryBlobs(self._server), ask_s=60)


class TestSharedTierInObjects(StoreTierSuite):
    def setup_method(self) -> None:
        self._store = MemoryStore()

    def make_tier(self, folder: Path) -> SharedTier:  # noqa: ARG002 - it lives in memory
        blobs = ObjectBlobs(self._store, refresh_s=0.001, linger_s=0.005, threads=2)
        return SharedTier(blobs, ask_s=60)


class TestSharedTierInAFolder(StoreTierSuite):
    def make_tier(self, folder: Path) -> SharedTier:
        return SharedTier(FolderBlobs(folder / "shared", threads=2), ask_s=60)
