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

from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

Buffers = Mapping[int, NDArray[np.uint8]]
"""The bytes of each buffer, by its number in the layout."""


_SMALL_BYTES = 16_384
"""Of a plane's block. Copying less than this takes no longer than calling for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Some blocks of a layout, in the order in which they are copied."""

    layout: Layout
    buffers: Buffers
    numbers: Sequence[int]


class BlockCopier:
    """Copies blocks between two layouts with the same cells, prepared once.

    `group` restricts it to one KV group, whose blocks may lie under other numbers than those
    of the other groups.
    """

    def __init__(
        self,
        source: Layout,
        source_buffers: Buffers,
        target: Layout,
        target_buffers: Buffers,
        *,
        group: int | None = None,
    ) -> None:
        source_planes = _named_planes(source, group)
        target_planes = _named_planes(target, group)
        if [name for name, _ in source_planes] != [name for name, _ in target_planes]:
            raise ValueError("source and target have different cells: their forms differ")
        self._views = [
            (read.view(source_buffers[read.buffer]), write.view(target_buffers[write.buffer]))
            for (_, read), (_, write) in zip(source_planes, target_planes, strict=True)
        ]

    def copy(self, numbers: Sequence[int], target_numbers: Sequence[int]) -> None:
        if len(numbers) != len(target_numbers):
            raise ValueError(
                f"source has {counted(len(numbers), 'block')}, target {len(target_numbers)}, "
                "must have as many"
            )
        for readable, writable in self._views:
            shape = writable.shape[1:]
            if len(numbers) > 1 and readable[:1].nbytes < _SMALL_BYTES:
                # Two copies, but two calls for all blocks instead of two for each.
                found = readable[list(numbers)]
                writable[list(target_numbers)] = found.reshape(len(numbers), *shape)
                continue
            for number, target_number in zip(numbers, target_numbers, strict=True):
                writable[target_number] = readable[number].reshape(shape)


def copy_blocks(source: Blocks, target: Blocks) -> None:
    """Copies block after block from one layout into another with the same cells."""
    copier = BlockCopier(source.layout, source.buffers, target.layout, target.buffers)
    copier.copy(source.numbers, target.numbers)


def _named_planes(
    layout: Layout, only: int | None = None
) -> list[tuple[tuple[object, ...], Plane]]:
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
        if only is None or position == only
        for layer in group.layers
        for plane in layer.planes
    ]
