"""A thousand of every kind of damage in the host arena: all found, none served, all computed anew.

The arena is damaged by somebody else who has it mapped, as a stray write would. A prompt is a
few blocks and a token; which of its blocks are damaged is left to chance.
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
from penstock.machine.kv_events import BlocksRemoved
from penstock.testing.tier_suite import read_slots, write_slots
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from lab.fixtures.arena_damage import Damageable
    from penstock.runtime.cache import Lease

DAMAGED = 1000
PROMPTS, BLOCKS = 250, 8
COUNT = PROMPTS * BLOCKS
AT_ONCE = 25
"""Requests that run at the same time; the device has room for no more."""
DEVICE_BLOCKS = AT_ONCE * (BLOCKS + 1)
HOST_BLOCKS = COUNT + 2 * DEVICE_BLOCKS
LAYERS, TOKENS, HEADS, CHANNELS = 4, 4, 2, 8
STEPS_MAX = 10_000

CONFIG = f"""
version = 1
model.name = "none"
cache = {{ block_tokens = {TOKENS}, blocks = {DEVICE_BLOCKS} }}
tiers = [{{ name = "host", kind = "host", blocks = {HOST_BLOCKS}, huge_pages = "never" }}]
"""


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


class Engine:
    """A cache over an arena, and a second mapping of that arena for whoever does the damage."""

    def __init__(self, memory: str) -> None:
        self.device = MEMORIES[memory]()
        layout = self.device.layout
        config = penstock.parse_config(CONFIG)
        before = set(_arenas())
        if isinstance(self.device, TensorTier):
            self.cache = penstock.open(config, kv=self.device)
        else:
            arrays = [self.device.blocks(()).buffers[layer] for layer in range(LAYERS)]
            self.cache = penstock.open(config, kv=arrays, layout=layout)
        fd = min(set(_arenas()) - before)  # Whichever: a mapping keeps one of its own.
        self.host = HostTier.attach(fd, layout, HOST_BLOCKS)
        self.random = np.random.default_rng(3)
        self.layer_count = LAYERS
        self.contents = self._draw()
        self.older = self.host_bytes(), self.host_sums()

    def fill(self) -> None:
        """Computes every prompt; in the end all of them lie in the host tier and nowhere else."""
        self.serve(range(PROMPTS))
        fillers = self.contents[:AT_ONCE] ^ 255
        self.contents = np.concatenate((self.contents, fillers))
        self.serve(range(PROMPTS, PROMPTS + AT_ONCE))
        self.slot_of = self._find_slots()
        self.damaged = self.random.permutation(COUNT)[:DAMAGED]

    def fill_and_age(self) -> None:
        """The same, after an earlier life of which every slot has kept bytes and sums."""
        self.fill()
        self.older = self.host_bytes(), self.host_sums()
        self.older_slot_of = self.slot_of
        self.cache.reset("new weights")
        self.contents = self._draw()
        self.fill()

    def serve(self, prompts: range) -> list[tuple[int, Lease]]:
        """Requests for these prompts, some at a time; what is not cached is computed."""
        served: list[tuple[int, Lease]] = []
        for first in range(prompts.start, prompts.stop, AT_ONCE):
            batch = range(first, min(first + AT_ONCE, prompts.stop))
            leases = [(number, self.cache.acquire(_prompt(number))) for number in batch]
            self._step_until(lambda: all(_ready(lease) for _, lease in leases))  # noqa: B023
            for number, lease in leases:
                self._compute(number, lease)
                lease.release()
            self._step_until(lambda: not self.cache.busy)
            served += leases
        return served

    def host_bytes(self) -> NDArray[np.uint8]:
        return read_slots(self.host, range(HOST_BLOCKS))

    def host_sums(self) -> NDArray[np.uint64]:
        return self.host.sums(np.arange(HOST_BLOCKS, dtype=np.int32)).copy()

    def damage(self, slots: NDArray[np.intp], blocks: NDArray[np.uint8]) -> None:
        """Overwrites the bytes of some slots."""
        write_slots(self.host, slots.tolist(), blocks)

    def damage_sums(self, slots: NDArray[np.intp], sums: NDArray[np.uint64]) -> None:
        """Overwrites the sums of some slots."""
        self.host.keep_sums(slots.astype(np.int32), sums)

    @property
    def bad_slots(self) -> NDArray[np.intp]:
        return self.slot_of[self.damaged]

    def _draw(self) -> NDArray[np.uint8]:
        """The KV of every prompt's blocks; no two are alike, and none has a zero in it."""
        size = (PROMPTS, BLOCKS, self.device.layout.block_bytes)
        return self.random.integers(1, 255, size=size, dtype=np.uint8)

    def _compute(self, number: int, lease: Lease) -> None:
        """What is cached is right; the rest is computed, and said to be."""
        slots, content = lease.block_table[:BLOCKS].tolist(), self.contents[number]
        cached = lease.cached_tokens // TOKENS
        assert np.array_equal(read_slots(self.device, slots)[:cached], content[:cached])
        if cached < BLOCKS:
            write_slots(self.device, slots[cached:], content[cached:])
        lease.commit_prompt(BLOCKS * TOKENS + 1)

    def _find_slots(self) -> NDArray[np.intp]:
        """Where the blocks of each prompt lie in the arena."""
        lying = {block.tobytes(): slot for slot, block in enumerate(self.host_bytes())}
        blocks = self.contents[:PROMPTS].reshape(COUNT, -1)
        return np.array([lying[block.tobytes()] for block in blocks])

    def good_blocks(self, number: int) -> int:
        """How many blocks of a prompt come before the first that is damaged."""
        own = range(number * BLOCKS, (number + 1) * BLOCKS)
        damaged = set(self.damaged.tolist())
        return next((at for at, block in enumerate(own) if block in damaged), BLOCKS)

    def _step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if done():
                return
            self.cache.step()
        raise AssertionError("it never ends")


