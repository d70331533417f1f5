"""Layouts: which layers and heads a rank holds, how their KV lies, and parts of a layout.

    Layout ── Group (layers that share block ids) ── Layer ── Plane (K, V, latent, scale …)

A block is cut into *cells*: one block, one layer, one KV head; where there are no heads
(latent attention, opaque blocks), one block and one layer. Cells are what is checksummed,
resharded and handed off.

**Canonical order** of a block: group after group; in it layer after layer, by number; in it
head after head, then what has no heads; in it plane after plane, by role; in it token after
token, channel after channel. A *packed* block is its bytes in that order without gaps, so a
cell, a range of heads and a range of layers are each one run of bytes.

    narrow(layout, cuts)          the same memory, of which only the cuts are seen
    token_window(layout, …)       the same memory, of which only some tokens of a block are seen

Nothing is copied, and block numbers stay what they were. What is seen is a layout like any
other, so it can be packed, copied, summed and moved like one. A cell has the name in it that it
has everywhere, and so, over all of its tokens, the same checksum.

The rules:

- Layers and heads are numbered through the whole model, never through a rank. A cell keeps its
  name, and so its checksum, whichever rank holds it.
- A cut goes along heads, layers and tokens, never through a number whose parts nobody knows. An
  opaque block, or each head of it, is taken whole or not at all.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from penstock.vocabulary.arguments import INT_MAX, as_int, as_tuple, require_type, set_ints
from penstock.vocabulary.planes import (
    Axis,
    Dim,
    DType,
    Plane,
    PlaneRole,
    dense_strides,
    opaque_plane,
    pair_from_strides,
    plane_from_strides,
    planes_overlap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


ALL_HEADS = 0xFFFF_FFFF
"""The head number of a cell whose bytes are the same on every tensor-parallel rank."""
LAYER_NUMBER_MAX = (1 << 24) - 1
"""A checksum seed has 24 bits for the layer."""
HEAD_NUMBER_MAX = ALL_HEADS - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """The KV heads that a rank holds: `count` of the model's `total`, from `first` on."""

    first: int
    count: int
    total: int

    def __post_init__(self) -> None:
        set_ints(
            self,
            ("first", "first of heads", -INT_MAX, INT_MAX),
            ("count", "count of heads", 1, INT_MAX),
            ("total", "total of heads", 1, HEAD_NUMBER_MAX),
        )
        if self.first < 0 or self.first + self.count > self.total:
            raise ValueError(
                f"heads {self.first} to {self.first + self.count - 1} must be within the "
                f"model's {self.total}"
            )

    @classmethod
    def all_of(cls, total: int) -> HeadRange:
        """Every head of a model that has `total`."""
        return cls(first=0, count=total, total=total)

    def __str__(self) -> str:
        return f"{self.first}-{self.first + self.count - 1} of {self.total}"


