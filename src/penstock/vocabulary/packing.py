"""Copying blocks from one layout into another: packing, unpacking, and plain copies.

Packing is the case in which the target is `layout.packed(...)`. This is the definition that
every faster mover has to agree with, byte for byte. The one rule: bytes that a layout does
not name, such as the gaps between its strides, are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

Buffers = Mapping[int, NDArray[np.uint8]]
"""The bytes of each buffer, by its number in the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Some blocks of a layout, in the order in which they are copied."""

    layout: Layout
    buffers: Buffers
    numbers: Sequence[int]


def copy_blocks(source: Blocks, target: Blocks) -> None:
    """Copies block after block from one layout into another with the same cells."""
    if len(source.numbers) != len(target.numbers):
        raise ValueError(
            f"source has {len(source.numbers)} blocks, target {len(target.numbers)}, "
            "must have as many"
        )
    source_planes = _named_planes(source.layout)
    target_planes = _named_planes(target.layout)
    if [name for name, _ in source_planes] != [name for name, _ in target_planes]:
        raise ValueError("source and target have different cells: their forms differ")
    for (_, read), (_, write) in zip(source_planes, target_planes, strict=True):
        readable = read.view(source.buffers[read.buffer])
        writable = write.view(target.buffers[write.buffer])
        for number, target_number in zip(source.numbers, target.numbers, strict=True):
            writable[target_number] = readable[number].reshape(writable.shape[1:])


def _named_planes(layout: Layout) -> list[tuple[tuple[object, ...], Plane]]:
    """Every plane in canonical order, under all that must be the same in a copy of it."""
    return [
        (
            (
                *(position, group.heads, layer.number, plane.role, plane.dtype, plane.encoding),
                *(plane.has_heads, plane.heads, plane.tokens, plane.channels),
            ),
            plane,
        )
        for position, group in enumerate(layout.groups)
        for layer in group.layers
        for plane in layer.planes
    ]
