"""The tier of peers: a shared tier whose store is the host memory of other engines.

Generations, geometries, questions, reads and sums are those of `SharedTier`. What is added: its
engines say what lies in their hubs, and a reset of a peer is heard at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.config.shared_stores import PeerSettings
from penstock.store.peers.blobs import PeerBlobs
from penstock.store.shared.tier import SharedTier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.store.base import LentBlocks, MappedArena, TierState
    from penstock.store.process.messages import StoreTierConfig
    from penstock.vocabulary.keys import Key


class PeerTier(SharedTier):
    """A `StoreTier` over the memory of peers. `close` it, or its threads stay."""

    def __init__(self, blobs: PeerBlobs, *, ask_s: float, timeout_s: float) -> None:
        # What is not there is asked for again at once: the answer is here.
        super().__init__(blobs, ask_s=ask_s, timeout_s=timeout_s, absent_s=0.0)
        self._network = blobs.network
        self._peers = blobs
        self._network.on_reset = self._hear
        self._network.on_listing = self._count
        self.start(self._network.run, "peers")

    def _hear(self, name: bytes) -> None:
        with self.lock:
            use = self.spaces.get(name)
            if use is not None:
                use.read_at = -math.inf
                self.keeper_ready.notify()

    def _count(self) -> None:
        with self.lock:
            if not self.state_changed:
                self.change_state()

    def lend(self, blocks: LentBlocks, gone: Sequence[Key]) -> None:
        with self._network.lock:
            self._network.books.lend(blocks, gone)
        self._network.tell()

    def end_lending(self, life: int) -> None:
        with self._network.lock:
            self._network.books.end_lending(life)
        self._network.tell()

    def detach(self, arena: MappedArena) -> None:
        with self._network.lock:
            self._network.books.withdraw(arena)
        self._network.tell()
        super().detach(arena)

    def expect(self, name: bytes, generation: int) -> None:
        self._peers.adopt(name, generation)
        super().expect(name, generation)

    def state(self) -> TierState:
        """With the blocks that peers have listed."""
        with self._network.lock:
            listed = sum(each.listed for each in self._network.books.conversations)
        return replace(super().state(), blocks=listed)

    def drop_rest(self) -> None:
        super().drop_rest()
        self._network.stop()


def open_peers(config: StoreTierConfig) -> PeerTier:
    """Opens a tier of the kind "peers".

    Raises `ConfigError`: an option is wrong; `UnavailableError`: its address is in use.
    """
    options: Mapping[str, Any] = config.options
    settings = PeerSettings(**options)
    return PeerTier(PeerBlobs(settings), ask_s=settings.ask_ms / 1000, timeout_s=settings.timeout_s)
