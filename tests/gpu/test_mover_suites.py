"""The CUDA movers satisfy the sentences that all movers have to.

The engine's memory is pinned host memory here, which kernels reach by the same addresses as
the CPU: so every layout of the suites can be filled and read without a copy of its own.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

from penstock.cache.ledger import Purpose
from penstock.movers.cuda.mover import DuplicateMover, LoadMover, SaveMover
from penstock.movers.cuda.pinned import PinnedTier
from penstock.movers.cuda.staging import StagingSize
from penstock.testing.mover_suite import (
    Ends,
    LoadingMoverSuite,
    MoverSuite,
    SavingMoverSuite,
)
from penstock.testing.tier_suite import LAYOUTS
from penstock.tiers.tensors import TensorTier
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.machine.effects import Copy
    from penstock.movers.base import Moved
    from penstock.movers.cuda.mover import CudaMover
    from penstock.vocabulary.ids import OperationId
    from penstock.vocabulary.layout import Layout

pytestmark = pytest.mark.gpu

SIZE = StagingSize(batch_bytes=1 << 10, batch_count=2, piece_bytes=100)
"""Small, so that copies need several batches and pieces of odd length."""


class Settled:
    """A mover whose polls end with the work they submitted, as the suites expect."""

    def __init__(self, mover: CudaMover) -> None:
        self._mover = mover

    def submit(self, copy: Copy) -> None:
        self._mover.submit(copy)

    def abandon(self, operation: OperationId) -> None:
        self._mover.abandon(operation)

    def poll(self, *, budget_bytes: int) -> tuple[list[Moved], int]:
        moved, spent = self._mover.poll(budget_bytes=budget_bytes)
        self._mover.wait()
        return [*moved, *self._mover.collect()], spent

    @property
    def busy(self) -> bool:
        return self._mover.busy


OPENED: list[CudaMover | PinnedTier] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
    gc.collect()


def device(layout: Layout) -> TensorTier:
    tensors = [
        torch.zeros(size, dtype=torch.uint8).pin_memory() for size in layout.buffer_bytes.values()
    ]
    return TensorTier(layout, [tensor.untyped_storage() for tensor in tensors])


def host(layout: Layout) -> PinnedTier:
    OPENED.append(PinnedTier(layout, slot_count=layout.block_count))
    assert isinstance(OPENED[-1], PinnedTier)
    return OPENED[-1]


def settled(mover: CudaMover) -> Settled:
    OPENED.append(mover)
    return Settled(mover)


class TestSavesToPinnedMemory(SavingMoverSuite):
    algorithm = Algorithm.MIX64

    def make_ends(self, layout: Layout) -> Ends:
        source, target = device(layout), host(layout)
        return Ends(source, target, settled(SaveMover(source, target, self.algorithm, size=SIZE)))


class TestLoadsFromPinnedMemory(LoadingMoverSuite):
    algorithm = Algorithm.MIX64

    def make_ends(self, layout: Layout) -> Ends:
        source, target = host(layout), device(layout)
        return Ends(source, target, settled(LoadMover(source, target, self.algorithm, size=SIZE)))


class TestDuplicatesOnTheDevice(MoverSuite):
    purpose = Purpose.DUPLICATE
    algorithm = Algorithm.MIX64

    def make_ends(self, layout: Layout) -> Ends:
        tier = device(layout)
        return Ends(tier, tier, settled(DuplicateMover(tier, tier, self.algorithm, size=SIZE)))


def test_sums_of_another_algorithm_are_refused() -> None:
    tier = device(LAYOUTS["latent"])

    with pytest.raises(ValueError, match="algorithm is xxh3, must be mix64"):
        DuplicateMover(tier, tier, Algorithm.XXH3)


def test_staging_has_a_known_size_and_is_given_back() -> None:
    tier = device(LAYOUTS["latent"])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    mover = DuplicateMover(tier, tier, Algorithm.MIX64, size=StagingSize(batch_bytes=1 << 20))
    taken = torch.cuda.memory_allocated() - before
    told = mover.staging_bytes
    mover.close()
    del mover
    gc.collect()

    assert told <= taken <= told + (1 << 20)
    assert told >= 2 * min(1 << 20, 1024 * tier.layout.block_bytes)
    assert torch.cuda.memory_allocated() == before
