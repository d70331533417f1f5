"""Cell checksums: 64 bits per cell, bound to the key of the block; many at a time by spans.

A cell is one layer and one KV head of a block. Each plane of the cell (its K, its V, its
scales) is a *segment* of bytes in canonical order, with a seed of its own made from key,
layer, plane and head; the cell's sum is the sum of its segments' sums. So bytes of another
key, layer, head or plane fail as surely as a flipped bit, and a cell keeps its sum on
whichever rank and in whichever layout it lies. docs/checksums.md is the specification.

| algorithm | computed by                          | sum of a segment                     |
|-----------|--------------------------------------|--------------------------------------|
| `xxh3`    | CPUs                                 | XXH3-64 of the bytes, under the seed |
| `mix64`   | a kernel that copies, in any order   | see `mix64_sums`                     |

This is the data path of a CPU: blocks as they lie packed in an arena, tables of sums out.

The rules:

- Sums are added by halves, each modulo 2³², in both algorithms. A kernel may then add 32-bit
  numbers, and no carry depends on who adds.
- A span sums packed bytes. Bytes in another order have to be packed first, or their sums would mean
  something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Cell, Layout, Segment


SUM_BYTES = 8
SEED_DOMAIN = b"penstock.cell.v1"
LIFE_DOMAIN = b"penstock.life.v1"
LIVES_KEPT = 16
"""Salts that are remembered: every copy needs one, and there is one until the next reset."""

# A step of the golden ratio between neighbouring places, then the finaliser of SplitMix64:
# one-to-one, so that no two places of one key share a seed.
_PLACE_STEP = 0x9E37_79B9_7F4A_7C15
_SEED_M0 = 0xBF58_476D_1CE4_E5B9
_SEED_M1 = 0x94D0_49BB_1331_11EB


class Algorithm(Enum):
    """How a segment's bytes become 64 bits; part of the form of a copy."""

    XXH3 = "xxh3"
    MIX64 = "mix64"


@lru_cache(maxsize=LIVES_KEPT)
def life_salt(incarnation: int, epoch: int) -> int:
    """What makes the seeds of one life of a cache, up to its next reset, unlike all others.

    For tiers whose blocks are void after a reset and unknown after a restart. Copies that may be
    read by another engine, or by another life, have the salt 0.
    """
    name = _u64(incarnation) + _u64(epoch)
    return xxh3_64_intdigest(_framed(LIFE_DOMAIN) + _framed(name))


def key_seed(key: bytes) -> int:
    """What all seeds of a key's cells are made from."""
    return xxh3_64_intdigest(_framed(SEED_DOMAIN) + _framed(key))


def key_seeds(keys: Sequence[bytes], salt: int = 0) -> list[int]:
    """The same for many keys of equal length, in less time each, with the salt of a life."""
    if not keys:
        return []
    prefix = seed_prefix(len(keys[0]))
    return [xxh3_64_intdigest(prefix + key) ^ salt for key in keys]


def seed_prefix(key_bytes: int) -> bytes:
    """What stands before a key of `key_bytes` bytes: a seed is XXH3-64 of both."""
    return _framed(SEED_DOMAIN) + key_bytes.to_bytes(4, "little")


def place_number(*, layer: int, plane: int, head: int) -> int:
    """Layer, plane and head as one number: 24, 8 and 32 bits."""
    for name, value, bits in (("layer", layer, 24), ("plane", plane, 8), ("head", head, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value}, must be from 0 to {(1 << bits) - 1}")
    return layer << 40 | plane << 32 | head


def cell_seeds(
    keys: Sequence[bytes], places: NDArray[np.uint64], salt: int = 0
) -> NDArray[np.uint64]:
    """The seeds of all `places` (see `place_number`) under each key: shape [keys, places]."""
    of_keys = np.array([key_seed(key) ^ salt for key in keys], dtype=np.uint64)
    x = np.add.outer(of_keys, places * np.uint64(_PLACE_STEP))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_SEED_M0)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SEED_M1)
    seeds: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return seeds


