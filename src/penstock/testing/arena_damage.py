"""Five kinds of damage to blocks in an arena, as stray writes and stale memory would do it.

    for damage in DAMAGES:
        damage(engine)          # fills the engine's arena, then damages some of its blocks

The engine is a test's: it fills its tiers, knows where its blocks lie, and draws which of them are
damaged. The one rule: every block that is damaged differs from what its key names, in its bytes or
in its sums; so whoever verifies has to find all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Damageable(Protocol):
    """An engine whose blocks lie in an arena that can be written to behind its back."""

    random: np.random.Generator
    layer_count: int
    older: tuple[NDArray[np.uint8], NDArray[np.uint64]]
    """What every slot held in an earlier life: bytes and sums."""

    older_slot_of: NDArray[np.intp]
    """Where each block lay then."""
    damaged: NDArray[np.intp]
    """The blocks that are to be damaged."""

    def fill(self) -> None:
        """Computes blocks, until those to be damaged lie in the arena and nowhere else."""
        ...

    def fill_and_age(self) -> None:
        """The same, after an earlier life that left its bytes and sums in `older`."""
        ...

    def host_bytes(self) -> NDArray[np.uint8]:
        """The bytes of every slot."""
        ...

    def host_sums(self) -> NDArray[np.uint64]:
        """The sums of every slot."""
        ...

    def damage(self, slots: NDArray[np.intp], blocks: NDArray[np.uint8]) -> None:
        """Overwrites the bytes of some slots."""
        ...

    def damage_sums(self, slots: NDArray[np.intp], sums: NDArray[np.uint64]) -> None:
        """Overwrites the sums of some slots."""
        ...

    @property
    def bad_slots(self) -> NDArray[np.intp]:
        """Where the blocks lie that are to be damaged."""
        ...


def flip_bits(engine: Damageable) -> None:
    """One bit a block."""
    engine.fill()
    blocks = engine.host_bytes()[engine.bad_slots]
    at = engine.random.integers(blocks.shape[1], size=len(blocks))
    bits = (1 << engine.random.integers(8, size=len(blocks))).astype(np.uint8)
    blocks[np.arange(len(blocks)), at] ^= bits
    engine.damage(engine.bad_slots, blocks)


def exchange_slots(engine: Damageable) -> None:
    """With their sums: bytes and sums agree, and only the key tells."""
    engine.fill()
    others = np.roll(engine.bad_slots, 1)
    blocks, sums = engine.host_bytes()[others], engine.host_sums()[others]
    engine.damage(engine.bad_slots, blocks)
    engine.damage_sums(engine.bad_slots, sums)


def bring_back_older(engine: Damageable) -> None:
    """What lay in the slot in an earlier life, whole and with its sums."""
    engine.fill_and_age()
    blocks, sums = engine.older
    engine.damage(engine.bad_slots, blocks[engine.bad_slots])
    engine.damage_sums(engine.bad_slots, sums[engine.bad_slots])


def bring_back_older_of_the_same_keys(engine: Damageable) -> None:
    """What the block's own slot held under its own key before a reset, whole and with its sums."""
    engine.fill_and_age()
    blocks, sums = engine.older
    older_slots = engine.older_slot_of[engine.damaged]
    engine.damage(engine.bad_slots, blocks[older_slots])
    engine.damage_sums(engine.bad_slots, sums[older_slots])


def exchange_layers(engine: Damageable) -> None:
    """Two layers of each block; half of them with their sums."""
    engine.fill()
    slots, count = engine.bad_slots, engine.layer_count
    layers = engine.host_bytes()[slots].reshape(len(slots), count, -1)
    sums = engine.host_sums()[slots].reshape(len(slots), count, -1)
    for number in range(len(slots)):
        pair = engine.random.permutation(count)[:2]
        layers[number, pair] = layers[number, pair[::-1]]
        if number % 2:
            sums[number, pair] = sums[number, pair[::-1]]
    engine.damage(slots, layers.reshape(len(slots), -1))
    engine.damage_sums(slots, sums.reshape(len(slots), -1))


def zero_tails(engine: Damageable) -> None:
    """From somewhere in a block to its end, as if a write had stopped there."""
    engine.fill()
    blocks = engine.host_bytes()[engine.bad_slots]
    starts = engine.random.integers(blocks.shape[1], size=len(blocks))
    blocks[np.arange(blocks.shape[1]) >= starts[:, np.newaxis]] = 0
    engine.damage(engine.bad_slots, blocks)


DAMAGES: tuple[Callable[[Damageable], None], ...] = (
    flip_bits,
    exchange_slots,
    bring_back_older,
    bring_back_older_of_the_same_keys,
    exchange_layers,
    zero_tails,
)
