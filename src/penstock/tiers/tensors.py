"""The engine's own KV as torch tensors: the device tier, on a GPU or on the CPU.

    tier = TensorTier.of(
        [
            TensorGroup(
                kind=GroupKind.ATTENTION,
                heads=HeadRange.all_of(8),
                layers=[
                    TensorLayer(number=i, planes=[Held.pair(kv[i], PART_FIRST)])
                    for i in range(32)
                ],
            )
        ],
        block_tokens=16,
    )

| an engine keeps                     | planes of a layer                                   |
|-------------------------------------|-----------------------------------------------------|
| K and V in two tensors              | `Held.of(PlaneRole.K, …)` and `Held.of(PlaneRole.V, …)` |
| K and V in one tensor               | `Held.pair(kv, axes)`, with the axis `part`          |
| scales beside them                  | `Held.of(PlaneRole.K_SCALE, scale, axes)`                 |
| latent KV                           | `Held.of(PlaneRole.LATENT, kv, axes)`                     |
| many layers in one tensor           | any of these, of views: `whole.unbind(0)`            |
| bytes that it alone can read        | `Held.opaque(kv, encoding)`                          |

Views may have any order of axes and any gaps: buffers are the tensors' storages, and where a
plane lies in one is read from the tensor. The one rule: strides are what the tensor said,
never what its shape suggests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from penstock.tiers.linux_memory import give_back_private
from penstock.vocabulary.layout import Group, GroupKind, HeadRange, Layer, Layout, with_planes
from penstock.vocabulary.planes import (
    Axis,
    DType,
    Plane,
    PlaneRole,
    opaque_plane,
    pair_from_strides,
    plane_from_strides,
)
from penstock.vocabulary.reshard import Blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.tiers.base import TakesAgain

PART_FIRST = (Axis.PART, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)
"""K and V in one tensor, as most engines have it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A tensor of one layer, and what its axes count."""

    tensor: torch.Tensor
    role: PlaneRole | None
    """What its numbers are; `None` for K and V together."""
    axes: tuple[Axis, ...]
    dtype: DType
    encoding: str = ""

    @classmethod
    def of(
        cls,
        role: PlaneRole,
        tensor: torch.Tensor,
        axes: Sequence[Axis],
        *,
        dtype: DType | None = None,
    ) -> Held:
        """One plane. `dtype` says what the numbers are, where the tensor has plain bytes."""
        return cls(tensor=tensor, role=role, axes=tuple(axes), dtype=_dtype_of(tensor, dtype))

    @classmethod
    def pair(
        cls, tensor: torch.Tensor, axes: Sequence[Axis] = PART_FIRST, *, dtype: DType | None = None
    ) -> Held:
        """K and V in one tensor, in which the axis `part` separates them."""
        return cls(tensor=tensor, role=None, axes=tuple(axes), dtype=_dtype_of(tensor, dtype))

    @classmethod
    def opaque(
        cls, tensor: torch.Tensor, encoding: str, *, role: PlaneRole = PlaneRole.OPAQUE
    ) -> Held:
        """Blocks along the first axis, each in one run of bytes that only the engine can read."""
        if tensor.ndim == 0 or tensor.numel() == 0:
            raise ValueError(
                f"tensor of shape {list(tensor.shape)} has no blocks, must have at least one "
                "along its first axis"
            )
        if not tensor[0].is_contiguous():
            raise ValueError(
                f"an opaque block of shape {list(tensor.shape[1:])} has strides "
                f"{list(tensor.stride()[1:])}, must lie in one run of bytes"
            )
        return cls(
            tensor=tensor, role=role, axes=(Axis.BLOCK,), dtype=DType.UINT8, encoding=encoding
        )

    def planes(self, buffer: int) -> tuple[Plane, ...]:
        """Where its numbers lie in the buffer that is the tensor's storage."""
        tensor = self.tensor
        itemsize = tensor.element_size()
        offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        strides = [stride * itemsize for stride in tensor.stride()]
        if self.encoding:
            return (
                opaque_plane(
                    block_bytes=tensor[0].numel() * itemsize,
                    block_stride=strides[0],
                    block_count=tensor.shape[0],
                    encoding=self.encoding,
                    role=PlaneRole.OPAQUE if self.role is None else self.role,
                    buffer=buffer,
                    offset=offset,
                ),
            )
        shape, axes = list(tensor.shape), self.axes
        if self.role is None:
            return pair_from_strides(
                self.dtype, shape=shape, strides=strides, axes=axes, buffer=buffer, offset=offset
            )
        return (
            plane_from_strides(
                self.role,
                self.dtype,
                shape=shape,
                strides=strides,
                axes=axes,
                buffer=buffer,
                offset=offset,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorLayer:
    """The tensors of one layer; `number` counts through the whole model."""

    number: int
    planes: Sequence[Held]
    draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorGroup:
    """Layers that share block ids."""

    kind: GroupKind
    layers: Sequence[TensorLayer]
    heads: HeadRange | None = None


class TensorTier:
    """Blocks that lie in tensors of the engine, all on one device.

    On the CPU it is a tier of arrays like any other. On a GPU its bytes have addresses, and
    only a mover that runs there can touch them.
    """

    def __init__(
        self,
        layout: Layout,
        storages: Sequence[torch.UntypedStorage],
        *,
        memory: TakesAgain | None = None,
    ) -> None:
        """A tier whose buffers are these storages, in the order of the layout's buffers.

        Args:
            layout: How blocks lie in them.
            storages: The engine's memory.
            memory: The same, if it is that of a GPU and can be given back while the tier is open.
        """
        if layout.buffer_bytes.keys() != set(range(len(storages))):
            raise ValueError(
                f"kv has {len(storages)} storages, the layout needs one for each of its buffers "
                f"{', '.join(map(str, layout.buffer_bytes))}"
            )
        for buffer, needed in layout.buffer_bytes.items():
            if storages[buffer].nbytes() < needed:
                raise ValueError(
                    f"kv[{buffer}] has {storages[buffer].nbytes()} bytes, the layout needs {needed}"
                )
        devices = {str(storage.device) for storage in storages}
        if len(devices) != 1:
            raise ValueError(f"kv lies on {', '.join(sorted(devices))}, must be on one device")
        self.layout = layout
        self.slot_count = layout.block_count
        self.device = storages[0].device
        self.medium = "arrays" if self.device.type == "cpu" else self.device.type
        # Kept, so that no storage is freed while its address is in use.
        self._storages = list(storages)
        self.memory = memory
        self._buffers: dict[int, NDArray[np.uint8]] = {}
        if self.device.type == "cpu":
            self._buffers = {n: _bytes_of(storage) for n, storage in enumerate(storages)}

    @classmethod
    def of(
        cls,
        groups: Iterable[TensorGroup],
        *,
        block_tokens: int,
        memory: TakesAgain | None = None,
    ) -> TensorTier:
        """The tier of these tensors; their layout is read from them."""
        storages: list[torch.UntypedStorage] = []
        numbers: dict[int, int] = {}

        def buffer_of(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage.data_ptr(), len(storages))
            if number == len(storages):
                storages.append(storage)
            return number

        found = tuple(
            Group(
                kind=group.kind,
                heads=group.heads,
                layers=tuple(
                    Layer(
                        number=layer.number,
                        draft=layer.draft,
                        planes=tuple(
                            plane
                            for held in layer.planes
                            for plane in held.planes(buffer_of(held.tensor))
                        ),
                    )
                    for layer in group.layers
                ),
            )
            for group in groups
        )
        return cls(Layout(groups=found, block_tokens=block_tokens), storages, memory=memory)

    def described_by(self, layout: Layout) -> TensorTier:
        """The same tensors, or those that another layout names, under that layout."""
        named = sorted(layout.buffer_bytes)
        if named != list(range(len(named))):
            layout = _with_buffers(layout, {buffer: at for at, buffer in enumerate(named)})
        return TensorTier(layout, [self._storages[each] for each in named], memory=self.memory)

    @property
    def addresses(self) -> Mapping[int, int]:
        """Where each buffer starts, in the address space that the process shares with its GPUs."""
        return {number: storage.data_ptr() for number, storage in enumerate(self._storages)}

    def numbers(self, buffer: int, dtype: torch.dtype) -> torch.Tensor:
        """All of a buffer, as numbers of one type, for copies by torch."""
        storage = self._storages[buffer]
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage)

    def blocks(self, slots: Sequence[int]) -> Blocks:
        """The bytes of some slots, for reading or writing by the CPU."""
        if not self._buffers:
            raise ValueError(f"kv lies on {self.device}, must be on the CPU to be read there")
        return Blocks(layout=self.layout, buffers=self._buffers, numbers=slots)

    def give_back(self) -> int:
        """Returns all pages to the system; blocks are zeros when they are read next."""
        if not self._buffers:
            raise ValueError("only all blocks of an engine on the CPU are given back")
        return sum(
            give_back_private(buffer.ctypes.data, buffer.nbytes)
            for buffer in self._buffers.values()
        )


def _dtype_of(tensor: torch.Tensor, given: DType | None) -> DType:
    dtype = DType.parse(str(tensor.dtype)) if given is None else given
    if dtype.itemsize != tensor.element_size():
        raise ValueError(
            f"dtype is {dtype.value} of {dtype.itemsize} bytes, the tensor has numbers of "
            f"{tensor.element_size()} ({tensor.dtype})"
        )
    return dtype


def _bytes_of(storage: torch.UntypedStorage) -> NDArray[np.uint8]:
    view = torch.empty(0, dtype=torch.uint8).set_(storage)
    array: NDArray[np.uint8] = view.numpy()
    return array


def _with_buffers(layout: Layout, numbers: Mapping[int, int]) -> Layout:
    """The same layout, with other numbers for its buffers."""

    def renumbered(_layer: Layer, plane: Plane) -> Plane:
        return replace(plane, buffer=numbers[plane.buffer])

    groups = tuple(with_planes(group, renumbered) for group in layout.groups)
    return Layout(groups=groups, block_tokens=layout.block_tokens)
