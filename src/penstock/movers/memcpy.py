"""Host memory to host memory, with checksums made and checked on the way.

Bytes that leave the device get their sums here; bytes that come back are checked before
they are written where somebody could read them. A block whose bytes do not agree with its
key and its sums is not delivered: it is a fault.

| between                                  | by way of                                             |
|------------------------------------------|-------------------------------------------------------|
| an engine's memory and packed slots      | compiled code, which sums while it copies (`packing`) |
| any two, or where that cannot be had     | a staging area, where blocks are summed and checked   |

The one rule: slots may be memory that other processes can write at any time. What is summed was
read once, into memory or a register of this process, and what was summed is what is delivered.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.base import Moved
from penstock.movers.packing import Packing
from penstock.tiers.base import KeepsSums
from penstock.vocabulary.checksums import CellSpan, key_seeds, life_salt
from penstock.vocabulary.reshard import BlockCopier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import Key, OperationId


_STAGING_BYTES = 4 << 20
"""Blocks pass through a staging area of about this size: it should stay in the caches."""
_BATCH_BLOCKS = 64


class _Job:
    """A copy and how far it is."""

    __slots__ = ("copy", "faults", "next", "salt")

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.salt = life_salt(copy.operation.incarnation, copy.operation.epoch)
        self.next = 0
        self.faults: list[tuple[int, BlockFault]] = []

    @property
    def ended(self) -> bool:
        return self.next >= len(self.copy.keys)

    def report(self) -> Moved:
        return Moved(self.copy.operation, tuple(self.faults))


class MemcpyMover:
    """Copies between two tiers in memory, first come, first served.

    Args:
        source: The tier to read from.
        target: The tier to write to.
        algorithm: Of the checksums.
    """

    def __init__(self, source: SlotStore, target: SlotStore, algorithm: Algorithm) -> None:
        self._source_sums = source if isinstance(source, KeepsSums) else None
        self._target_sums = target if isinstance(target, KeepsSums) else None
        self._algorithm = algorithm
        self._block_bytes = source.layout.block_bytes
        self._span = CellSpan.of(source.layout)
        self._batch = max(1, min(_BATCH_BLOCKS, _STAGING_BYTES // self._block_bytes))
        self._staging = np.empty((self._batch, self._block_bytes), dtype=np.uint8)
        self._pack, self._unpack = self._prepare(source, target)
        self._compiled = _Compiled.between(source, target, algorithm)
        self._jobs: deque[_Job] = deque()
        self._abandoned: list[Moved] = []

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._abandoned)

    def submit(self, copy: Copy) -> None:
        self._jobs.append(_Job(copy))

    def abandon(self, operation: OperationId) -> None:
        for job in self._jobs:
            if job.copy.operation == operation:
                self._jobs.remove(job)
                self._abandoned.append(job.report())
                return

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
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
        """Copies the next blocks into the staging area, and the intact ones to the target."""
        part = slice(job.next, job.next + count)
        first, job.next = job.next, job.next + count
        copy = job.copy
        sources, targets = copy.source_slots[..., part], copy.target_slots[..., part]
        alone = sources.ndim == targets.ndim == 1 and bool((targets != NOWHERE).all())
        if self._compiled is not None and alone:
            bad = self._compiled.copy(copy.keys[part], job.salt, sources, targets)
            job.faults += [(first + number, BlockFault.CORRUPT) for number in bad]
            return
        rows = np.arange(count)
        _pass(self._pack, sources, rows)
        if copy.purpose is Purpose.DUPLICATE:
            # An unfinished block stays on the device and has neither key nor sums.
            _pass(self._unpack, rows, targets)
            return
        staged, keys = self._staging[:count], copy.keys[part]
        sums = self._span.sum_blocks(staged, keys, self._algorithm, salt=job.salt)
        good = np.ones(count, dtype=bool)
        if self._source_sums is not None:
            good = (sums == self._source_sums.sums(sources)).all(axis=1)
            wrong = np.flatnonzero(~good) + first
            job.faults += [(position, BlockFault.CORRUPT) for position in wrong.tolist()]
        _pass(self._unpack, rows[good], targets[..., good])
        if self._target_sums is not None:
            self._target_sums.keep_sums(targets[good], sums[good])

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


class _Compiled(NamedTuple):
    """Copies between an engine's memory and packed slots, by compiled code."""

    packing: Packing
    """Of the engine's memory."""
    slots: KeepsSums
    memory: NDArray[np.uint8]
    """The packed slots."""
    distance: int
    """Bytes from one slot to the next."""
    saves: bool

    @classmethod
    def between(
        cls, source: SlotStore, target: SlotStore, algorithm: Algorithm
    ) -> _Compiled | None:
        """The compiled copy between two tiers; `None` if there is none."""
        saves = isinstance(target, KeepsSums)
        if saves == isinstance(source, KeepsSums):
            return None
        engine, slots = (source, target) if saves else (target, source)
        assert isinstance(slots, KeepsSums)
        distance = slots.layout.groups[0].layers[0].planes[0].block_stride
        if distance < slots.layout.block_bytes or slots.layout != slots.layout.packed(
            block_count=slots.slot_count, slot_bytes=distance
        ):
            return None
        packing = Packing.of(engine.layout, engine.blocks(()).buffers, algorithm)
        if packing is None:
            return None
        return cls(packing, slots, slots.blocks(()).buffers[0], distance, saves)

    def copy(
        self,
        keys: Sequence[Key],
        salt: int,
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> list[int]:
        """Copies blocks; returns the numbers of corrupt ones, which were not written."""
        seeds = np.array(key_seeds(keys, salt), dtype=np.uint64)
        if self.saves:
            places = targets.astype(np.int64) * self.distance
            sums = self.packing.pack(sources.tolist(), seeds, self.memory, places)
            self.slots.keep_sums(targets, sums)
            return []
        places, sums = sources.astype(np.int64) * self.distance, self.slots.sums(sources)
        slots, first, bad = targets.tolist(), 0, []
        while first < len(slots):
            wrong = self.packing.put_away(
                *(self.memory, seeds[first:], sums[first:], slots[first:], places[first:])
            )
            if wrong is None:
                break
            bad.append(first + wrong)
            first += wrong + 1
        return bad


def _pass(
    copiers: list[BlockCopier], sources: NDArray[np.integer], targets: NDArray[np.integer]
) -> None:
    """Copies blocks, whose KV groups have one slot together, or one each."""
    for group, copier in enumerate(copiers):
        read = (sources[group] if sources.ndim > 1 else sources).tolist()
        write = (targets[group] if targets.ndim > 1 else targets).tolist()
        wanted = [(r, w) for r, w in zip(read, write, strict=True) if w != NOWHERE]
        if wanted:
            copier.copy([r for r, _ in wanted], [w for _, w in wanted])
