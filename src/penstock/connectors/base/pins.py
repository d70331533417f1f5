"""Device blocks that are kept from reuse until a save has read them.

A pin is a reference in the engine's own block pool: the block stays in place and can still be
matched there, and the engine never waits for a copy. However slow the copies are, at most half of
the blocks that are free when a pin is added, or a twentieth of the pool where that is more, are
pinned. So of a full pool a twentieth can be pinned, and of one with fewer than twenty blocks
nothing; a pool with room allows enough pins for the blocks that leave the windows of a long
prefill. Blocks that are copied before the engine allocates again, as on the CPU, may be pinned
beyond that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vocabulary.ids import OperationId

PIN_SHARE = 0.05
"""The part of a full pool that may be pinned: small, so that an engine under pressure keeps
working."""
FREE_SHARE = 0.5
"""The part of the free blocks that may be pinned: as much again is left for the next step."""


class BlockPool(Protocol):
    """What is used of the engine's block pool; the names are vLLM's."""

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

    def get_num_free_blocks(self) -> int:
        """How many blocks have no reference."""
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
        self._least = int(len(pool.blocks) * PIN_SHARE)
        self.count = 0
        self._of: dict[OperationId, list[_Pin]] = {}

    @property
    def limit(self) -> int:
        """How many blocks may be pinned now."""
        return max(self._least, int(self._pool.get_num_free_blocks() * FREE_SHARE))

    @property
    def room(self) -> int:
        """How many more blocks may be pinned now."""
        return max(0, self.limit - self.count)

    def add(self, block_ids: Sequence[int], operations: Sequence[OperationId]) -> None:
        """Pins blocks until the last of these operations has settled."""
        pin = _Pin(block_ids, len(operations))
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self.count += len(block_ids)
        for operation in operations:
            self._of.setdefault(operation, []).append(pin)

    def settled(self, operation: OperationId) -> None:
        """Removes the pins of an operation that no longer touches its blocks, if it has any."""
        for pin in self._of.pop(operation, ()):
            pin.operations -= 1
            if not pin.operations:
                self.count -= len(pin.block_ids)
                self._pool.free_blocks([self._pool.blocks[block] for block in pin.block_ids])
