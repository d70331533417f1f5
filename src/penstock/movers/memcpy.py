"""Host memory to host memory, with checksums made and checked on the way.

Bytes that leave the device get their sums here; bytes that come back are checked before
they are written where somebody could read them. A block whose bytes do not agree with its
key and its sums is not delivered: it is a fault.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.ledger import BlockFault, Purpose
from penstock.cache.nodes import NOWHERE
from penstock.movers.base import Moved
from penstock.tiers.base import KeepsSums
from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.packing import Blocks, copy_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.ids import OperationId
    from penstock.vocabulary.layout import Layout


class _Job:
    """A copy and how far it is."""

    __slots__ = ("copy", "faults", "next")

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.next = 0
        self.faults: list[tuple[int, BlockFault]] = []

    @property
    def ended(self) -> bool:
        return self.next >= len(self.copy.keys)

    def report(self) -> Moved:
        return Moved(self.copy.operation, tuple(self.faults))


class MemcpyMover:
    """Copies between two tiers in memory, first come, first served."""

    def __init__(self, source: SlotStore, target: SlotStore, algorithm: Algorithm) -> None:
        self._source = source
        self._target = target
        self._algorithm = algorithm
        self._block_bytes = source.layout.block_bytes
        self._span = CellSpan.of(source.layout)
        self._staging = source.layout.packed(block_count=1)
        self._source_groups = _groups_of(source.layout)
        self._staging_groups = _groups_of(self._staging)
        self._target_groups = _groups_of(target.layout)
        self._jobs: deque[_Job] = deque()
        self._abandoned: list[Moved] = []

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._jobs or self._abandoned)

    def submit(self, copy: Copy) -> None:
        """Takes a copy in; its work is done in `poll`."""
        self._jobs.append(_Job(copy))

    def abandon(self, operation: OperationId) -> None:
        """The copy ends where it is, and the next `poll` reports it."""
        for job in self._jobs:
            if job.copy.operation == operation:
                self._jobs.remove(job)
                self._abandoned.append(job.report())
                return

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        """Copies for at most `budget_bytes`, but at least one block if there is any."""
        moved, self._abandoned = self._abandoned, []
        spent = 0
        while self._jobs:
            job = self._jobs[0]
            while not job.ended and (spent == 0 or spent + self._block_bytes <= budget_bytes):
                self._copy_block(job)
                spent += self._block_bytes
            if not job.ended:
                break
            self._jobs.popleft()
            moved.append(job.report())
        return moved, spent

    def _copy_block(self, job: _Job) -> None:
        position = job.next
        job.next += 1
        copy = job.copy
        source_slots = _slots_at(copy.source_slots, position)
        target_slots = _slots_at(copy.target_slots, position)
        if copy.purpose is Purpose.DUPLICATE:
            # Never leaves the device, and is unfinished: it has neither key nor sums.
            copy_blocks(self._source.blocks(source_slots), self._target.blocks(target_slots))
            return
        staged = np.empty(self._block_bytes, dtype=np.uint8)
        packed = Blocks(layout=self._staging, buffers={0: staged}, numbers=[0])
        read = self._source.blocks(source_slots)
        _copy_groups(read, packed, self._source_groups, self._staging_groups)
        sums = self._span.sum_blocks(staged.reshape(1, -1), [copy.keys[position]], self._algorithm)
        if isinstance(self._source, KeepsSums):
            kept = self._source.sums(np.array(source_slots, dtype=np.int32))
            if not np.array_equal(sums, kept):
                job.faults.append((position, BlockFault.CORRUPT))
                return
        write = self._target.blocks(target_slots)
        _copy_groups(packed, write, self._staging_groups, self._target_groups)
        if isinstance(self._target, KeepsSums):
            self._target.keep_sums(np.array(target_slots, dtype=np.int32), sums)


def _slots_at(slots: NDArray[np.int32], position: int) -> list[int]:
    """Where a block lies: one slot for all KV groups, or one for each."""
    at: list[int] = np.atleast_1d(slots[..., position]).tolist()
    return at


def _groups_of(layout: Layout) -> list[Layout]:
    return [layout.only(group) for group in range(len(layout.groups))]


def _copy_groups(
    source: Blocks, target: Blocks, source_groups: list[Layout], target_groups: list[Layout]
) -> None:
    """Copies one block, whose KV groups may lie in different slots on either side."""
    count = max(len(source.numbers), len(target.numbers))
    if count == 1:
        if target.numbers[0] != NOWHERE:
            copy_blocks(source, target)
        return
    for group in range(count):
        read = _of_group(source, source_groups, group)
        write = _of_group(target, target_groups, group)
        if write.numbers[0] != NOWHERE:
            copy_blocks(read, write)


def _of_group(blocks: Blocks, groups: list[Layout], group: int) -> Blocks:
    number = blocks.numbers[group if len(blocks.numbers) > 1 else 0]
    return Blocks(layout=groups[group], buffers=blocks.buffers, numbers=[number])
