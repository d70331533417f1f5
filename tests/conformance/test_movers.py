"""Every mover satisfies the sentences that all movers have to, between all media it connects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.operations import Purpose
from penstock.movers.memcpy import MemcpyMover
from penstock.testing.mover_suite import (
    CheckingMoverSuite,
    Ends,
    LoadingMoverSuite,
    MoverSuite,
    SavingMoverSuite,
)
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import MemoryTier
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.layout import Layout


def arrays(layout: Layout) -> ArrayTier:
    sizes = layout.buffer_bytes.values()
    return ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])


def memory(layout: Layout) -> MemoryTier:
    return MemoryTier(layout, slot_count=layout.block_count)


def connect(source: SlotStore, target: SlotStore, algorithm: Algorithm = Algorithm.XXH3) -> Ends:
    return Ends(source, target, MemcpyMover(source, target, algorithm))


class TestDuplicatesOnTheDevice(MoverSuite):
    purpose = Purpose.DUPLICATE

    def make_ends(self, layout: Layout) -> Ends:
        device = arrays(layout)
        return connect(device, device)


class TestSavesToMemory(SavingMoverSuite):
    def make_ends(self, layout: Layout) -> Ends:
        return connect(arrays(layout), memory(layout))


class TestLoadsFromMemory(LoadingMoverSuite):
    def make_ends(self, layout: Layout) -> Ends:
        return connect(memory(layout), arrays(layout))


class TestStagesBetweenMemories(CheckingMoverSuite):
    """Under the sums of a kernel, so that both algorithms are put to the test."""

    algorithm = Algorithm.MIX64

    def make_ends(self, layout: Layout) -> Ends:
        return connect(memory(layout), memory(layout), self.algorithm)