class GroupKind(Enum):
    """What the layers of a group compute, as far as it decides which blocks they need."""

    ATTENTION = "attention"
    SLIDING = "sliding"
    LATENT = "latent"
    STATE = "state"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The planes of one layer; `number` counts through the whole model.

    Draft layers (of a speculative decoder) are numbered behind the model's own.
    """

    number: int
    planes: tuple[Plane, ...]
    draft: bool = False

    def __post_init__(self) -> None:
        set_ints(self, ("number", "number of the layer", 0, LAYER_NUMBER_MAX))
        if not self.planes:
            raise ValueError(f"layer {self.number} has no planes, must have at least 1")
        roles = [plane.role for plane in self.planes]
        for role in roles:
            if roles.count(role) > 1:
                raise ValueError(f"layer {self.number} has more than one plane {role.label}")
        object.__setattr__(self, "planes", tuple(sorted(self.planes, key=lambda each: each.role)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return sum(plane.block_bytes for plane in self.planes)

    @property
    def headed(self) -> tuple[Plane, ...]:
        """The planes that have KV heads."""
        return tuple(plane for plane in self.planes if plane.has_heads)

    @property
    def headless(self) -> tuple[Plane, ...]:
        """The planes that do not."""
        return tuple(plane for plane in self.planes if not plane.has_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share block ids: a block of the group has bytes in each of them."""

    kind: GroupKind
    layers: tuple[Layer, ...]
    heads: HeadRange | None = None
    """The KV heads this rank holds. `None` says that every rank holds the same bytes."""

    def __post_init__(self) -> None:
        require_type("kind of the group", self.kind, GroupKind)
        if self.heads is not None:
            require_type("heads of the group", self.heads, HeadRange)
        if not self.layers:
            raise ValueError(f"group of kind {self.kind.value} has no layers, must have at least 1")
        layers = sorted(self.layers, key=lambda layer: layer.number)
        for earlier, later in pairwise(layers):
            if earlier.number == later.number:
                raise ValueError(f"layer {later.number} is twice in one group")
        object.__setattr__(self, "layers", tuple(layers))
        if self.kind in {GroupKind.ATTENTION, GroupKind.SLIDING} and self.heads is None:
            raise ValueError(f"heads of a group of kind {self.kind.value} must be given")
        if self.kind is GroupKind.LATENT and self.heads is not None:
            raise ValueError(f"heads of a latent group are {self.heads}, must be None")
        for layer in self.layers:
            for plane in layer.planes:
                self._require_fitting(layer, plane)

    def _require_fitting(self, layer: Layer, plane: Plane) -> None:
        place = f"plane {plane.role.label} of layer {layer.number}"
        if plane.block_count != self.block_count:
            raise ValueError(
                f"{place} has {plane.block_count} blocks, others of its group {self.block_count}"
            )
        if not plane.has_heads:
            return
        held = 0 if self.heads is None else self.heads.count
        if plane.heads != held:
            raise ValueError(f"{place} has {plane.heads} heads, its group has {held}")

    @property
    def block_count(self) -> int:
        """How many blocks it has room for."""
        return self.layers[0].planes[0].block_count

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this group."""
        return sum(layer.block_bytes for layer in self.layers)


BLOCK_TOKEN_HEAD = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)
"""The axes of a KV tensor as most attention kernels write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The bytes that one plane adds to a cell."""

    plane: Plane
    local_head: int
    """Which entry of the plane's head axis; 0 without one."""
    start: int
    """Where it starts in the packed block."""

    @property
    def length(self) -> int:
        return self.plane.segment_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layer and one KV head of a block: the unit that has a checksum."""

    group: int
    layer: int
    head: int
    """The head's number in the model. Without heads, the first head that the group holds, or
    `ALL_HEADS` where every rank holds the same bytes."""
    segments: tuple[Segment, ...]

    @property
    def start(self) -> int:
        """Where it starts in the packed block."""
        return self.segments[0].start

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the KV of one rank lies in memory.

    `split`, `packed_kv`, `mla` and `opaque` describe dense arrays, one or two per layer, that
    the caller allocates that way. For tensors of an engine, build the planes from their own
    strides (`plane_from_strides`, `pair_from_strides`) and the layout from its groups.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    cells: tuple[Cell, ...] = field(init=False, repr=False, compare=False)
    """The cells of a block, in canonical order."""

    def __post_init__(self) -> None:
        set_ints(self, ("block_tokens", "block_tokens", 1, INT_MAX))
        object.__setattr__(self, "groups", as_tuple("groups", self.groups))
        if not self.groups:
            raise ValueError("groups is empty, a layout must have at least 1")
        for index, group in enumerate(self.groups):
            require_type(f"groups[{index}]", group, Group)
        self._require_distinct_planes()
        self._require_dividing_tokens()
        self._require_no_overlap()
        object.__setattr__(self, "cells", tuple(_cells(self.groups)))

    def _require_distinct_planes(self) -> None:
        seen = set()
        for layer in self.layers:
            for plane in layer.planes:
                if (layer.number, plane.role) in seen:
                    raise ValueError(
                        f"plane {plane.role.label} of layer {layer.number} is in two groups; "
                        "draft layers are numbered behind the model's own"
                    )
                seen.add((layer.number, plane.role))

    def _require_dividing_tokens(self) -> None:
        for layer in self.layers:
            for plane in layer.planes:
                if self.block_tokens % plane.tokens:
                    raise ValueError(
                        f"plane {plane.role.label} of layer {layer.number} has {plane.tokens} "
                        f"token positions, must divide block_tokens, {self.block_tokens}"
                    )

    def _require_no_overlap(self) -> None:
        for planes in _planes_by_buffer(self.groups).values():
            planes.sort(key=lambda plane: plane.offset)
            nested = _blocks_follow_each_other(planes)
            for position, plane in enumerate(planes):
                end = plane.block_end if nested else plane.end
                for other in planes[position + 1 :]:
                    if other.offset >= end:
                        break
                    if planes_overlap(plane, other):
                        raise ValueError(
                            f"plane {plane.role.label} from {plane.offset} on and plane "
                            f"{other.role.label} from {other.offset} on overlap in buffer "
                            f"{plane.buffer}"
                        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, in canonical order."""
        return tuple(layer for group in self.groups for layer in group.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all groups."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def block_count(self) -> int:
        """Blocks for which every group has room."""
        return min(group.block_count for group in self.groups)

    @property
    def buffer_bytes(self) -> dict[int, int]:
        """How many bytes each buffer must have at least."""
        by_buffer = sorted(_planes_by_buffer(self.groups).items())
        return {buffer: max(plane.end for plane in planes) for buffer, planes in by_buffer}

    def packed(self, *, block_count: int, slot_bytes: int | None = None) -> Layout:
        """The same blocks in canonical order: one buffer, block after block.

        `slot_bytes` is the distance between two blocks, if it is more than their bytes.
        """
        block_count = as_int("block_count", block_count, 1)
        stride = self.block_bytes if slot_bytes is None else as_int("slot_bytes", slot_bytes)
        if stride < self.block_bytes:
            raise ValueError(
                f"slot_bytes is {slot_bytes}, must be at least a block's {self.block_bytes}"
            )
        block = Dim(axis=Axis.BLOCK, size=block_count, stride=stride)
        planes: dict[tuple[int, int], list[Plane]] = {}
        for cell in self.cells:
            for segment in cell.segments:
                if segment.local_head == 0:
                    planes.setdefault((cell.group, cell.layer), []).append(
                        _packed_plane(segment, cell_bytes=cell.length, block=block)
                    )
        groups = tuple(
            replace(
                group,
                layers=tuple(
                    replace(layer, planes=tuple(planes[position, layer.number]))
                    for layer in group.layers
                ),
            )
            for position, group in enumerate(self.groups)
        )
        return Layout(groups=groups, block_tokens=self.block_tokens)

    @classmethod
    def join(cls, first: Layout, *others: Layout) -> Layout:
        """The groups of several layouts in one; buffers are numbered on from one to the next."""
        groups: list[Group] = []
        shift = 0
        for index, layout in enumerate((first, *others)):
            require_type(f"layouts[{index}]", layout, Layout)
            if layout.block_tokens != first.block_tokens:
                raise ValueError(
                    f"block_tokens is {layout.block_tokens} in one layout and "
                    f"{first.block_tokens} in another, must be the same"
                )
            shifted = partial(_shifted, shift)
            groups += [with_planes(group, shifted) for group in layout.groups]
            shift += max(layout.buffer_bytes) + 1
        return cls(groups=tuple(groups), block_tokens=first.block_tokens)

    @classmethod
    def split(
        cls,
        *,
        layers: Iterable[int],
        heads: HeadRange,
        channels: int,
        dtype: DType,
        block_tokens: int,
        block_count: int,
        order: Sequence[Axis] = BLOCK_TOKEN_HEAD,
        scale_dtype: DType | None = None,
    ) -> Layout:
        """Per layer one dense K and one dense V array; with scales, one more of each.

        Buffers are numbered layer after layer: K, V, scales of K, scales of V. A scale array
        has the axes of `order` but the channel.
        """
        require_type("heads", heads, HeadRange)
        sizes = _sizes(block_count=block_count, block_tokens=block_tokens, channels=channels)
        sizes[Axis.HEAD] = heads.count
        kinds = [(PlaneRole.K, dtype, order), (PlaneRole.V, dtype, order)]
        if scale_dtype is not None:
            axes = [axis for axis in order if axis is not Axis.CHANNEL]
            kinds += [
                (PlaneRole.K_SCALE, scale_dtype, axes),
                (PlaneRole.V_SCALE, scale_dtype, axes),
            ]
        found = tuple(
            Layer(
                number=number,
                planes=tuple(
                    _dense_plane(role, kind, sizes, axes, position * len(kinds) + index)
                    for index, (role, kind, axes) in enumerate(kinds)
                ),
            )
            for position, number in enumerate(as_tuple("layers", layers))
        )
        group = Group(kind=GroupKind.ATTENTION, layers=found, heads=heads)
        return cls(groups=(group,), block_tokens=block_tokens)

    @classmethod
    def packed_kv(
        cls,
        *,
        layers: Iterable[int],
        heads: HeadRange,
        channels: int,
        dtype: DType,
        block_tokens: int,
        block_count: int,
        order: Sequence[Axis] = (Axis.PART, *BLOCK_TOKEN_HEAD),
    ) -> Layout:
        """Per layer one dense array that holds K and V, separated by the axis `part`."""
        require_type("heads", heads, HeadRange)
        require_type("dtype", dtype, DType)
        sizes = _sizes(block_count=block_count, block_tokens=block_tokens, channels=channels)
        sizes |= {Axis.PART: 2, Axis.HEAD: heads.count}
        shape = _shape(sizes, order)
        strides = dense_strides(shape, dtype.itemsize)
        found = tuple(
            Layer(
                number=number,
                planes=pair_from_strides(
                    dtype, shape=shape, strides=strides, axes=order, buffer=position
                ),
            )
            for position, number in enumerate(as_tuple("layers", layers))
        )
        group = Group(kind=GroupKind.ATTENTION, layers=found, heads=heads)
        return cls(groups=(group,), block_tokens=block_tokens)

    @classmethod
    def mla(
        cls,
        *,
        layers: Iterable[int],
        channels: int,
        dtype: DType,
        block_tokens: int,
        block_count: int,
    ) -> Layout:
        """Per layer one dense array [block, token, channel] of latent KV, without heads."""
        axes = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)
        sizes = _sizes(block_count=block_count, block_tokens=block_tokens, channels=channels)
        found = tuple(
            Layer(
                number=number,
                planes=(_dense_plane(PlaneRole.LATENT, dtype, sizes, axes, position),),
            )
            for position, number in enumerate(as_tuple("layers", layers))
        )
        group = Group(kind=GroupKind.LATENT, layers=found)
        return cls(groups=(group,), block_tokens=block_tokens)

    @classmethod
    def opaque(
        cls,
        *,
        layers: Iterable[int],
        block_bytes: int,
        encoding: str,
        block_tokens: int,
        block_count: int,
        block_stride: int | None = None,
        heads: HeadRange | None = None,
    ) -> Layout:
        """Per layer one buffer of blocks of which only their bytes and distance are known."""
        found = tuple(
            Layer(
                number=number,
                planes=(
                    opaque_plane(
                        block_bytes=block_bytes,
                        block_stride=block_bytes if block_stride is None else block_stride,
                        block_count=block_count,
                        encoding=encoding,
                        buffer=position,
                    ),
                ),
            )
            for position, number in enumerate(as_tuple("layers", layers))
        )
        group = Group(kind=GroupKind.OPAQUE, layers=found, heads=heads)
        return cls(groups=(group,), block_tokens=block_tokens)


