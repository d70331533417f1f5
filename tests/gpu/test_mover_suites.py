"""The CUDA movers satisfy the sentences that all movers have to.

The engine's memory is pinned host memory here, which kernels reach by the same addresses as
the CPU: so every layout of the suites can be filled and read without a copy of its own.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.cuda.buffers import StagingSize
from penstock.movers.cuda.layers import LayerLoadMover
from penstock.movers.cuda.mover import DuplicateMover, LoadMover, SaveMover
from penstock.testing.mover_suite import (
    SOURCES,
    TARGETS,
    Ends,
    LoadingMoverSuite,
    MoverSuite,
    SavingMoverSuite,
    keys_of,
    make_copy,
    poll_until_idle,
)
from penstock.testing.tier_suite import LAYOUTS, read_slots
from penstock.tiers.tensors import TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind, HeadRange, Layout
from penstock.vocabulary.planes import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.machine.effects import Copy
    from penstock.movers.base import Moved
    from penstock.movers.cuda.mover import CudaMover
    from penstock.testing.mover_suite import _Damage
    from penstock.vocabulary.keys import OperationId

pytestmark = pytest.mark.gpu

SIZE = StagingSize(batch_bytes=1 << 10, batch_count=2, turn_bytes=100, queue_batches=4)
"""Small, so that copies need several batches and turns of odd length."""


class Settled:
    """A mover whose polls end with the work they submitted, as the suites expect."""

    def __init__(self, mover: CudaMover | LayerLoadMover) -> None:
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


MADE: dict[tuple[type, int], Ends] = {}
"""Two ends for each suite and layout: making them takes longer than what is tested on them."""
OPENED: list[CudaMover | LayerLoadMover | PinnedTier] = []


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    MADE.clear()
    while OPENED:
        OPENED.pop().close()
    gc.collect()


def reused(make: Callable[[MoverSuite, Layout], Ends]) -> Callable[[MoverSuite, Layout], Ends]:
    """Ends that were made before, wiped; anew if a test has left them busy."""

    def make_ends(suite: MoverSuite, layout: Layout) -> Ends:
        ends = MADE.get((type(suite), id(layout)))
        if ends is None or ends.mover.busy:
            ends = MADE[type(suite), id(layout)] = make(suite, layout)
        for tier in (ends.source, ends.target):
            for buffer in tier.blocks(()).buffers.values():
                buffer[:] = 0
            if isinstance(tier, PinnedTier):
                slots = np.arange(tier.slot_count, dtype=np.int32)
                tier.keep_sums(slots, np.zeros_like(tier.sums(slots)))
        return ends

    return make_ends


def device(layout: Layout) -> TensorTier:
    tensors = [
        torch.zeros(size, dtype=torch.uint8).pin_memory() for size in layout.buffer_bytes.values()
    ]
    return TensorTier(layout, [tensor.untyped_storage() for tensor in tensors])


def host(layout: Layout) -> PinnedTier:
    tier = PinnedTier(layout, slot_count=layout.block_count)
    OPENED.insert(0, tier)  # Closed after the movers.
    return tier


def settled(mover: CudaMover | LayerLoadMover) -> Settled:
    OPENED.append(mover)
    return Settled(mover)


class TestSavesToPinnedMemory(SavingMoverSuite):
    algorithm = Algorithm.MIX64

    @reused
    def make_ends(self, layout: Layout) -> Ends:
        source, target = device(layout), host(layout)
        mover = SaveMover(source, target, self.algorithm, size=SIZE)
        return Ends(source, target, settled(mover))


class TestLoadsFromPinnedMemory(LoadingMoverSuite):
    algorithm = Algorithm.MIX64

    @reused
    def make_ends(self, layout: Layout) -> Ends:
        source, target = host(layout), device(layout)
        mover = LoadMover(source, target, self.algorithm, size=SIZE)
        return Ends(source, target, settled(mover))


class TestLayerLoadsFromPinnedMemory(LoadingMoverSuite):
    algorithm = Algorithm.MIX64

    @reused
    def make_ends(self, layout: Layout) -> Ends:
        source, target = host(layout), device(layout)
        mover = LayerLoadMover(source, target, self.algorithm)
        return Ends(source, target, settled(mover))

    def expect_found(self, damage: _Damage, positions: Sequence[int]) -> None:
        """The blocks at these positions are faults; what lies in their slots is anybody's guess."""
        ends = damage.ends
        expected = read_slots(ends.target)
        content = read_slots(ends.source, SOURCES)
        for position in range(3):
            expected[TARGETS[position]] = content[position]
        certain = [slot for slot in range(6) if slot not in {TARGETS[at] for at in positions}]

        ends.mover.submit(self.copy(1))
        (moved,) = poll_until_idle(ends.mover)

        assert moved.faults == tuple((at, BlockFault.CORRUPT) for at in sorted(positions))
        np.testing.assert_array_equal(read_slots(ends.target)[certain], expected[certain])


class TestDuplicatesOnTheDevice(MoverSuite):
    purpose = Purpose.DUPLICATE
    algorithm = Algorithm.MIX64

    @reused
    def make_ends(self, layout: Layout) -> Ends:
        tier = device(layout)
        mover = DuplicateMover(tier, tier, self.algorithm, size=SIZE)
        return Ends(tier, tier, settled(mover))


def test_sums_of_another_algorithm_are_refused() -> None:
    tier = device(LAYOUTS["latent"])

    with pytest.raises(ValueError, match="algorithm is xxh3, must be mix64"):
        DuplicateMover(tier, tier, Algorithm.XXH3)


def test_staging_has_a_known_size_and_is_given_back() -> None:
    tier = device(LAYOUTS["latent"])
    gc.collect()  # What tests before this one have left would go in the middle of it.
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


def test_a_group_may_have_more_slots_than_another() -> None:
    """An engine gives a sliding window fewer blocks than full attention."""
    parts = [
        Layout.split(
            layers=layers,
            heads=HeadRange.all_of(2),
            channels=4,
            dtype=DType.BF16,
            block_tokens=4,
            block_count=blocks,
        )
        for layers, blocks in ((range(2), 9), (range(2, 4), 6))
    ]
    sliding = replace(parts[1].groups[0], kind=GroupKind.SLIDING)
    layout = Layout.join(parts[0], replace(parts[1], groups=(sliding,)))
    tier, target = device(layout), PinnedTier(layout, slot_count=2)
    mover = SaveMover(tier, target, Algorithm.MIX64, size=SIZE)
    OPENED.extend((target, mover))
    filled = tier.blocks(()).buffers
    for buffer in filled.values():
        buffer[:] = 7

    mover.submit(make_copy(1, [[8], [5]], [1], purpose=Purpose.SAVE, keys=keys_of(1)))
    (moved,) = poll_until_idle(Settled(mover))

    assert moved.faults == ()
    assert mover.guard(0, [8])
    assert np.unique(target.packed[1]).tolist() == [7]
