"""The blocks that are moved beside a loop: 8B-like KV in one piece of device memory.

    slots of the pool   [ saved, scattered │ loaded, scattered │ written by the running steps ]

The pool is one allocation, so that a second process can open it through one CUDA IPC handle.
Blocks of 16 tokens have 2 MiB in 64 planes (32 layers, K and V) of 32 KiB each, anywhere.

The one rule: after every measurement a sample of what was moved is compared with where it
came from, byte by byte, and with sums computed here; before it, that sample was wiped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.checksums import Algorithm, life_salt
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.layers import Group, GroupKind, HeadRange, Layer
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.packing import Blocks, copy_blocks
from penstock.vocabulary.planes import Axis, dense_strides, pair_from_strides

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16
MOVED_BLOCKS = 1024
"""2 GiB each way: more than any cache of the GPU, and long enough between two uses of a slot."""
COPY_BLOCKS = 64
"""Blocks of one operation, 128 MiB: a prompt of a thousand tokens."""
WRITTEN_BLOCKS = 32
"""One a request of the running batch."""
_AXES = (Axis.PART, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)


def pool_layout(
    block_count: int,
    *,
    layers: int = LAYERS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    block_tokens: int = BLOCK_TOKENS,
) -> Layout:
    """Layer after layer in one buffer: each [K and V, blocks, tokens, heads, channels] in bf16."""
    shape = (2, block_count, block_tokens, kv_heads, head_dim)
    strides = dense_strides(shape, DType.BF16.itemsize)
    layer_bytes = 2 * strides[0]
    group = Group(
        kind=GroupKind.ATTENTION,
        heads=HeadRange.all_of(kv_heads),
        layers=tuple(
            Layer(
                number=number,
                planes=pair_from_strides(
                    DType.BF16,
                    shape=shape,
                    strides=strides,
                    axes=_AXES,
                    offset=number * layer_bytes,
                ),
            )
            for number in range(layers)
        ),
    )
    return Layout(groups=(group,), block_tokens=block_tokens)


class PoolSlots:
    """Which slots of the pool are saved, loaded, and written by the steps."""

    def __init__(self, moved: int = MOVED_BLOCKS, written: int = WRITTEN_BLOCKS) -> None:
        self.count = 2 * moved + written
        scattered = np.random.default_rng(1).permutation(2 * moved).astype(np.int32)
        self.saved: NDArray[np.int32] = scattered[:moved]
        self.loaded: NDArray[np.int32] = scattered[moved:]
        self.written: NDArray[np.int32] = np.arange(2 * moved, self.count, dtype=np.int32)
        self.host: NDArray[np.int32] = np.arange(moved, dtype=np.int32)
        """Host slots lie in a row, as a pool gives them while it fills."""


def block_keys(count: int) -> list[bytes]:
    """Names for the blocks."""
    return [number.to_bytes(16, "little") for number in range(count)]


LIFE = 1, 0
"""The incarnation and epoch of the copies that are measured."""


def packed_blocks(layout: Layout, found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks as they would lie in host slots, from the bytes of a pool with these blocks alone."""
    count = layout.block_count
    packed = np.empty(count * layout.block_bytes, dtype=np.uint8)
    copy_blocks(
        Blocks(layout=layout, buffers={0: found.reshape(-1)}, numbers=range(count)),
        Blocks(layout=layout.packed(block_count=count), buffers={0: packed}, numbers=range(count)),
    )
    return packed.reshape(count, -1)


def sums_hold(
    layout: Layout, packed: NDArray[np.uint8], keys: list[bytes], kept: NDArray[np.uint64]
) -> bool:
    """Whether the sums that were kept are those of the packed bytes, computed on the CPU."""
    salt = life_salt(*LIFE)
    found = CellSpan.of(layout).sum_blocks(packed, keys, Algorithm.MIX64, salt=salt)
    return bool(np.array_equal(found, kept))
