"""Packed blocks into the slots of tensors by torch, where the blocks of two engines differ in size.

The pack kernels put blocks away that have the size of their slots. Of other sizes, a packed block
holds several slots or a part of one, and each such window is copied by itself.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.handoff.driver.parts import plane_pairs, windows_of
from penstock.vocabulary.layout import narrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.tiers.tensors import TensorTier
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _TensorPlane(NamedTuple):
    """One plane in its packed block, and in the slots of a tier."""

    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slots: Any

    def packed(self, scratch: Any, count: int, block_bytes: int) -> Any:  # noqa: ANN401
        """The plane in `count` packed blocks, with the axes that it has in the slots."""
        numbers = scratch.view(self.dtype)
        size = self.dtype.itemsize
        view = torch.as_strided(
            numbers,
            (count, *self.shape),
            (block_bytes // size, *self.strides),
            self.offset // size,
        )
        return view.view(count, *self.slots.shape[1:])


class WindowScatter:
    """Puts packed blocks of one form into the slots of a tier, whatever size its blocks have."""

    def __init__(self, route: RouteParts, form: PartForm, tier: TensorTier) -> None:
        assert form.packed is not None
        self._route = route
        self._block_bytes = form.block_bytes
        self._device = tier.device
        target = narrow(tier.layout, form.target_cuts)
        self._windows = [
            _planes(packed, narrowed, tier, form.block_bytes)
            for packed, narrowed in windows_of(form.packed, target)
        ]

    def scatter(self, scratch: Any, count: int, slots: Sequence[int]) -> None:  # noqa: ANN401
        """Copies `count` packed blocks in memory of the tier's device, in torch's stream."""
        numbers = torch.tensor(list(slots), device=self._device)
        for window, pairs in enumerate(self._windows):
            packed_at, slots_at = self._route.window_of(window, count, len(numbers))
            for pair in pairs:
                packed = pair.packed(scratch, count, self._block_bytes)[packed_at]
                pair.slots.index_copy_(0, numbers[slots_at], packed)


def _planes(
    packed: Layout, narrowed: Layout, tier: TensorTier, block_bytes: int
) -> list[_TensorPlane]:
    return [_plane(read, write, tier, block_bytes) for read, write in plane_pairs(packed, narrowed)]


def _plane(packed: Plane, plane: Plane, tier: TensorTier, block_bytes: int) -> _TensorPlane:
    size = plane.dtype.itemsize
    # The axes of `Plane.view`: block, head (of size 1 without heads), tokens, channels.
    here, there = _axes(packed), _axes(plane)
    # Behind planes of smaller numbers a plane may begin anywhere: then its numbers are cut.
    strides = [stride for axes in (here, there) for length, stride in axes if length > 1]
    unit = gcd(size, packed.offset, plane.offset, block_bytes, *strides)
    here, there = ([*axes, (size // unit, unit)] for axes in (here, there))
    dtype = _INTEGERS[unit]
    slots = torch.as_strided(
        tier.numbers(plane.buffer, dtype),
        [length for length, _ in there],
        [stride // unit for _, stride in there],
        plane.offset // unit,
    )
    inner = here[1:]
    return _TensorPlane(
        dtype,
        packed.offset,
        tuple(length for length, _ in inner),
        tuple(stride // unit for _, stride in inner),
        slots,
    )


def _axes(plane: Plane) -> list[tuple[int, int]]:
    axes = [(dim.size, dim.stride) for dim in plane.dims]
    return axes if plane.has_heads else [axes[0], (1, plane.dtype.itemsize), *axes[1:]]