def _arenas() -> Iterator[int]:
    """The descriptors of shared memory that this process has."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # The descriptor of this very listing.
        if target.startswith("/memfd:"):
            yield int(entry.name)


def _prompt(number: int) -> list[int]:
    return [number, *range(BLOCKS * TOKENS)]


def _ready(lease: Lease) -> bool:
    return lease.state is penstock.LeaseState.READY


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
def test_a_thousand_damaged_blocks_are_found_and_none_is_served(
    damage: Callable[[Damageable], None], memory: str
) -> None:
    engine = Engine(memory)
    damage(engine)

    served = engine.serve(range(PROMPTS))

    found = [lease.cached_tokens // TOKENS for _, lease in served]
    good = [engine.good_blocks(number) for number in range(PROMPTS)]
    reasons = {lease.miss.reason for _, lease in served if lease.cached_tokens < BLOCKS * TOKENS}
    statistics = engine.cache.statistics()
    assert found == good
    assert reasons == {penstock.MissReason.CORRUPT}
    assert statistics.blocks_corrupt == DAMAGED
    assert statistics.tokens_not_delivered == (COUNT - sum(good)) * TOKENS
    engine.cache.audit()


def test_what_was_damaged_is_dropped_and_replaced_by_what_was_computed() -> None:
    engine = Engine("numpy")
    flip_bits(engine)
    engine.cache.take_kv_events()
    engine.serve(range(PROMPTS))
    told = engine.cache.take_kv_events()

    again = engine.serve(range(PROMPTS))

    removed = [each for each in told if isinstance(each, BlocksRemoved) and each.tier == "host"]
    assert len({key for each in removed for key in each.keys}) == DAMAGED
    assert {lease.cached_tokens for _, lease in again} == {BLOCKS * TOKENS}
    assert engine.cache.statistics().blocks_corrupt == DAMAGED
