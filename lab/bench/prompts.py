"""Prompts of a benchmark, from a seed: the same in every process and version of NumPy.

This file imports nothing of Penstock: a peer in another environment loads it by its path, so
that the prompts are defined once for both sides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

VOCABULARY = 32_000
"""Token ids lie below this. A larger vocabulary only makes vLLM's pickled blocks longer."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_STRIDE = 1 << 32


def draw_tokens(seed: int, count: int) -> NDArray[np.int32]:
    """The prompt that belongs to a seed: the same in every process and version of NumPy.

    A counter goes through the mixing step of SplitMix64 (Steele, Lea, Flood, 2014), because
    NumPy's own generators may change their streams between versions.
    """
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(seed * _GOLDEN & _MASK)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(VOCABULARY)).astype(np.int32)


def other_seed(seed: int, number: int) -> int:
    """The seed of a round's `number`-th other prompt: 0 evicts, higher ones fill the pool."""
    return seed + (number + 1) * _SEED_STRIDE
