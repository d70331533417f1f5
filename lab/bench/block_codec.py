"""Blocks made smaller without loss, as tiers on slow links and disks could keep them.

No tier does so yet: `lab bench compression` measures what it would bring.

The exponents of neighbouring numbers are alike, their fractions are noise. So a block is split into
byte planes: the highest byte of every number, which holds sign and exponent, is compressed by zstd,
the others are kept as they are. A block that would not become smaller is kept whole.

    kept whole   0, block
    planes       1, bytes of a number (u8), length of the frame (u32), zstd frame, other planes

The one rule: whatever bytes come, decoding writes the target and no byte beside it, and takes no
more memory than the block has.
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
_WHOLE, _PLANES = 0, 1
_HEAD = struct.Struct("<BBI")


def encode_block(block: bytes | memoryview, *, item_bytes: int) -> bytes:
    """The block in fewer bytes, or behind one byte if that cannot be.

    Args:
        block: Packed numbers of one size.
        item_bytes: Of a number: 2 for bfloat16, 1 for fp8.

    Raises:
        ValueError: the block is not a whole number of numbers.
    """
    as_int("item_bytes", item_bytes, 1, ITEM_BYTES_MAX)
    raw = np.frombuffer(block, dtype=np.uint8)
    if len(raw) % item_bytes:
        raise ValueError(f"block has {len(raw)} bytes, must be a multiple of {item_bytes}")
    items = raw.reshape(-1, item_bytes)
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(items[:, -1].tobytes())
    others = items[:, :-1].T.tobytes()
    if _HEAD.size + len(frame) + len(others) > len(raw):
        return bytes([_WHOLE]) + raw.tobytes()
    return _HEAD.pack(_PLANES, item_bytes, len(frame)) + frame + others


def decode_block(encoded: bytes | memoryview, target: memoryview) -> None:
    """Writes the block that `encode_block` was given into `target`, which has its length.

    Raises:
        ValueError: it is no block of that length; `target` may have been written.
    """
    stored = memoryview(encoded)
    out = np.frombuffer(target, dtype=np.uint8)
    if stored and stored[0] == _WHOLE and len(stored) == len(out) + 1:
        out[:] = np.frombuffer(stored[1:], dtype=np.uint8)
        return
    if len(stored) < _HEAD.size or stored[0] != _PLANES:
        raise ValueError(f"{len(stored)} bytes are no encoded block of {len(out)}")
    _, item_bytes, frame_bytes = _HEAD.unpack_from(stored)
    if not 1 <= item_bytes <= ITEM_BYTES_MAX or len(out) % item_bytes:
        raise ValueError(f"numbers of {item_bytes} bytes do not make up a block of {len(out)}")
    count = len(out) // item_bytes
    frame, others = stored[_HEAD.size :][:frame_bytes], stored[_HEAD.size + frame_bytes :]
    if len(frame) != frame_bytes or len(others) != count * (item_bytes - 1):
        raise ValueError(f"{len(stored)} bytes are not the planes of a block of {len(out)}")
    items = out.reshape(count, item_bytes)
    items[:, -1] = _highest_bytes(frame, count)
    items[:, :-1] = np.frombuffer(others, dtype=np.uint8).reshape(item_bytes - 1, count).T


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
