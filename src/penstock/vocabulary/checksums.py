"""Cell checksums: 64 bits per cell, bound to the key of the block.

A cell is one layer and one KV head of a block. Each plane of the cell (its K, its V, its
scales) is a *segment* of bytes in canonical order, with a seed of its own made from key,
layer, plane and head; the cell's sum is the sum of its segments' sums. So bytes of another
key, layer, head or plane fail as surely as a flipped bit, and a cell keeps its sum on
whichever rank and in whichever layout it lies. docs/checksums.md is the specification.

| algorithm | computed by                          | sum of a segment                     |
|-----------|--------------------------------------|--------------------------------------|
| `xxh3`    | CPUs                                 | XXH3-64 of the bytes, under the seed |
| `mix64`   | a kernel that copies, in any order   | see `mix64`                          |

The one rule: sums are added by halves, each modulo 2³², in both algorithms. A kernel may
then add 32-bit numbers, and no carry depends on who adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.vocabulary.mix64 import mix64_sums

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

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
    """What stands before a key of so many bytes: a seed is XXH3-64 of both."""
    return _framed(SEED_DOMAIN) + key_bytes.to_bytes(4, "little")


def place_number(*, layer: int, plane: int, head: int) -> int:
    """Layer, plane and head as one number: 24, 8 and 32 bits."""
    for name, value, bits in (("layer", layer, 24), ("plane", plane, 8), ("head", head, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value}, must be from 0 to {(1 << bits) - 1}")
    return layer << 40 | plane << 32 | head


def cell_seed(key: bytes, *, layer: int, plane: int, head: int) -> int:
    """The seed of one segment. `plane` is the number of its role; layer and head are global."""
    place = np.array([place_number(layer=layer, plane=plane, head=head)], dtype=np.uint64)
    return int(cell_seeds([key], place)[0, 0])


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


def cell_sum(data: bytes | bytearray | memoryview, seed: int, algorithm: Algorithm) -> int:
    """The sum of one segment: what one plane adds to a cell."""
    match algorithm:
        case Algorithm.XXH3:
            return xxh3_64_intdigest(data, seed)
        case Algorithm.MIX64:
            segments = np.frombuffer(data, dtype=np.uint8).reshape(1, 1, -1)
            return int(mix64_sums(segments, np.array([[seed]], dtype=np.uint64))[0, 0])


def add_sums(sums: Iterable[int]) -> int:
    """The sum of a cell from the sums of its segments."""
    low = high = 0
    for each in sums:
        low += each
        high += each >> 32
    return (high & 0xFFFF_FFFF) << 32 | low & 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class CellSums:
    """The sums of a block's cells (or of some in a row), in canonical order."""

    raw: bytes
    """Little-endian, eight bytes a cell: as it is written to disk and onto the wire."""

    def __post_init__(self) -> None:
        if not self.raw or len(self.raw) % SUM_BYTES:
            raise ValueError(
                f"raw has {len(self.raw)} bytes, must be a positive multiple of {SUM_BYTES}"
            )

    @classmethod
    def of(cls, values: NDArray[np.uint64]) -> CellSums:
        """The table with these values."""
        return cls(values.astype("<u8", copy=False).tobytes())

    @classmethod
    def from_bytes(cls, raw: bytes, *, cell_count: int) -> CellSums:
        """The table that `to_bytes` wrote, of a block with `cell_count` cells."""
        if len(raw) != cell_count * SUM_BYTES:
            raise ValueError(
                f"raw has {len(raw)} bytes, {cell_count} cells need {cell_count * SUM_BYTES}"
            )
        return cls(raw)

    def to_bytes(self) -> bytes:
        """Eight little-endian bytes a cell."""
        return self.raw

    @property
    def values(self) -> NDArray[np.uint64]:
        """The sums as an array that cannot be written."""
        return np.frombuffer(self.raw, dtype="<u8").astype(np.uint64, copy=False)

    def __len__(self) -> int:
        return len(self.raw) // SUM_BYTES

    def part(self, first: int, count: int) -> CellSums:
        """The sums of `count` cells from `first` on."""
        if first < 0 or count < 1 or first + count > len(self):
            raise ValueError(f"cells {first} to {first + count - 1} must be within {len(self)}")
        return CellSums(self.raw[first * SUM_BYTES : (first + count) * SUM_BYTES])


def _u64(number: int) -> bytes:
    return (number & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")


def _framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content
