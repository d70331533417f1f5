"""A thousand of every kind of damage in pinned memory: all found, none delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.cuda.mover import LoadMover, SaveMover
from penstock.testing.mover_suite import make_copy
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.movers.cuda.mover import CudaMover

pytestmark = pytest.mark.gpu

DAMAGED = 1000
GOOD = 200
COUNT = DAMAGED + GOOD
LAYERS, TOKENS, HEADS, CHANNELS = 4, 16, 2, 64
KEYS = [number.to_bytes(16, "little") for number in range(COUNT)]


class Store:
    """Blocks on the device, saved to pinned memory, then wiped from the device."""

    def __init__(self) -> None:
        self.kv = self._draw()
        layers = [
            TensorLayer(number=number, planes=[Held.pair(each)])
            for number, each in enumerate(self.kv)
        ]
        group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(HEADS), layers=layers)
        self.tier = TensorTier.of([group], block_tokens=TOKENS)
        self.host = PinnedTier(self.tier.layout, COUNT)
        self.random = np.random.default_rng(7)
        self.older = self._save([b"an earlier life " for _ in KEYS])
        for each, other in zip(self.kv, self._draw(), strict=True):
            each.copy_(other)
        torch.cuda.synchronize()
        self.wanted = [each.clone() for each in self.kv]
        self._save(KEYS)
        for each in self.kv:
            each.zero_()
        torch.cuda.synchronize()
        self.damaged = self.random.permutation(COUNT)[:DAMAGED]

    def _draw(self) -> list[torch.Tensor]:
        shape = (2, COUNT, TOKENS, HEADS, CHANNELS * 2)
        return [
            torch.randint(1, 255, shape, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
            for _ in range(LAYERS)
        ]

    def _save(self, keys: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        mover = SaveMover(self.tier, self.host, Algorithm.MIX64)
        run(mover, Purpose.SAVE, keys)
        mover.close()
        everything = np.arange(COUNT, dtype=np.int32)
        return self.host.packed.copy(), self.host.sums(everything)

    def replace_sums(self, slots: np.ndarray, sums: np.ndarray) -> None:
        self.host.keep_sums(slots.astype(np.int32), sums)


def run(
    mover: CudaMover, purpose: Purpose, keys: list[bytes]
) -> tuple[tuple[int, BlockFault], ...]:
    everything = np.arange(COUNT)
    mover.submit(make_copy(1, everything, everything, purpose=purpose, keys=keys))
    while True:
        moved, _ = mover.poll(budget_bytes=1 << 30)
        if moved:
            return moved[0].faults
        mover.wait()


def flip_bits(store: Store) -> None:
    at = store.random.integers(store.host.packed.shape[1], size=DAMAGED)
    bits = (1 << store.random.integers(8, size=DAMAGED)).astype(np.uint8)
    store.host.packed[store.damaged, at] ^= bits


def exchange_slots(store: Store) -> None:
    """With their sums: bytes and sums agree, and only the key tells."""
    exchanged = np.roll(store.damaged, 1)
    store.host.packed[store.damaged] = store.host.packed[exchanged]
    store.replace_sums(store.damaged, store.host.sums(exchanged.astype(np.int32)))


def bring_back_older(store: Store) -> None:
    """What lay in the slot before, whole and with its sums."""
    packed, sums = store.older
    store.host.packed[store.damaged] = packed[store.damaged]
    store.replace_sums(store.damaged, sums[store.damaged])


def exchange_layers(store: Store) -> None:
    """Half of them with their sums."""
    length = store.host.packed.shape[1] // LAYERS
    cells = len(store.tier.layout.cells) // LAYERS
    for number, slot in enumerate(store.damaged):
        one, other = store.random.permutation(LAYERS)[:2]
        layers = store.host.packed[slot].reshape(LAYERS, length)
        layers[[one, other]] = layers[[other, one]]
        if number % 2:
            sums = store.host.sums(np.array([slot], dtype=np.int32)).reshape(LAYERS, cells)
            sums[[one, other]] = sums[[other, one]]
            store.replace_sums(np.array([slot]), sums.reshape(1, -1))


def zero_tails(store: Store) -> None:
    for slot in store.damaged:
        store.host.packed[slot, store.random.integers(store.host.packed.shape[1]) :] = 0


@pytest.mark.parametrize(
    "damage", [flip_bits, exchange_slots, bring_back_older, exchange_layers, zero_tails]
)
def test_a_thousand_damaged_blocks_are_found_and_none_is_delivered(
    damage: Callable[[Store], None],
) -> None:
    store = Store()
    damage(store)
    mover = LoadMover(store.host, store.tier, Algorithm.MIX64)

    faults = run(mover, Purpose.LOAD, KEYS)
    torch.cuda.synchronize()

    assert faults == tuple((int(at), BlockFault.CORRUPT) for at in np.sort(store.damaged))
    bad = torch.from_numpy(store.damaged).cuda()
    good = torch.from_numpy(np.setdiff1d(np.arange(COUNT), store.damaged)).cuda()
    for now, wanted in zip(store.kv, store.wanted, strict=True):
        assert not now.view(torch.int16)[:, bad].any()
        assert torch.equal(now.view(torch.int16)[:, good], wanted.view(torch.int16)[:, good])
    mover.close()
    store.host.close()