def _cells(groups: Sequence[Group]) -> Iterator[Cell]:
    start = 0
    for position, group in enumerate(groups):
        first = ALL_HEADS if group.heads is None else group.heads.first
        for layer in group.layers:
            heads = 0 if group.heads is None or not layer.headed else group.heads.count
            parts = [(first + local, local, layer.headed) for local in range(heads)]
            parts += [(first, 0, layer.headless)] if layer.headless else []
            for head, local, planes in parts:
                segments = []
                for plane in planes:
                    segments.append(Segment(plane=plane, local_head=local, start=start))
                    start += plane.segment_bytes
                yield Cell(group=position, layer=layer.number, head=head, segments=tuple(segments))


def _packed_plane(first: Segment, *, cell_bytes: int, block: Dim) -> Plane:
    plane = first.plane
    itemsize = plane.dtype.itemsize
    dims = [block, Dim(axis=Axis.CHANNEL, size=plane.channels, stride=itemsize)]
    if plane.tokens > 1:
        row_bytes = plane.channels * itemsize
        dims.append(Dim(axis=Axis.TOKEN, size=plane.tokens, stride=row_bytes))
    if plane.has_heads:
        dims.append(Dim(axis=Axis.HEAD, size=plane.heads, stride=cell_bytes))
    return replace(plane, dims=tuple(dims), buffer=0, offset=first.start)