def _u64(number: int) -> bytes:
    return (number & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


# mix64 is the checksum that a pack kernel computes while it copies, in any order. The bytes of a
# segment are read as little-endian 32-bit words `w` at positions `p` = 0, 1, …, the last word
# padded with zero bytes; one more word at the end says how many bytes there were. With the seed's
# halves `s0` (low) and `s1` (high), all arithmetic modulo 2³²:
#
#     x = w ^ (p·C0 + s0)
#     x = (x ^ x>>11)·M0
#     x = (x ^ x>>15)·M1                  term0 = x ^ x>>15
#     y = (term0 ^ (p·C1 + s1))·M2        term1 = y ^ y>>16
#
#     sum = Σ term0  +  2³² · Σ term1     each half modulo 2³²
#
# Both terms are one-to-one in `w`, so a change within one word is always found, and both are far
# from linear in `w` and `p`, so changes in several words do not cancel. Additions commute, so
# threads may add what they have in any order; and there are only 32-bit multiplications, of which
# a GPU does as many as additions. This definition never changes: a better one gets another name.

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
"""Two arrays of this many words stay in a core's second-level cache. Measured: 1.2 GB/s, and
half of it with a quarter of the words, where the calls cost as much as their work."""


def mix64_sums(segments: NDArray[np.uint8], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sums of many segments of equal length."""
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


COUNTS_KEPT = 8
"""For how many numbers of blocks the places of all segments are kept."""


class _Run(NamedTuple):
    """Segments of one plane and length at equal distances in the packed block."""

    start: int
    step: int
    length: int
    segments: NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class CellSpan:
    """Cells that follow each other in a packed block, ready to be summed.

    Build it once per layout (`of`), or from a slice of `layout.cells` to sum some layers or
    heads alone. The bytes to sum start with the first byte of the first cell.
    """

    cells: Sequence[Cell]
    length: int = field(init=False)
    """Bytes of all its cells."""
    _slices: tuple[slice, ...] = field(init=False, repr=False)
    _following: dict[int, list[slice]] = field(init=False, repr=False)
    """By number of blocks, the segments of blocks that follow each other."""
    _places: NDArray[np.uint64] = field(init=False, repr=False)
    _first_segments: NDArray[np.intp] = field(init=False, repr=False)
    _runs: tuple[_Run, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.cells:
            raise ValueError("cells is empty, must have at least 1")
        for before, after in pairwise(self.cells):
            if before.start + before.length != after.start:
                raise ValueError(
                    f"cells must follow each other: one ends at {before.start + before.length}, "
                    f"the next starts at {after.start}"
                )
        base = self.cells[0].start
        segments = [segment for cell in self.cells for segment in cell.segments]
        slices = tuple(slice(s.start - base, s.start - base + s.length) for s in segments)
        places = [
            place_number(layer=cell.layer, plane=segment.plane.role, head=cell.head)
            for cell in self.cells
            for segment in cell.segments
        ]
        counts = [len(cell.segments) for cell in self.cells]
        set_field = object.__setattr__
        set_field(self, "length", slices[-1].stop)
        set_field(self, "_slices", slices)
        set_field(self, "_following", {})
        set_field(self, "_places", np.array(places, dtype=np.uint64))
        set_field(self, "_first_segments", np.cumsum([0, *counts[:-1]]))
        set_field(self, "_runs", tuple(_runs(segments, base)))

    @classmethod
    def of(cls, layout: Layout) -> CellSpan:
        return cls(layout.cells)

    def seeds(self, keys: Sequence[bytes], salt: int = 0) -> NDArray[np.uint64]:
        """The seed of every segment, of shape [keys, segments]."""
        return cell_seeds(keys, self._places, salt)

    def sum_blocks(
        self,
        blocks: NDArray[np.uint8],
        keys: Sequence[bytes],
        algorithm: Algorithm,
        *,
        salt: int = 0,
    ) -> NDArray[np.uint64]:
        """The cell sums of many packed blocks.

        Returns:
            The sums, of shape [blocks, cells], in canonical order.
        """
        self._require_fitting(blocks, keys)
        summed = self._xxh3_sums if algorithm is Algorithm.XXH3 else self._mix64_sums
        sums = summed(blocks, self.seeds(keys, salt))
        halves = sums.astype("<u8", copy=False).view("<u4").reshape(*sums.shape, 2)
        cells = np.add.reduceat(halves, self._first_segments, axis=1, dtype=np.uint32)
        return cells.astype("<u4", copy=False).view("<u8")[..., 0].astype(np.uint64, copy=False)

    def _require_fitting(self, blocks: NDArray[np.uint8], keys: Sequence[bytes]) -> None:
        if blocks.ndim != 2 or blocks.dtype != np.uint8:
            raise ValueError(
                f"blocks is an array {list(blocks.shape)} of {blocks.dtype}, "
                "must be [blocks, bytes] of uint8"
            )
        if blocks.shape != (len(keys), self.length):
            raise ValueError(
                f"blocks has shape {list(blocks.shape)}, {len(keys)} keys of {self.length} "
                f"bytes each need {[len(keys), self.length]}"
            )
        if blocks.size > 1 and self.length > 1 and blocks.strides[1] != 1:
            raise ValueError(f"bytes of a block are {blocks.strides[1]} apart, must be 1")

    def _xxh3_sums(
        self, blocks: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        # No Python for each segment or block: it would take longer than summing four kilobytes.
        if len(blocks) > 1 and blocks.strides[0] == self.length:
            segments = map(blocks.reshape(-1).data.__getitem__, self._slices_of(len(blocks)))
            return _xxh3_each(segments, seeds)
        rows = [
            _xxh3_each(map(block.data.__getitem__, self._slices), row)
            for block, row in zip(blocks, seeds, strict=True)
        ]
        return np.stack(rows) if rows else np.empty(seeds.shape, dtype=np.uint64)

    def _slices_of(self, count: int) -> list[slice]:
        """The segments of `count` blocks that follow each other."""
        found = self._following.get(count)
        if found is None:
            if len(self._following) >= COUNTS_KEPT:
                self._following.clear()
            found = self._following[count] = [
                slice(each.start + shift, each.stop + shift)
                for shift in range(0, count * self.length, self.length)
                for each in self._slices
            ]
        return found

    def _mix64_sums(
        self, blocks: NDArray[np.uint8], seeds: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        sums = np.empty(seeds.shape, dtype=np.uint64)
        for run in self._runs:
            segments = as_strided(
                blocks[:, run.start :],
                shape=(len(blocks), len(run.segments), run.length),
                strides=(blocks.strides[0], run.step, 1),
                writeable=False,
            )
            sums[:, run.segments] = mix64_sums(segments, seeds[:, run.segments])
        return sums


def _xxh3_each(segments: Iterator[memoryview], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sum of each segment under its seed, in the shape of the seeds."""
    sums = map(xxh3_64_intdigest, segments, seeds.ravel().tolist())
    return np.fromiter(sums, dtype=np.uint64, count=seeds.size).reshape(seeds.shape)


def _runs(segments: Sequence[Segment], base: int) -> Iterator[_Run]:
    """The segments of each plane and length, in as few equal distances as they allow."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, segment in enumerate(segments):
        alike.setdefault((segment.plane.role, segment.length), []).append(index)
    for (_, length), indices in alike.items():
        row = [indices[0]]
        step = 0
        for index in indices[1:]:
            distance = segments[index].start - segments[row[-1]].start
            if len(row) > 1 and distance != step:
                yield _Run(segments[row[0]].start - base, step, length, np.array(row))
                row = []
            step = distance if len(row) == 1 else step
            row.append(index)
        yield _Run(segments[row[0]].start - base, step, length, np.array(row))
