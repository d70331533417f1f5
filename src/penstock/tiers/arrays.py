"""The engine's own KV, as NumPy arrays: the device tier of an engine that runs on the CPU.

The bytes stay the engine's. Penstock reads their shape and strides and never copies the
arrays themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.tiers.linux_memory import give_back_private
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.reshard import Blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class ArrayTier:
    """Blocks that lie in arrays of the engine, as a layout says."""

    medium = "arrays"

    def __init__(self, layout: Layout, arrays: Sequence[NDArray[np.generic]]) -> None:
        self.layout = layout
        self.slot_count = layout.block_count
        self._buffers = {number: _bytes_of(array) for number, array in enumerate(arrays)}
        if layout.buffer_bytes.keys() != self._buffers.keys():
            raise ValueError(
                f"kv has {len(arrays)} arrays, the layout needs one for each of its buffers "
                f"{', '.join(map(str, layout.buffer_bytes))}"
            )
        for buffer, needed in layout.buffer_bytes.items():
            if self._buffers[buffer].nbytes < needed:
                raise ValueError(
                    f"kv[{buffer}] has {self._buffers[buffer].nbytes} bytes, "
                    f"the layout needs {needed}"
                )

    def blocks(self, slots: Sequence[int]) -> Blocks:
        return Blocks(layout=self.layout, buffers=self._buffers, numbers=slots)

    def give_back(self) -> int:
        """Returns all pages to the system; blocks of a layer are zeros when they are read next."""
        return sum(
            give_back_private(buffer.ctypes.data, buffer.nbytes)
            for buffer in self._buffers.values()
        )


def opaque_layout(arrays: Sequence[NDArray[np.generic]], *, block_tokens: int) -> Layout:
    """The layout of arrays, one a layer, of which only the first axis is known: the block."""
    for array in arrays:
        if array.size == 0 or array.ndim == 0:
            raise ValueError(
                f"kv: an array of shape {array.shape} has no blocks; "
                "must have at least one along its first axis"
            )
    shapes = {(array.shape[:1], array[:1].nbytes) for array in arrays}
    if len(shapes) != 1:
        raise ValueError(
            f"kv: {len(arrays)} arrays with blocks of different number or size: "
            "pass layout= to say how they lie"
        )
    first = arrays[0]
    return Layout.opaque(
        layers=range(len(arrays)),
        block_bytes=first[:1].nbytes,
        encoding=f"numpy {first.dtype.str} {first.shape[1:]}",
        block_tokens=block_tokens,
        block_count=first.shape[0],
    )


def _bytes_of(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    if not array.flags.c_contiguous:
        raise ValueError(
            f"kv: an array of shape {array.shape} is not contiguous; pass the whole memory it "
            "is a view of, and layout= to say how the blocks lie in it"
        )
    if not array.flags.writeable:
        raise ValueError(f"kv: an array of shape {array.shape} is read-only, must be writable")
    return array.reshape(-1).view(np.uint8)
