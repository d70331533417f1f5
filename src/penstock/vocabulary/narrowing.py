"""Parts of a layout, as layouts: some of its layers and heads, or some tokens of its blocks.

    narrow(layout, cuts)          the same memory, of which only the cuts are seen
    token_window(layout, …)       the same memory, of which only some tokens of a block are seen

Nothing is copied, and block numbers stay what they were. What is seen is a layout like any
other, so it can be packed, copied, summed and moved like one. A cell has the name in it that it
has everywhere, and so, over all of its tokens, the same checksum.

The one rule: a cut goes along heads, layers and tokens, never through a number whose parts
nobody knows. An opaque block, or each head of it, is taken whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import Axis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.layers import Group, HeadRange, Layer
    from penstock.vocabulary.planes import Plane


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


def cell_positions(layout: Layout, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Where in `layout.cells` the cells of `narrow(layout, cuts)` are: to pick their sums."""
    places = {
        (cell.group, cell.layer, cell.head, cell.segments[0].plane.has_heads): position
        for position, cell in enumerate(layout.cells)
    }
    return tuple(
        places[cuts[cell.group].group, cell.layer, cell.head, cell.segments[0].plane.has_heads]
        for cell in narrow(layout, cuts).cells
    )


def token_window(layout: Layout, *, first: int, count: int) -> Layout:
    """The layout of tokens `first` to `first + count` of each block, under the same numbers."""
    if first < 0 or count < 1 or first + count > layout.block_tokens:
        raise ValueError(
            f"window is {count} tokens from {first} on, must be at least 1 and within the "
            f"{layout.block_tokens} of a block"
        )
    groups = tuple(
        replace(
            group,
            layers=tuple(
                replace(
                    layer,
                    planes=tuple(
                        _windowed(plane, layer, layout.block_tokens, first, count)
                        for plane in layer.planes
                    ),
                )
                for layer in group.layers
            ),
        )
        for group in layout.groups
    )
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


def _windowed(plane: Plane, layer: Layer, block_tokens: int, first: int, count: int) -> Plane:
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
