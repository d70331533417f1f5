"""A "model" whose KV is a pure function of the tokens, so that every byte can be checked.

As in a real model, the KV of a token depends on every token before it, on the layer and on the
weights. Unlike a real one it takes no time, and the same tokens always give the same bytes.

The one rule that must not break: one token changed, added or moved changes the KV of every
token after it. Otherwise a block found under the wrong key could pass for the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYER_COUNT = 2
HEAD_COUNT = 2
CHANNEL_COUNT = 32
VOCABULARY = 50_000

KV: TypeAlias = NDArray[np.uint16]
"""Bit patterns of 16-bit numbers: [layer, K or V, token, head, channel]."""

_PARTS = 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORDS_PER_TOKEN = LAYER_COUNT * _PARTS * HEAD_COUNT * CHANNEL_COUNT // 4
"""Four 16-bit numbers are cut from each 64-bit word."""

KV_BYTES_PER_TOKEN = 8 * _WORDS_PER_TOKEN


class ToyModel:
    """Computes KV and next tokens; models with other weights compute others."""

    def __init__(self, weights: int) -> None:
        self.weights = weights

    def kv(self, tokens: Sequence[int], first: int = 0) -> KV:
        """The KV of the tokens from `first` on, each after all that come before it."""
        states = self._states(tokens)[first:, np.newaxis]
        words = _mixed(states + np.arange(_WORDS_PER_TOKEN, dtype=np.uint64) * _GOLDEN)
        shape = (len(states), LAYER_COUNT, _PARTS, HEAD_COUNT, CHANNEL_COUNT)
        return np.moveaxis(words.view(np.uint16).reshape(shape), 0, 2)

    def next_token(self, tokens: Sequence[int], *, sample: int = 0) -> int:
        """What the model says after `tokens`; another `sample`, another answer."""
        last = self._states(tokens)[-1:] + np.uint64(sample)
        return int(_mixed(last)[0]) % VOCABULARY

    def _states(self, tokens: Sequence[int]) -> NDArray[np.uint64]:
        """After each token, one number that stands for it and all that came before it."""
        words = np.asarray(tokens, dtype=np.uint64)
        places = np.arange(1, len(words) + 1, dtype=np.uint64) * _GOLDEN
        return np.cumsum(_mixed(_mixed(words + np.uint64(self.weights)) + places), dtype=np.uint64)


def device_arrays(block_count: int, block_tokens: int) -> KV:
    """Room for the KV of some blocks: one array a layer, [K or V, block, token, head, channel]."""
    shape = (LAYER_COUNT, _PARTS, block_count, block_tokens, HEAD_COUNT, CHANNEL_COUNT)
    return np.zeros(shape, dtype=np.uint16)


def device_layout(block_count: int, block_tokens: int) -> Layout:
    """How blocks lie in `device_arrays`: the K and the V of a block are far apart."""
    return Layout.packed_kv(
        layers=range(LAYER_COUNT),
        heads=HeadRange.all_of(HEAD_COUNT),
        channels=CHANNEL_COUNT,
        dtype=DType.FP16,
        block_tokens=block_tokens,
        block_count=block_count,
    )


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: one-to-one, and every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
