"""Planes: where one kind of number (K, V, latent, scale) of one layer lies, and its format.

Penstock never computes with KV; of a number format it needs the size and a name that every
engine spells the same way.

A plane has one entry per block, and inside a block up to three axes: KV head, token and
channel. Each axis has a byte stride, in any order of nesting:

    axes                                    strides of a bf16 plane, 8 heads of 128
    block, token, head, channel             t·2048, 2048, 256, 2
    block, head, token, channel             t·2048, t·256, 256, 2
    head, block, token, channel             t·256, n·t·256, 256, 2
    block, head, channel, token, channel    the channel axis in two parts, outer first

K and V packed into one tensor are two planes whose bytes interleave: the axis that tells
them apart becomes a difference in offset. An *opaque* plane says only how many bytes a
block has, or each head of a block; its `encoding` names what the engine made of them.

The rules:

- A name that is not in the table is refused, because a guessed size would read the wrong bytes.
- Strides are what the tensor said. Nothing here derives a stride from a shape unless the caller
  states that the array is dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.vocabulary.arguments import INT_MAX, require_type, set_ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class DType(Enum):
    """A number format; its value is its name in forms and on the wire."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"
    """NumPy's default; no engine keeps its KV like this."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP8_E8M0 = "fp8_e8m0"
    """Powers of two alone: the scales of microscaling formats."""
    INT8 = "int8"
    UINT8 = "uint8"
    """Plain bytes, also for formats that pack several numbers into one."""

    @property
    def itemsize(self) -> int:
        """How many bytes one number takes."""
        return _ITEMSIZES[self]

    @classmethod
    def parse(cls, name: str) -> DType:
        """The format that `name` means; the names of torch and NumPy are understood too."""
        bare = name.removeprefix("torch.").lower()
        canonical = _ALIASES.get(bare, bare)
        try:
            return cls(canonical)
        except ValueError:
            known = ", ".join(DTYPE_NAMES)
            raise ValueError(f"dtype is {name!r}, must be one of {known}") from None


_ITEMSIZES = {
    DType.BF16: 2,
    DType.FP16: 2,
    DType.FP32: 4,
    DType.FP64: 8,
    DType.FP8_E4M3: 1,
    DType.FP8_E5M2: 1,
    DType.FP8_E8M0: 1,
    DType.INT8: 1,
    DType.UINT8: 1,
}

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e8m0fnu": "fp8_e8m0",
}

DTYPE_NAMES = tuple(sorted({*(each.value for each in DType), *_ALIASES}))
"""Every name that `DType.parse` understands, but for a leading `torch.`."""


class Axis(StrEnum):
    """What one axis of a KV tensor counts."""

    BLOCK = "block"
    HEAD = "head"
    TOKEN = "token"
    CHANNEL = "channel"
    PART = "part"
    """K or V, in a tensor that holds both. Tensors have it; planes do not."""


_CANONICAL_AXES = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)


class PlaneRole(IntEnum):
    """What the numbers of a plane are.

    The number is written into checksum seeds and orders the planes of a cell: a number
    once given stays.
    """

    K = 0
    V = 1
    LATENT = 2
    """The compressed KV of latent attention (MLA), with its rotary part if both lie together."""
    ROPE = 3
    """The rotary part of latent attention, where an engine keeps it apart."""
    K_SCALE = 4
    V_SCALE = 5
    LATENT_SCALE = 6
    INDEX = 7
    """The keys of a sparse-attention indexer."""
    INDEX_SCALE = 8
    STATE = 9
    """The recurrent state of a state-space or linear-attention layer."""
    CONVOLUTION = 10
    """The convolution window of such a layer."""
    OPAQUE = 11
    """Everything a layer has, in an order that the engine alone knows."""

    @property
    def label(self) -> str:
        """Its name in forms and messages."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> PlaneRole:
        """The role that `label` names."""
        for role in cls:
            if role.label == label:
                return role
        raise ValueError(f"role is {label!r}, must be one of {[each.label for each in cls]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One axis of a plane: how many entries, how many bytes apart."""

    axis: Axis
    size: int
    stride: int

    def __post_init__(self) -> None:
        require_type("axis", self.axis, Axis)
        if self.axis is Axis.PART:
            raise ValueError("axis is 'part': describe K and V as two planes (pair_from_strides)")
        set_ints(self, ("size", f"size of the {self.axis} axis", 1, INT_MAX))
        # The stride of an axis with one entry means nothing.
        low = 1 if self.size > 1 else -INT_MAX
        set_ints(self, ("stride", f"stride of the {self.axis} axis", low, INT_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Where one kind of number of one layer lies, block by block.

    `dims` holds one block axis, at most one head axis, and any number of token and channel
    axes; of two axes of one kind, the outer one comes first.
    """

    role: PlaneRole
    dtype: DType
    dims: tuple[Dim, ...]
    buffer: int = 0
    """Which of the layout's buffers holds it."""
    offset: int = 0
    """Bytes from the start of the buffer to the plane's first number."""
    encoding: str = ""
    """Empty: numbers in the order the axes say. Otherwise the name of an opaque encoding, of the
    whole block or, where there is a head axis, of each head by itself."""

    def __post_init__(self) -> None:
        require_type("role", self.role, PlaneRole)
        require_type(f"dtype of plane {self.role.label}", self.dtype, DType)
        require_type(f"encoding of plane {self.role.label}", self.encoding, str)
        set_ints(
            self,
            ("buffer", f"buffer of plane {self.role.label}", 0, INT_MAX),
            ("offset", f"offset of plane {self.role.label}", 0, INT_MAX),
        )
        ordered = sorted(self.dims, key=lambda dim: _CANONICAL_AXES.index(dim.axis))
        object.__setattr__(self, "dims", tuple(ordered))
        self._require_sound_axes()
        if _overlaps_itself(self):
            raise ValueError(
                f"strides of plane {self.role.label} overlap: {_spell(self.dims)} of "
                f"{self.dtype.itemsize} bytes each (strides count bytes, not numbers)"
            )

    def _require_sound_axes(self) -> None:
        counts = {axis: len(self._along(axis)) for axis in _CANONICAL_AXES}
        if counts[Axis.BLOCK] != 1:
            raise ValueError(
                f"plane {self.role.label} has {counts[Axis.BLOCK]} block axes, must have 1"
            )
        if counts[Axis.HEAD] > 1:
            raise ValueError(
                f"plane {self.role.label} has {counts[Axis.HEAD]} head axes, must have at most 1"
            )
        if self.role is PlaneRole.OPAQUE and not self.encoding:
            raise ValueError("encoding of an opaque plane is empty, must name what wrote it")
        if self.encoding and counts[Axis.TOKEN]:
            raise ValueError(
                f"plane {self.role.label} has encoding {self.encoding!r} and yet token axes; an "
                "opaque plane has bytes of a block, or of a block and head, alone"
            )

    def _along(self, axis: Axis) -> tuple[Dim, ...]:
        return tuple(dim for dim in self.dims if dim.axis is axis)

    def _count(self, axis: Axis) -> int:
        return prod(dim.size for dim in self._along(axis))

    @property
    def wide_dims(self) -> tuple[Dim, ...]:
        """The axes with more than one entry: the stride of the others means nothing."""
        return tuple(dim for dim in self.dims if dim.size > 1)

    @property
    def block_count(self) -> int:
        """How many blocks it has room for."""
        return self._count(Axis.BLOCK)

    @property
    def block_stride(self) -> int:
        """Bytes from one block to the next."""
        return self.dims[0].stride

    @property
    def has_heads(self) -> bool:
        """Whether it has a head axis."""
        return bool(self._along(Axis.HEAD))

    @property
    def heads(self) -> int:
        """How many KV heads it has; 1 for a plane without heads."""
        return self._count(Axis.HEAD)

    @property
    def tokens(self) -> int:
        """Token positions in a block; 1 for a plane without a token axis."""
        return self._count(Axis.TOKEN)

    @property
    def channels(self) -> int:
        """Numbers per head and token; for an opaque plane, the bytes of a block, or of one head."""
        return self._count(Axis.CHANNEL)

    @property
    def segment_bytes(self) -> int:
        """Bytes of one block and one head (or of the whole block without heads)."""
        return self.tokens * self.channels * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.heads * self.segment_bytes

    @property
    def block_end(self) -> int:
        """The offset of the first byte behind its first block."""
        reach = sum((dim.size - 1) * dim.stride for dim in self.dims[1:])
        return self.offset + reach + self.dtype.itemsize

    @property
    def end(self) -> int:
        """The offset of the first byte behind its last block."""
        return self.block_end + (self.block_count - 1) * self.block_stride

    def runs(self, block: int, head: int = 0) -> tuple[NDArray[np.int64], int]:
        """Where the bytes of one block and head lie: the offsets of equal runs, and their length.

        Read one after the other, the runs spell token after token, channel after channel.
        """
        if not 0 <= block < self.block_count:
            raise ValueError(f"block is {block}, must be from 0 to {self.block_count - 1}")
        if not 0 <= head < self.heads:
            raise ValueError(f"head is {head}, must be from 0 to {self.heads - 1}")
        offset = self.offset + block * self.block_stride
        if self.has_heads:
            offset += head * self.dims[1].stride
        inner = [dim for dim in self.wide_dims if dim.axis in {Axis.TOKEN, Axis.CHANNEL}]
        run_bytes = self.dtype.itemsize
        while inner and inner[-1].stride == run_bytes:
            run_bytes *= inner.pop().size
        offsets = np.array([offset], dtype=np.int64)
        for dim in inner:
            steps = np.arange(dim.size, dtype=np.int64) * dim.stride
            offsets = np.add.outer(offsets, steps).reshape(-1)
        return offsets, run_bytes

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """The plane's numbers in `buffer`, as unsigned integers of the same size.

        The view has the axes block, head (of size 1 without heads), then every token and
        every channel axis of `dims`. It copies nothing; writing to it writes the buffer.
        """
        if buffer.nbytes < self.end:
            raise ValueError(
                f"buffer {self.buffer} has {buffer.nbytes} bytes, plane {self.role.label} "
                f"needs {self.end}"
            )
        dims = self.dims
        if not self.has_heads:
            dims = (dims[0], Dim(axis=Axis.HEAD, size=1, stride=1), *dims[1:])
        return np.ndarray(
            shape=[dim.size for dim in dims],
            dtype=np.dtype(f"<u{self.dtype.itemsize}"),
            buffer=buffer.data,
            offset=self.offset,
            strides=[dim.stride for dim in dims],
        )


def plane_from_strides(
    role: PlaneRole,
    dtype: DType,
    *,
    shape: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[Axis],
    buffer: int = 0,
    offset: int = 0,
) -> Plane:
    """The plane that a tensor of this shape and these byte strides holds.

    `axes` names the tensor's axes in order. Torch counts strides in numbers: multiply them
    by the item size first.
    """
    _require_equal_lengths(shape, strides, axes)
    dims = tuple(
        Dim(axis=axis, size=size, stride=stride)
        for axis, size, stride in zip(axes, shape, strides, strict=True)
    )
    return Plane(role=role, dtype=dtype, dims=dims, buffer=buffer, offset=offset)


def pair_from_strides(
    dtype: DType,
    *,
    shape: Sequence[int],
    strides: Sequence[int],
    axes: Sequence[Axis],
    buffer: int = 0,
    offset: int = 0,
) -> tuple[Plane, Plane]:
    """The K and V planes of a tensor that holds both, separated by an axis `part` of size 2.

    For K and V side by side in the channels, view the tensor as [..., 2, channel] first.
    """
    _require_equal_lengths(shape, strides, axes)
    parts = [position for position, axis in enumerate(axes) if axis is Axis.PART]
    if len(parts) != 1 or shape[parts[0]] != 2:
        raise ValueError(
            f"axes are {[str(axis) for axis in axes]} with shape {list(shape)}, "
            "must have one part axis, of size 2"
        )
    rest = [position for position in range(len(axes)) if position != parts[0]]
    k, v = (
        plane_from_strides(
            role,
            dtype,
            shape=[shape[position] for position in rest],
            strides=[strides[position] for position in rest],
            axes=[axes[position] for position in rest],
            buffer=buffer,
            offset=offset + part * strides[parts[0]],
        )
        for part, role in enumerate((PlaneRole.K, PlaneRole.V))
    )
    return k, v


def opaque_plane(
    *,
    block_bytes: int,
    block_stride: int,
    block_count: int,
    encoding: str,
    role: PlaneRole = PlaneRole.OPAQUE,
    buffer: int = 0,
    offset: int = 0,
) -> Plane:
    """A plane of which only the bytes of a block and the distance of two blocks are known."""
    dims = (
        Dim(axis=Axis.BLOCK, size=block_count, stride=block_stride),
        Dim(axis=Axis.CHANNEL, size=block_bytes, stride=1),
    )
    return Plane(
        role=role,
        dtype=DType.UINT8,
        dims=dims,
        buffer=buffer,
        offset=offset,
        encoding=encoding,
    )


def dense_strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """The byte strides of an array of this shape without gaps, last axis innermost."""
    strides = [itemsize] * len(shape)
    for position in range(len(shape) - 2, -1, -1):
        strides[position] = strides[position + 1] * shape[position + 1]
    return strides


def planes_overlap(one: Plane, other: Plane) -> bool:
    """Whether two planes share a byte."""
    if one.buffer != other.buffer or one.offset >= other.end or other.offset >= one.end:
        return False
    spans: dict[int, tuple[int, int]] = {}
    for dim in one.wide_dims:
        low, high = spans.get(dim.stride, (0, 0))
        spans[dim.stride] = (low, high + dim.size - 1)
    for dim in other.wide_dims:
        low, high = spans.get(dim.stride, (0, 0))
        spans[dim.stride] = (low - dim.size + 1, high)
    steps = [(stride, low, high) for stride, (low, high) in sorted(spans.items(), reverse=True)]
    distance = one.offset - other.offset
    return _comes_near(distance, steps, one.dtype.itemsize, other.dtype.itemsize)


def _overlaps_itself(plane: Plane) -> bool:
    """Whether two different positions of a plane share a byte."""
    itemsize = plane.dtype.itemsize
    dims = sorted(plane.wide_dims, key=lambda dim: dim.stride, reverse=True)
    for position, dim in enumerate(dims):
        # Of two positions that differ, let this be the widest axis in which they do.
        inner = [(each.stride, 1 - each.size, each.size - 1) for each in dims[position + 1 :]]
        if _comes_near(0, [(dim.stride, 1, dim.size - 1), *inner], itemsize, itemsize):
            return True
    return False


def _comes_near(
    distance: int, steps: Sequence[tuple[int, int, int]], below: int, above: int
) -> bool:
    """Whether whole steps can bring `distance` strictly between `-below` and `above`.

    A step is (stride, fewest, most). Widest first, all but the few counts that the narrower
    steps could still correct are skipped, so nested strides are decided in a few additions.
    """
    if not steps:
        return -below < distance < above
    (stride, fewest, most), *narrower = steps
    down = sum(-low * width for width, low, _ in narrower)
    up = sum(high * width for width, _, high in narrower)
    # Counts with -below < distance + count·stride + [-down, up] < above.
    first = max(fewest, -((distance + below - 1 + up) // stride))
    last = min(most, (above - 1 + down - distance) // stride)
    return any(
        _comes_near(distance + count * stride, narrower, below, above)
        for count in range(first, last + 1)
    )


def _require_equal_lengths(
    shape: Sequence[int], strides: Sequence[int], axes: Sequence[Axis]
) -> None:
    if not len(shape) == len(strides) == len(axes):
        raise ValueError(
            f"shape has {len(shape)} entries, strides {len(strides)}, axes {len(axes)}; "
            "need one of each per axis"
        )


def _spell(dims: Sequence[Dim]) -> str:
    return ", ".join(f"{dim.axis} {dim.size} every {dim.stride}" for dim in dims)
