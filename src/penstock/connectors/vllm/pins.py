"""Device blocks of vLLM that must not be reused until a save has read them.

A pin is a reference in vLLM's own block pool: the block stays where it is and can still be
matched there, and vLLM never waits for a copy. The one rule: however slow the copies are, at most
half of the blocks that are free when a pin is added, or a twentieth of the pool where that is
more, are pinned. So a pool that is full lends a twentieth, and one of fewer than twenty blocks
nothing; a pool with room lends enough for the blocks that leave the windows of a long prefill.
What is copied before vLLM hands out blocks again, as on the CPU, may be pinned beyond that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.vocabulary.ids import OperationId

PIN_SHARE = 0.05
"""So much of a full pool may be pinned: little enough that an engine under pressure does not
notice."""
FREE_SHARE = 0.5
"""So much of what is free may be pinned: as much again is left for the next step."""


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

    def get_num_free_blocks(self) -> int:
        """How many blocks nobody has a reference to."""
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
        """So many blocks may be pinned now."""
        return max(self._least, int(self._pool.get_num_free_blocks() * FREE_SHARE))

    @property
    def room(self) -> int:
        """So many further blocks may be pinned now."""
        return max(0, self.limit - self.count)

    def add(self, block_ids: Sequence[int], operations: Sequence[OperationId]) -> None:
        """Pins blocks until the last of these operations has settled."""
        pin = _Pin(block_ids, len(operations))
        self._pool.touch([self._pool.blocks[block] for block in block_ids])
        self.count += len(block_ids)
        for operation in operations:
            self._of.setdefault(operation, []).append(pin)

    def settled(self, operation: OperationId) -> None:
        """An operation touches its blocks no more; one that pinned nothing is left alone."""
        for pin in self._of.pop(operation, ()):
            pin.operations -= 1
            if not pin.operations:
                self.count -= len(pin.block_ids)
                self._pool.free_blocks([self._pool.blocks[block] for block in pin.block_ids])
