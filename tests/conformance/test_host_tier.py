"""The host tier, and the mover to and from it, satisfy the sentences that all of them have to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.movers.memcpy import MemcpyMover
from penstock.testing.mover_suite import (
    CheckingMoverSuite,
    Ends,
    LoadingMoverSuite,
    SavingMoverSuite,
)
from penstock.testing.tier_suite import SumKeepingTierSuite
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier, MemoryTier
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from penstock.vocabulary.layout import Layout


def arrays(layout: Layout) -> ArrayTier:
    sizes = layout.buffer_bytes.values()
    return ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])


def host(layout: Layout) -> HostTier:
    return HostTier.create(layout, slot_count=layout.block_count, huge_pages=False)


class TestHostTier(SumKeepingTierSuite):
    def make_tier(self, layout: Layout) -> HostTier:
        return host(layout)


class TestAttachedHostTier(SumKeepingTierSuite):
    """A tier that somebody else made, and that has been closed there."""

    def make_tier(self, layout: Layout) -> HostTier:
        with host(layout) as made:
            return HostTier.attach(made.arena.fd, layout, made.slot_count)


class TestSavesToHost(SavingMoverSuite):
    def make_ends(self, layout: Layout) -> Ends:
        source, target = arrays(layout), host(layout)
        return Ends(source, target, MemcpyMover(source, target, Algorithm.XXH3))


class TestLoadsFromHost(LoadingMoverSuite):
    def make_ends(self, layout: Layout) -> Ends:
        source, target = host(layout), arrays(layout)
        return Ends(source, target, MemcpyMover(source, target, Algorithm.XXH3))


class TestStagesFromMemoryToHost(CheckingMoverSuite):
    algorithm = Algorithm.MIX64

    def make_ends(self, layout: Layout) -> Ends:
        source, target = MemoryTier(layout, slot_count=layout.block_count), host(layout)
        return Ends(source, target, MemcpyMover(source, target, self.algorithm))
