"""Blocks made smaller without loss, as tiers on slow links keep them (`compression = "zstd"`).

The exponents of neighbouring numbers are alike, their fractions are noise. So a block is split into
byte planes: the highest byte of every number, which holds sign and exponent, is compressed by zstd,
the others are kept as they are.

    bytes of a number (u8), length of the frame (u32), zstd frame, other planes, bytes left over

The one rule: whatever bytes come, decoding writes the target and no byte beside it, and takes no
more memory than the block has.

Needs the `compression` extra.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from penstock.vocabulary.arguments import as_int

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 1
"""Of zstd. Lower ones find nothing in KV, higher ones nothing more."""
ITEM_BYTES_MAX = 8
ITEM_BYTES_TRIED = (2, 1, 4)
"""Sizes of numbers that `choose_item_bytes` tries; of equals the first."""
SAMPLE_BYTES = 64 << 10
_HEAD = struct.Struct("<BI")


def choose_item_bytes(block: bytes | memoryview) -> int:
    """The size of a block's numbers, as far as it matters here: the one that makes it smallest.

    It is tried, not asked of the layout: an engine's opaque blocks say nothing of their numbers.
    """
    sample = memoryview(block)[:SAMPLE_BYTES]
    sizes = {
        item_bytes: len(encode_block(sample, item_bytes=item_bytes) or sample)
        for item_bytes in ITEM_BYTES_TRIED
    }
    return min(sizes, key=sizes.__getitem__)


def encode_block(block: bytes | memoryview, *, item_bytes: int) -> bytes | None:
    """The block in fewer bytes; `None` if that cannot be."""
    as_int("item_bytes", item_bytes, 1, ITEM_BYTES_MAX)
    raw = np.frombuffer(block, dtype=np.uint8)
    count = len(raw) // item_bytes
    items = raw[: count * item_bytes].reshape(count, item_bytes)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(items[:, -1].tobytes())
    parts = (
        _HEAD.pack(item_bytes, len(frame)),
        frame,
        items[:, :-1].T.tobytes(),
        raw[count * item_bytes :].tobytes(),
    )
    return b"".join(parts) if sum(map(len, parts)) < len(raw) else None


def decode_block(encoded: bytes | memoryview, target: memoryview) -> None:
    """Writes the block that `encode_block` was given into `target`, which has its length.

    Raises `ValueError`: it is no block of that length; `target` may have been written.
    """
    stored = memoryview(encoded)
    out = np.frombuffer(target, dtype=np.uint8)
    if len(stored) < _HEAD.size:
        raise ValueError(f"{len(stored)} bytes are no encoded block of {len(out)}")
    item_bytes, frame_bytes = _HEAD.unpack_from(stored)
    if not 1 <= item_bytes <= ITEM_BYTES_MAX:
        raise ValueError(f"numbers have {item_bytes} bytes, must have 1 to {ITEM_BYTES_MAX}")
    count = len(out) // item_bytes
    frame, rest = stored[_HEAD.size :][:frame_bytes], stored[_HEAD.size + frame_bytes :]
    others = count * (item_bytes - 1)
    if len(frame) != frame_bytes or len(rest) != len(out) - count:
        raise ValueError(f"{len(stored)} bytes are not the planes of a block of {len(out)}")
    items = out[: count * item_bytes].reshape(count, item_bytes)
    items[:, -1] = _highest_bytes(frame, count)
    items[:, :-1] = np.frombuffer(rest[:others], dtype=np.uint8).reshape(item_bytes - 1, count).T
    out[count * item_bytes :] = np.frombuffer(rest[others:], dtype=np.uint8)


def _highest_bytes(frame: memoryview, count: int) -> NDArray[np.uint8]:
    try:
        # What a frame says of its length is checked first: as much memory would be taken.
        if zstandard.get_frame_parameters(frame).content_size != count:
            raise ValueError(f"a frame is not that of {count} bytes")
        plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from None
    if len(plane) != count:
        raise ValueError(f"a frame has {len(plane)} bytes, must have {count}")
    return np.frombuffer(plane, dtype=np.uint8)
