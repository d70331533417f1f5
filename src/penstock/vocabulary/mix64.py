"""mix64: the checksum that a pack kernel computes while it copies, in any order.

The bytes of a segment are read as little-endian 32-bit words `w` at positions `p` = 0, 1, …,
the last word padded with zero bytes; one more word at the end says how many bytes there
were. With the seed's halves `s0` (low) and `s1` (high), all arithmetic modulo 2³²:

    x = w ^ (p·C0 + s0)
    x = (x ^ x>>11)·M0
    x = (x ^ x>>15)·M1                  term0 = x ^ x>>15
    y = (term0 ^ (p·C1 + s1))·M2        term1 = y ^ y>>16

    sum = Σ term0  +  2³² · Σ term1     each half modulo 2³²

Both terms are one-to-one in `w`, so a change within one word is always found, and both are
far from linear in `w` and `p`, so changes in several words do not cancel. Additions commute,
so threads may add what they have in any order; and there are 32-bit multiplications alone,
of which a GPU does as many as additions.

The one rule: this definition never changes. A better one gets another name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Odd, with well-spread bits: multiples of the first never repeat within 2³² positions, and
# those of the second have no simple relation to them.
_C0 = np.uint32(0x9E37_79B1)
_C1 = np.uint32(0x85EB_CA77)
# The multipliers of Wellons' `lowbias32`. Its first shift of 16 is 11 here: two flipped
# signs in a pair of 16-bit numbers are bits 31 and 15, and a shift of 16 folds them into one.
_M0 = np.uint32(0x7FEB_352D)
_M1 = np.uint32(0x846C_A68B)
_M2 = np.uint32(0xC2B2_AE3D)

WORD_BYTES = 4
LENGTH_MAX = (1 << 32) - 1
"""The length has to fit into a word."""
_CHUNK_WORDS = 1 << 16
"""Two arrays of so many words stay in a core's second-level cache. Measured: 1.2 GB/s, and
half of it with a quarter of the words, where the calls cost as much as their work."""


def mix64_sums(segments: NDArray[np.uint8], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sums of many segments of equal length.

    Args:
        segments: Bytes, of shape [blocks, segments, length]; the last axis without gaps.
        seeds: Of shape [blocks, segments].
    """
    blocks, count, length = segments.shape
    if length > LENGTH_MAX:
        raise ValueError(f"length of a segment is {length}, must be at most {LENGTH_MAX}")
    words = -(-length // WORD_BYTES)
    sums = np.zeros((blocks, count, 2), dtype=np.uint32)
    halves = _halves(seeds)
    segment_step = max(1, _CHUNK_WORDS // max(1, words))
    block_step = max(1, segment_step // count)
    scratch = np.empty((2, min(_CHUNK_WORDS, max(1, blocks * count * words))), dtype=np.uint32)
    for block in range(0, blocks, block_step):
        for segment in range(0, count, segment_step):
            chunk = np.s_[block : block + block_step, segment : segment + segment_step]
            _add_words(_as_words(segments[chunk]), halves[chunk], sums[chunk], scratch)
    ends = np.full((blocks, count, 1), length, dtype=np.uint32)
    _add_terms(ends, words, halves, sums, np.empty((2, blocks * count), dtype=np.uint32))
    return sums.view("<u8").reshape(blocks, count).astype(np.uint64, copy=False)


def _halves(values: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Low and high half of each value, in a new last axis."""
    little: NDArray[np.uint32] = np.ascontiguousarray(values, dtype="<u8").view("<u4")
    return little.reshape(*values.shape, 2)


def _as_words(segments: NDArray[np.uint8]) -> NDArray[np.uint32]:
    length = segments.shape[-1]
    missing = -length % WORD_BYTES
    if missing:
        padded = np.zeros((*segments.shape[:-1], length + missing), dtype=np.uint8)
        padded[..., :length] = segments
        segments = padded
    return segments.view("<u4")


def _add_words(
    words: NDArray[np.uint32],
    seeds: NDArray[np.uint32],
    sums: NDArray[np.uint32],
    scratch: NDArray[np.uint32],
) -> None:
    """Adds a chunk of segments, each of which may be longer than the scratch space."""
    for first in range(0, words.shape[-1], _CHUNK_WORDS):
        _add_terms(words[..., first : first + _CHUNK_WORDS], first, seeds, sums, scratch)


def _add_terms(
    words: NDArray[np.uint32],
    first: int,
    seeds: NDArray[np.uint32],
    sums: NDArray[np.uint32],
    scratch: NDArray[np.uint32],
) -> None:
    """Adds the terms of words at positions from `first` on to both halves of `sums`."""
    positions = np.arange(first, first + words.shape[-1], dtype=np.uint32)
    x, shifted = (part[: words.size].reshape(words.shape) for part in scratch)
    np.add(positions * _C0, seeds[..., 0, np.newaxis], out=x)
    np.bitwise_xor(x, words, out=x)
    _fold(x, 11, shifted)
    np.multiply(x, _M0, out=x)
    _fold(x, 15, shifted)
    np.multiply(x, _M1, out=x)
    _fold(x, 15, shifted)
    sums[..., 0] += np.add.reduce(x, axis=-1, dtype=np.uint32)
    np.add(positions * _C1, seeds[..., 1, np.newaxis], out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, _M2, out=x)
    _fold(x, 16, shifted)
    sums[..., 1] += np.add.reduce(x, axis=-1, dtype=np.uint32)


def _fold(x: NDArray[Any], bits: int, shifted: NDArray[Any]) -> None:
    """`x ^= x >> bits` in place; `shifted` is scratch space."""
    np.right_shift(x, np.uint32(bits), out=shifted)
    np.bitwise_xor(x, shifted, out=x)