def _sizes(*, block_count: int, block_tokens: int, channels: int) -> dict[Axis, int]:
    return {
        Axis.BLOCK: as_int("block_count", block_count, 1),
        Axis.TOKEN: as_int("block_tokens", block_tokens, 1),
        Axis.CHANNEL: as_int("channels", channels, 1),
    }


def _shape(sizes: dict[Axis, int], axes: Sequence[Axis]) -> list[int]:
    for axis in as_tuple("order", axes):
        if not isinstance(axis, Axis) or axis not in sizes:
            known = ", ".join(sizes)
            raise ValueError(f"order has {reprlib.repr(axis)}, must have axes of {known}")
    return [sizes[axis] for axis in axes]


def _dense_plane(
    role: PlaneRole, dtype: DType, sizes: dict[Axis, int], axes: Sequence[Axis], buffer: int
) -> Plane:
    require_type("dtype", dtype, DType)
    shape = _shape(sizes, axes)
    strides = dense_strides(shape, dtype.itemsize)
    return plane_from_strides(role, dtype, shape=shape, strides=strides, axes=axes, buffer=buffer)


def _shifted(shift: int, _layer: Layer, plane: Plane) -> Plane:
    return replace(plane, buffer=plane.buffer + shift)


def with_planes(group: Group, change: Callable[[Layer, Plane], Plane]) -> Group:
    """The same group, with another plane in the place of each."""
    layers = (
        replace(layer, planes=tuple(change(layer, plane) for plane in layer.planes))
        for layer in group.layers
    )
    return replace(group, layers=tuple(layers))


