"""KV events: what a router needs to know to send requests where their prefix lies.

Events are numbered without gaps. A reader that sees a gap, or comes late, asks for a
snapshot and goes on from its number. The schema is in docs/api.md.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.nodes import NodeTable
    from penstock.cache.tier import Tier

    BlockT = TypeVar("BlockT")


KEYS_PER_EVENT = 64
"""How many keys the waiting events may hold each, on average; with more, the oldest go."""


class KvEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One change of what is cached where."""

    sequence: int
    epoch: int


class BlocksStored(KvEvent, frozen=True, kw_only=True, tag="stored"):
    """Blocks can be matched in a tier from now on."""

    tier: str
    keys: list[bytes]
    parent: bytes | None
    """The block before the first one; each further block follows the one before it."""


class BlocksRemoved(KvEvent, frozen=True, kw_only=True, tag="removed"):
    """Blocks can no longer be matched in a tier."""

    tier: str
    keys: list[bytes]


class AllCleared(KvEvent, frozen=True, kw_only=True, tag="cleared"):
    """Nothing is cached any more; a new epoch begins."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that is cached, as of an event number."""

    sequence: int
    epoch: int
    blocks: dict[str, list[tuple[bytes, bytes | None]]]
    """Tier to (key, key of the block before)."""


def chains_of(
    blocks: dict[bytes, BlockT], parent_of: Callable[[bytes], bytes | None], *, longest: int
) -> Iterator[tuple[list[bytes], bytes | None]]:
    """All blocks as chains, each with the block before its first one.

    A block never comes before the one that it follows, if that is among them: who builds a tree
    of them finds every parent there.

    Args:
        blocks: By their keys.
        parent_of: The block before a block.
        longest: How many blocks a chain may have.
    """
    placed: set[bytes] = set()
    # Those that came last are mostly the ends of chains.
    for key in reversed(blocks):
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None and at in blocks and at not in placed:
            placed.add(at)
            chain.append(at)
            at = parent_of(at)
        chain.reverse()
        for first in range(0, len(chain), longest):
            yield chain[first : first + longest], chain[first - 1] if first else at


class EventLog:
    """The last events, until they are taken."""

    def __init__(self, limit: int) -> None:
        self._events: deque[KvEvent] = deque()
        self._limit = limit
        self._key_limit = limit * KEYS_PER_EVENT
        self._key_count = 0
        self.sequence = 0
        """The number of the last event."""
        self.epoch = 0

    def stored(self, tier: str, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Blocks that follow each other became ready."""
        self.sequence += 1
        event = BlocksStored(
            sequence=self.sequence, epoch=self.epoch, tier=tier, keys=list(keys), parent=parent
        )
        self._add(event, len(keys))

    def removed(self, tier: str, keys: Sequence[bytes]) -> None:
        self.sequence += 1
        event = BlocksRemoved(sequence=self.sequence, epoch=self.epoch, tier=tier, keys=list(keys))
        self._add(event, len(keys))

    def cleared(self, epoch: int) -> None:
        self.sequence += 1
        self.epoch = epoch
        self._add(AllCleared(sequence=self.sequence, epoch=epoch), 0)

    def take(self) -> list[KvEvent]:
        """Hands out what has happened since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        self._key_count = 0
        return events

    def _add(self, event: KvEvent, key_count: int) -> None:
        self._events.append(event)
        self._key_count += key_count
        while len(self._events) > self._limit or self._key_count > self._key_limit:
            oldest = self._events.popleft()
            if isinstance(oldest, BlocksStored | BlocksRemoved):
                self._key_count -= len(oldest.keys)

    def snapshot(self, nodes: NodeTable, tiers: Sequence[Tier]) -> Snapshot:
        """What can be matched now, tier by tier."""
        blocks: dict[str, list[tuple[bytes, bytes | None]]] = {}
        for tier in tiers:
            rows = blocks[tier.name] = []
            for node in nodes.of_weights_now(tier.ready_nodes()).tolist():
                parent = int(nodes.parent[node])
                rows.append((nodes.key_of(node), None if parent < 0 else nodes.key_of(parent)))
        return Snapshot(sequence=self.sequence, epoch=self.epoch, blocks=blocks)
