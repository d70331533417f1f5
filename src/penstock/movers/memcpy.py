"""Host memory to host memory, with checksums made and checked on the way.

Bytes that leave the device get their sums here; bytes that come back are checked before
they are written where somebody could read them. A block whose bytes do not agree with its
key and its sums is not delivered: it is a fault.

| from                | to                    | by way of                                          |
|---------------------|-----------------------|----------------------------------------------------|
| a tier without sums | packed slots          | nothing: packed into its slot, and summed there    |
| any other           | any other             | a staging area, where it is summed and checked     |
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from penstock.cache.ledger import BlockFault, Purpose
from penstock.cache.nodes import NOWHERE
from penstock.movers.base import Moved
from penstock.tiers.base import KeepsSums
from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.packing import BlockCopier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.ids import Key, OperationId


_STAGING_BYTES = 4 << 20
"""Blocks pass through a staging area of about this size: it should stay in the caches."""
_BATCH_BLOCKS = 64


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
        self._source_sums = source if isinstance(source, KeepsSums) else None
        self._target_sums = target if isinstance(target, KeepsSums) else None
        self._algorithm = algorithm
        self._block_bytes = source.layout.block_bytes
        self._span = CellSpan.of(source.layout)
        self._batch = max(1, min(_BATCH_BLOCKS, _STAGING_BYTES // self._block_bytes))
        self._staging = np.empty((self._batch, self._block_bytes), dtype=np.uint8)
        self._pack, self._unpack = self._prepare(source, target)
        checks = self._source_sums is not None or self._target_sums is None
        # Nobody reads a slot that is being written, so a block that needs no check can grow there.
        self._rows = None if checks else _packed_rows(target)
        self._direct = [] if self._rows is None else _copiers(source, target)
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
            while not job.ended:
                room = (budget_bytes - spent) // self._block_bytes
                if room < 1 and spent:
                    break
                count = min(max(room, 1), self._batch, len(job.copy.keys) - job.next)
                self._copy_blocks(job, count)
                spent += count * self._block_bytes
            if not job.ended:
                break
            self._jobs.popleft()
            moved.append(job.report())
        return moved, spent

    def _copy_blocks(self, job: _Job, count: int) -> None:
        """Copies the next few blocks: all into the staging area, the good ones on."""
        part = slice(job.next, job.next + count)
        first, job.next = job.next, job.next + count
        copy = job.copy
        sources, targets = copy.source_slots[..., part], copy.target_slots[..., part]
        if self._rows is not None:
            self._pack_in_place(self._rows, copy.keys[part], sources, targets)
            return
        rows = np.arange(count)
        _pass(self._pack, sources, rows)
        if copy.purpose is Purpose.DUPLICATE:
            # Never leaves the device, and is unfinished: it has neither key nor sums.
            _pass(self._unpack, rows, targets)
            return
        sums = self._span.sum_blocks(self._staging[:count], copy.keys[part], self._algorithm)
        good = np.ones(count, dtype=bool)
        if self._source_sums is not None:
            good = (sums == self._source_sums.sums(sources)).all(axis=1)
            bad = np.flatnonzero(~good) + first
            job.faults += [(position, BlockFault.CORRUPT) for position in bad.tolist()]
        _pass(self._unpack, rows[good], targets[..., good])
        if self._target_sums is not None:
            self._target_sums.keep_sums(targets[good], sums[good])

    def _pack_in_place(
        self,
        rows: NDArray[np.uint8],
        keys: Sequence[Key],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> None:
        """Packs blocks into the slots where they stay, and sums them there."""
        assert self._target_sums is not None
        _pass(self._direct, sources, targets)
        first = int(targets[0])
        follow = bool((targets == np.arange(first, first + len(targets))).all())
        # Slots that follow each other, as they mostly do, are summed as they lie.
        packed = rows[first : first + len(targets)] if follow else rows[targets]
        self._target_sums.keep_sums(targets, self._span.sum_blocks(packed, keys, self._algorithm))

    def _prepare(
        self, source: SlotStore, target: SlotStore
    ) -> tuple[list[BlockCopier], list[BlockCopier]]:
        """Copiers into the staging area and out of it, one for each KV group."""
        packed = source.layout.packed(block_count=self._batch)
        staged = {0: self._staging.reshape(-1)}
        read, write = source.blocks(()), target.blocks(())
        groups = range(len(source.layout.groups))
        pack = [
            BlockCopier(read.layout, read.buffers, packed, staged, group=group) for group in groups
        ]
        unpack = [
            BlockCopier(packed, staged, write.layout, write.buffers, group=group)
            for group in groups
        ]
        return pack, unpack


def _copiers(source: SlotStore, target: SlotStore) -> list[BlockCopier]:
    """Copiers from one tier into another, one for each KV group."""
    read, write = source.blocks(()), target.blocks(())
    return [
        BlockCopier(read.layout, read.buffers, write.layout, write.buffers, group=group)
        for group in range(len(source.layout.groups))
    ]


def _packed_rows(store: SlotStore) -> NDArray[np.uint8] | None:
    """The slots of a tier as rows of packed bytes; `None` where blocks lie otherwise in it."""
    layout = store.layout
    distance = layout.groups[0].layers[0].planes[0].block_stride
    if distance < layout.block_bytes:
        return None
    if layout != layout.packed(block_count=store.slot_count, slot_bytes=distance):
        return None
    return as_strided(
        store.blocks(()).buffers[0],
        shape=(store.slot_count, layout.block_bytes),
        strides=(distance, 1),
        writeable=False,
    )


def _pass(
    copiers: list[BlockCopier], sources: NDArray[np.integer], targets: NDArray[np.integer]
) -> None:
    """Copies blocks whose KV groups lie in one slot each, or in a row of slots a group."""
    for group, copier in enumerate(copiers):
        read = (sources[group] if sources.ndim > 1 else sources).tolist()
        write = (targets[group] if targets.ndim > 1 else targets).tolist()
        wanted = [(r, w) for r, w in zip(read, write, strict=True) if w != NOWHERE]
        if wanted:
            copier.copy([r for r, _ in wanted], [w for _, w in wanted])