def _planes_by_buffer(groups: Iterable[Group]) -> dict[int, list[Plane]]:
    found: dict[int, list[Plane]] = {}
    for group in groups:
        for layer in group.layers:
            for plane in layer.planes:
                found.setdefault(plane.buffer, []).append(plane)
    return found


def _blocks_follow_each_other(planes: Sequence[Plane]) -> bool:
    """Whether a block of all these planes ends before the next one starts."""
    strides = {plane.block_stride for plane in planes}
    first = min(plane.offset for plane in planes)
    last = max(plane.block_end for plane in planes)
    return len(strides) == 1 and last - first <= strides.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Some layers of a group, and some of its heads."""

    group: int
    """Its position in the layout."""
    layers: tuple[int, ...]
    heads: HeadRange | None
    """`None` where the group has no heads."""


def narrow(layout: Layout, cuts: Sequence[Cut]) -> Layout:
    """The layout with one group for each cut, in their order, and nothing else."""
    groups = tuple(_cut_group(layout, cut) for cut in cuts)
    return Layout(groups=groups, block_tokens=layout.block_tokens)


def token_window(layout: Layout, *, first: int, count: int) -> Layout:
    """The layout of tokens `first` to `first + count` of each block, under the same numbers."""
    if first < 0 or count < 1 or first + count > layout.block_tokens:
        raise ValueError(
            f"window is {count} tokens from {first} on, must be at least 1 and within the "
            f"{layout.block_tokens} of a block"
        )
    windowed = partial(_windowed, layout.block_tokens, first, count)
    groups = tuple(with_planes(group, windowed) for group in layout.groups)
    return Layout(groups=groups, block_tokens=count)


def _cut_group(layout: Layout, cut: Cut) -> Group:
    if not 0 <= cut.group < len(layout.groups):
        raise ValueError(f"group is {cut.group}, must be from 0 to {len(layout.groups) - 1}")
    group = layout.groups[cut.group]
    layers = {layer.number: layer for layer in group.layers}
    missing = [number for number in cut.layers if number not in layers]
    if missing:
        raise ValueError(f"layers {missing} are cut out of group {cut.group}, which has none such")
    _require_heads_within(group, cut)
    return replace(
        group,
        heads=cut.heads,
        layers=tuple(_cut_layer(layers[number], group, cut) for number in cut.layers),
    )


def _require_heads_within(group: Group, cut: Cut) -> None:
    held, wanted = group.heads, cut.heads
    if held is None or wanted is None:
        if held is not wanted:
            raise ValueError(f"heads of the cut are {wanted}, of group {cut.group} {held}")
        return
    within = held.first <= wanted.first and (wanted.first + wanted.count <= held.first + held.count)
    if not within or held.total != wanted.total:
        raise ValueError(f"heads of the cut are {wanted}, must be within {held}")


def _cut_layer(layer: Layer, group: Group, cut: Cut) -> Layer:
    if group.heads is None or cut.heads is None or cut.heads == group.heads:
        return layer
    if layer.headless:
        raise ValueError(
            f"plane {layer.headless[0].role.label} of layer {layer.number} has no heads to cut: "
            f"heads {group.heads} cannot become {cut.heads}"
        )
    skipped = cut.heads.first - group.heads.first
    planes = tuple(_cut_heads(plane, skipped, cut.heads.count) for plane in layer.planes)
    return replace(layer, planes=planes)


def _cut_heads(plane: Plane, skipped: int, count: int) -> Plane:
    head = next(dim for dim in plane.dims if dim.axis is Axis.HEAD)
    return replace(
        plane,
        dims=tuple(replace(dim, size=count) if dim is head else dim for dim in plane.dims),
        offset=plane.offset + skipped * head.stride,
    )


def _windowed(block_tokens: int, first: int, count: int, layer: Layer, plane: Plane) -> Plane:
    if count == block_tokens:
        return plane
    per_position = block_tokens // plane.tokens
    axes = [dim for dim in plane.dims if dim.axis is Axis.TOKEN]
    # Of several token axes only the outermost can be shortened: the others are steps inside it.
    step = per_position * prod(dim.size for dim in axes[1:])
    if not axes or first % step or count % step:
        raise ValueError(
            f"plane {plane.role.label} of layer {layer.number} has a step of {step} tokens, which "
            f"must divide a window of {count} tokens from {first} on"
        )
    outer = axes[0]
    return replace(
        plane,
        dims=tuple(replace(dim, size=count // step) if dim is outer else dim for dim in plane.dims),
        offset=plane.offset + first // step * outer.stride,
    )
