"""A thousand of every kind of damage in the host arena: all found, none served, all computed anew.

The arena is damaged by somebody else who has it mapped, as a stray write would.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import penstock
from lab.fixtures.arena_damage import (
    DAMAGES,
    bring_back_older_of_the_same_keys,
    flip_bits,
)
from penstock.testing.tier_suite import read_slots, write_slots
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange
from tests.damaged_engine import CONFIG, DEVICE_BLOCKS, HOST_BLOCKS, LAYERS, TOKENS, DamagedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from lab.fixtures.arena_damage import Damageable

HEADS, CHANNELS = 2, 8


def numpy_memory() -> ArrayTier:
    """Opaque blocks, one array a layer."""
    row_bytes = 2 * TOKENS * HEADS * CHANNELS * 2
    layout = penstock.Layout.opaque(
        layers=range(LAYERS),
        block_bytes=row_bytes,
        encoding="test",
        block_tokens=TOKENS,
        block_count=DEVICE_BLOCKS,
    )
    arrays = [np.zeros((DEVICE_BLOCKS, row_bytes), dtype=np.uint8) for _ in range(LAYERS)]
    return ArrayTier(layout, arrays)


def torch_memory() -> TensorTier:
    """K and V in one CPU tensor a layer, of which the strides are read."""
    shape = (2, DEVICE_BLOCKS, TOKENS, HEADS, CHANNELS)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)]
    layers = [
        TensorLayer(number=number, planes=[Held.pair(tensor)])
        for number, tensor in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(HEADS), layers=layers)
    return TensorTier.of([group], block_tokens=TOKENS)


MEMORIES: dict[str, Callable[[], ArrayTier | TensorTier]] = {
    "numpy": numpy_memory,
    "torch": torch_memory,
}


class Engine(DamagedEngine):
    """A cache over an arena, and a second mapping of that arena."""

    def __init__(self, memory: str) -> None:
        self.device = MEMORIES[memory]()
        layout = self.device.layout
        config = penstock.parse_config(CONFIG)
        before = set(_arenas())
        if isinstance(self.device, TensorTier):
            cache = penstock.open(config, kv=self.device)
        else:
            arrays = [self.device.blocks(()).buffers[layer] for layer in range(LAYERS)]
            cache = penstock.open(config, kv=arrays, layout=layout)
        fd = min(set(_arenas()) - before)  # Whichever: a mapping keeps one of its own.
        super().__init__(cache, HostTier.attach(fd, layout, HOST_BLOCKS))

    def read(self, slots: list[int]) -> NDArray[np.uint8]:
        return read_slots(self.device, slots)

    def write(self, slots: list[int], blocks: NDArray[np.uint8]) -> None:
        write_slots(self.device, slots, blocks)


def _arenas() -> Iterator[int]:
    """The descriptors of shared memory that this process has."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
        if target.startswith("/memfd:"):
            yield int(entry.name)


QUICK = [(flip_bits, "torch"), (bring_back_older_of_the_same_keys, "numpy")]
EVERY_DAMAGE = [
    pytest.param(
        damage,
        memory,
        # Between kinds of memory, damage in the arena makes no difference. Each kind of damage is
        # found by every mover that checks: see the suites of `tests/conformance`.
        marks=[] if (damage, memory) in QUICK else [pytest.mark.long],
    )
    for damage in DAMAGES
    for memory in MEMORIES
]


@pytest.mark.parametrize(("damage", "memory"), EVERY_DAMAGE)
def test_a_thousand_damaged_blocks_are_found_dropped_and_computed_anew(
    damage: Callable[[Damageable], None], memory: str
) -> None:
    engine = Engine(memory)
    damage(engine)

    engine.check_all_found()
