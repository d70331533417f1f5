"""Blocks in the memory of this process, packed, with their checksums beside them.

It is a whole tier for an engine of one process, and the reference the other tiers are
compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.vocabulary.packing import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout


class MemoryTier:
    """A fixed number of packed blocks."""

    medium = "memory"

    def __init__(self, layout: Layout, slot_count: int) -> None:
        self.layout = layout.packed(block_count=slot_count)
        self.slot_count = slot_count
        self._bytes = np.zeros(slot_count * layout.block_bytes, dtype=np.uint8)
        self._sums = np.zeros((slot_count, len(layout.cells)), dtype=np.uint64)

    def blocks(self, slots: Sequence[int]) -> Blocks:
        return Blocks(layout=self.layout, buffers={0: self._bytes}, numbers=slots)

    def sums(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        rows: NDArray[np.uint64] = self._sums[slots]
        return rows

    def keep_sums(self, slots: NDArray[np.int32], sums: NDArray[np.uint64]) -> None:
        self._sums[slots] = sums
