"""What was learned of a tier, as a few KiB of bytes that outlive the process.

    magic "PSCURVES", version, classes, ages   14 bytes, little-endian
    counts                                     zlib; 2 bytes each, the logarithm of one plus it
    sum                                        XXH3-64 of all before it

The counts are those of blocks that came back and that did not, by class and age, then what is
usual. They are a start and no more: blocks leave by last use until the traffic of this process has
shown that they are right.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAVED_BYTES_MAX = 1 << 17
"""Twice what counts without any regularity take."""
_HEAD = struct.Struct("<8sHHH")
_SUM = struct.Struct("<Q")
_MAGIC = b"PSCURVES"
_VERSION = 1
_STEPS_PER_OCTAVE = 256
_OCTAVES_MAX = 48
"""A tier never counts more blocks than this power of two: old counts decay."""


def encode_counts(counts: NDArray[np.float64], classes: int, ages: int) -> bytes:
    """Counts as bytes, each to a third of a percent."""
    octaves = np.minimum(np.log2(1 + counts), _OCTAVES_MAX)
    steps = np.rint(octaves * _STEPS_PER_OCTAVE).astype("<u2")
    written = _HEAD.pack(_MAGIC, _VERSION, classes, ages) + zlib.compress(steps.tobytes(), 9)
    return written + _SUM.pack(xxh3_64_intdigest(written))


def decode_counts(data: bytes, classes: int, ages: int, size: int) -> NDArray[np.float64]:
    """The counts that were written.

    Raises `ValueError`: they are damaged, or of another version; it says which.
    """
    if len(data) < _HEAD.size + _SUM.size:
        raise ValueError(f"it has {len(data)} bytes, fewer than a head")
    magic, *shape = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("it does not begin as a file of curves does")
    if shape != [_VERSION, classes, ages]:
        wanted = f"{_VERSION} with {classes} classes and {ages} ages"
        found = f"{shape[0]} with {shape[1]} classes and {shape[2]} ages"
        raise ValueError(f"it is of version {found}, must be of version {wanted}")
    written, (expected,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if xxh3_64_intdigest(written) != expected:
        raise ValueError("its sum is wrong")
    inflate = zlib.decompressobj()
    try:
        # No more than is wanted: a small file may claim to be a large one.
        plain = inflate.decompress(written[_HEAD.size :], 2 * size + 1)
    except zlib.error as error:
        raise ValueError(f"its counts cannot be read: {error}") from error
    if len(plain) != 2 * size or not inflate.eof:
        raise ValueError(f"it does not have {size} counts")
    steps = np.frombuffer(plain, dtype="<u2")
    if steps.max(initial=0) > _OCTAVES_MAX * _STEPS_PER_OCTAVE:
        raise ValueError("it has counts that no tier reaches")
    counts: NDArray[np.float64] = np.exp2(steps / _STEPS_PER_OCTAVE) - 1
    return counts
