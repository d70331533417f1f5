"""Packed blocks in host memory, private or shared, with their checksums beside them.

It is a whole tier for an engine of one process, and the reference the other tiers are
compared with.

    ┌─────────────────────────────┬────────────┬────────────┬─────
    │ sums of slot 0, 1, 2, …     │ block of 0 │ block of 1 │ …
    └─────────────────────────────┴────────────┴────────────┴─────
      64 bits a cell; whole pages   `slot_bytes` each

Blocks start at multiples of 4096 bytes, so that a slot can be read and written by devices and by
direct I/O as it is; blocks of less than 4096 bytes start at multiples of 512, the least that
direct I/O takes, to waste less.

Sums lie in the arena too: whoever maps it can check what it reads. The one rule: an arena has
one writer. Ranks that hold equal bytes share one; the others read.
"""

from __future__ import annotations

import mmap
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from penstock.tiers.arena import Arena, round_up
from penstock.vocabulary.reshard import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from numpy.typing import NDArray

    from penstock.tiers.arena import MemoryCalls
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


BLOCK_UNIT_BYTES = 4096
SMALL_BLOCK_UNIT_BYTES = 512
SUM_BYTES = 8


class HostTier:
    """A fixed number of packed blocks in shared memory."""

    medium = "host"

    def __init__(self, layout: Layout, slot_count: int, arena: Arena) -> None:
        needed = tier_bytes(layout, slot_count)
        if arena.size < needed:
            raise ValueError(
                f"arena has {arena.size} bytes, {slot_count} slots of this layout need {needed}"
            )
        self.slot_count = slot_count
        self.slot_bytes = slot_bytes(layout)
        """The distance from one block to the next."""
        self.layout = layout.packed(block_count=slot_count, slot_bytes=self.slot_bytes)
        self.blocks_offset = _sums_bytes(len(layout.cells), slot_count)
        """Where in the arena the block of slot 0 starts."""
        self.arena = arena
        cells = len(layout.cells)
        sums = arena.bytes[: slot_count * cells * SUM_BYTES].view(np.uint64)
        self._sums = sums.reshape(slot_count, cells)
        self._buffers = {0: arena.bytes[self.blocks_offset : needed]}

    @classmethod
    def create(
        cls,
        layout: Layout,
        slot_count: int,
        *,
        name: str = "host",
        huge_pages: bool = True,
        numa_node: int | None = None,
        kernel: MemoryCalls | None = None,
    ) -> Self:
        """Makes a tier in an arena of its own; `Arena.create` explains the wishes.

        Raises `ConfigError`: the blocks are more than is available, or there is no such node;
        `UnavailableError`: the machine does not let us make an arena.
        """
        arena = Arena.create(
            tier_bytes(layout, slot_count),
            name=name,
            huge_pages=huge_pages,
            numa_node=numa_node,
            kernel=kernel,
        )
        return cls(layout, slot_count, arena)

    @classmethod
    def attach(cls, fd: int, layout: Layout, slot_count: int, *, writable: bool = True) -> Self:
        """Maps a tier that another process made of as many blocks of the same form.

        Raises `UnavailableError`: the machine does not let us map it; `ValueError`: there is no
        arena behind `fd`, or not one of this size.
        """
        arena = Arena.attach(fd, writable=writable)
        expected = round_up(tier_bytes(layout, slot_count), arena.page_bytes)
        if arena.size != expected:
            arena.close()
            raise ValueError(
                f"fd {fd} is an arena of {arena.size} bytes, {slot_count} slots of this layout "
                f"make one of {expected}: it was made for other blocks"
            )
        return cls(layout, slot_count, arena)

    def blocks(self, slots: Sequence[int]) -> Blocks:
        return Blocks(layout=self.layout, buffers=self._buffers, numbers=slots)

    def sums(self, slots: NDArray[np.int32]) -> NDArray[np.uint64]:
        rows: NDArray[np.uint64] = self._sums[slots]
        return rows

    def keep_sums(self, slots: NDArray[np.int32], sums: NDArray[np.uint64]) -> None:
        self._sums[slots] = sums

    def extents(self, max_bytes: int) -> list[tuple[int, int]]:
        """The blocks in pieces of whole slots and pages, as (address, length).

        A copy by a device must not cross from one registered piece into the next, so no slot
        does.
        Raises `ValueError`: `max_bytes` is less than the fewest slots that end with a page.
        """
        unit = lcm(self.slot_bytes, mmap.PAGESIZE)
        if max_bytes < unit:
            raise ValueError(f"max_bytes is {max_bytes}, must be at least {unit}")
        step = max_bytes - max_bytes % unit
        end = round_up(self.slot_count * self.slot_bytes, mmap.PAGESIZE)
        first = self.arena.address + self.blocks_offset
        return [(first + start, min(step, end - start)) for start in range(0, end, step)]

    def give_back(self) -> int:
        """Returns the whole pages of all slots to the system; they are zeros then.

        Returns how many bytes that were. Nothing may touch the slots meanwhile, and no device may
        have the memory registered.
        """
        return self.arena.give_back(self.blocks_offset, self.slot_count * self.slot_bytes)

    def close(self) -> None:
        self._sums = self._sums[:0].copy()
        self._buffers = {}
        self.arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def slot_bytes(layout: Layout) -> int:
    """Bytes from the start of one block to the start of the next."""
    return _slot_bytes(layout.block_bytes)


def _slot_bytes(block_bytes: int) -> int:
    small = block_bytes < BLOCK_UNIT_BYTES
    return round_up(block_bytes, SMALL_BLOCK_UNIT_BYTES if small else BLOCK_UNIT_BYTES)


def tier_bytes(layout: Layout, slot_count: int) -> int:
    """Bytes of a tier of `slot_count` slots, with their sums."""
    if slot_count < 1:
        raise ValueError(f"slot_count is {slot_count}, must be at least 1")
    return tier_size(slot_count, layout.block_bytes, len(layout.cells))


def tier_size(slot_count: int, block_bytes: int, cell_count: int) -> int:
    """The same, of blocks of which only the size and the number of sums are known."""
    return _sums_bytes(cell_count, slot_count) + slot_count * _slot_bytes(block_bytes)


def slots_in(size_bytes: int, block_bytes: int, cell_count: int) -> int:
    """How many slots fit into `size_bytes`, with their sums; 0 if not even one does."""
    count = size_bytes // (_slot_bytes(block_bytes) + cell_count * SUM_BYTES)
    # The table of sums ends with a page, for which a slot or a few may have to go.
    while count > 0 and tier_size(count, block_bytes, cell_count) > size_bytes:
        count -= 1
    return count


def _sums_bytes(cell_count: int, slot_count: int) -> int:
    return round_up(slot_count * cell_count * SUM_BYTES, mmap.PAGESIZE)
