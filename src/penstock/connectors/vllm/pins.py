"""Device blocks of vLLM that must not be reused until a save has read them.

A pin is a reference in vLLM's own block pool: the block stays where it is and can still be
matched there, and vLLM never waits for a copy. The one rule: what is pinned is at most a
twentieth of the pool, however slow the copies are; in a pool of fewer than twenty blocks, nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vocabulary.ids import OperationId

PIN_SHARE = 0.05
"""So much of the pool may be pinned: little enough that an engine under pressure does not
notice, enough for the blocks of one step of prefill."""


class BlockPool(Protocol):
    """What is used of vLLM's block pool; the names are vLLM's."""

    @property
    def blocks(self) -> Sequence[object]:
        """Every block, by its number."""
        ...

    def touch(self, blocks: Sequence[object]) -> None:
        """Adds a reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """Takes a reference from each."""
        ...


class _Pin:
    __slots__ = ("block_ids", "operations")

    def __init__(self, block_ids: Sequence[int], operations: int) -> None:
        self.block_ids = block_ids
        self.operations = operations


class Pins:
    """The pins of one scheduler."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.limit = int(len(pool.blocks) * PIN_SHARE)
        self.count = 0
        self._of: dict[OperationId, _Pin] = {}

    @property
    def room(self) -> int:
        """So many further blocks may be pinned now."""
        return self.limit - self.count

    def add(self, block_ids: Sequence[int], operations: Sequence[OperationId]) -> None:
        """Pins blocks until the last of these operations has settled."""
        pin = _Pin(block_ids, len(operations))
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self.count += len(block_ids)
        for operation in operations:
            self._of[operation] = pin

    def settled(self, operation: OperationId) -> None:
        """An operation touches its blocks no more; one that pinned nothing is left alone."""
        pin = self._of.pop(operation, None)
        if pin is None:
            return
        pin.operations -= 1
        if not pin.operations:
            self.count -= len(pin.block_ids)
            self._pool.free_blocks([self._pool.blocks[block] for block in pin.block_ids])
