"""Layouts: cells in canonical order, the bytes of a block, and what cannot be a layout."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lab.fixtures.extents import Extent, block_extents, cell_extents
from penstock.vocabulary.layout import ALL_HEADS, Group, GroupKind, HeadRange, Layer, Layout
from penstock.vocabulary.planes import (
    Axis,
    DType,
    Plane,
    PlaneRole,
    opaque_plane,
    plane_from_strides,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = HeadRange(first=4, count=2, total=8)
HEAD_FIRST = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)


def split(
    *,
    layers: tuple[int, ...] = (6, 7),
    heads: HeadRange = HEADS,
    order: tuple[Axis, ...] = HEAD_FIRST,
    scale_dtype: DType | None = None,
) -> Layout:
    return Layout.split(
        layers=layers,
        heads=heads,
        channels=8,
        dtype=DType.BF16,
        block_tokens=4,
        block_count=3,
        order=order,
        scale_dtype=scale_dtype,
    )


def mla(*, layers: tuple[int, ...] = (0, 1)) -> Layout:
    return Layout.mla(layers=layers, channels=12, dtype=DType.BF16, block_tokens=4, block_count=5)


def k_plane(*, buffer: int = 0, offset: int = 0, tokens: int = 4, heads: int = 2) -> Plane:
    return plane_from_strides(
        PlaneRole.K,
        DType.BF16,
        shape=(3, tokens, heads, 8),
        strides=(1024, 128, 16, 2),
        axes=(Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
        buffer=buffer,
        offset=offset,
    )


def one_layer(*planes: Plane, block_tokens: int = 4) -> Layout:
    layer = Layer(number=0, planes=planes)
    group = Group(kind=GroupKind.ATTENTION, layers=(layer,), heads=HEADS)
    return Layout(groups=(group,), block_tokens=block_tokens)


def test_bytes_of_a_block_per_plane_layer_group_and_in_all() -> None:
    layout = Layout.join(split(scale_dtype=DType.FP32), mla())

    attention, latent = layout.groups
    assert [plane.block_bytes for plane in attention.layers[0].planes] == [128, 128, 32, 32]
    assert attention.layers[0].block_bytes == 320
    assert (attention.block_bytes, latent.block_bytes) == (640, 192)
    assert layout.block_bytes == 832


def test_cells_come_layer_by_layer_and_head_by_head_with_their_global_numbers() -> None:
    layout = split()

    assert [(cell.layer, cell.head) for cell in layout.cells] == [(6, 4), (6, 5), (7, 4), (7, 5)]
    assert all(
        [s.plane.role for s in cell.segments] == [PlaneRole.K, PlaneRole.V] for cell in layout.cells
    )


def test_a_latent_layer_is_one_cell_that_every_rank_has() -> None:
    layout = mla()

    assert [(cell.layer, cell.head, cell.length) for cell in layout.cells] == [
        (0, ALL_HEADS, 96),
        (1, ALL_HEADS, 96),
    ]


def test_an_opaque_layer_of_a_shard_is_one_cell_named_after_its_first_head() -> None:
    layout = Layout.opaque(
        layers=(0,),
        block_bytes=100,
        block_stride=128,
        encoding="tiles",
        block_tokens=4,
        block_count=3,
        heads=HEADS,
    )

    (cell,) = layout.cells
    assert (cell.head, cell.length) == (4, 100)
    assert cell_extents(2, cell) == [Extent(0, 256, 100)]


def test_planes_without_heads_follow_the_heads_of_their_layer() -> None:
    scale = plane_from_strides(
        PlaneRole.K_SCALE, DType.FP32, shape=(3,), strides=(4,), axes=(Axis.BLOCK,), buffer=1
    )

    layout = one_layer(scale, k_plane())

    assert [(cell.head, cell.start, cell.length) for cell in layout.cells] == [
        (4, 0, 64),
        (5, 64, 64),
        (4, 128, 4),
    ]
    assert [s.plane.role for s in layout.cells[-1].segments] == [PlaneRole.K_SCALE]


def test_cells_fill_the_packed_block_without_gaps() -> None:
    layout = Layout.join(split(scale_dtype=DType.FP16), mla(layers=(8,)))

    cells = layout.cells

    assert cells[0].start == 0
    assert all(one.start + one.length == other.start for one, other in pairwise(cells))
    assert cells[-1].start + cells[-1].length == layout.block_bytes


def test_extents_of_a_cell_follow_the_strides() -> None:
    layout = split(order=(Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL))

    found = cell_extents(1, layout.cells[1])

    k = [Extent(0, 128 + 16 + token * 32, 16) for token in range(4)]
    v = [Extent(1, 128 + 16 + token * 32, 16) for token in range(4)]
    assert found == k + v


def test_a_packed_block_is_one_extent_in_the_order_of_its_cells() -> None:
    layout = Layout.join(split(scale_dtype=DType.FP32), mla(layers=(8,)))

    packed = layout.packed(block_count=2)

    assert block_extents(packed, 1) == [Extent(0, layout.block_bytes, layout.block_bytes)]
    assert [cell_extents(0, cell) for cell in packed.cells] == [
        [Extent(0, cell.start, cell.length)] for cell in layout.cells
    ]
    assert packed.packed(block_count=2) == packed


def test_slots_of_a_packed_layout_may_be_wider_than_a_block() -> None:
    packed = mla().packed(block_count=2, slot_bytes=256)

    assert block_extents(packed, 1) == [Extent(0, 256, 192)]
    assert packed.buffer_bytes == {0: 256 + 192}
    with pytest.raises(ValueError, match="slot_bytes is 191, must be at least a block's 192"):
        mla().packed(block_count=2, slot_bytes=191)


def test_extents_of_a_block_spell_all_its_bytes() -> None:
    layout = Layout.packed_kv(
        layers=(0, 1),
        heads=HEADS,
        channels=8,
        dtype=DType.BF16,
        block_tokens=4,
        block_count=3,
    )

    found = block_extents(layout, 2)

    assert sum(extent.length for extent in found) == layout.block_bytes
    assert {extent.place for extent in found} == {0, 1}
    assert all(extent.end <= layout.buffer_bytes[extent.place] for extent in found)


def test_layers_and_planes_are_ordered_however_they_were_given() -> None:
    layout = split(layers=(7, 6))
    shuffled = replace(
        layout.groups[0],
        layers=tuple(
            replace(layer, planes=layer.planes[::-1]) for layer in layout.groups[0].layers[::-1]
        ),
    )

    assert Layout(groups=(shuffled,), block_tokens=4) == layout


def test_joined_layouts_keep_their_buffers_apart_and_share_the_fewest_blocks() -> None:
    layout = Layout.join(split(), mla())

    assert layout.buffer_bytes == {0: 384, 1: 384, 2: 384, 3: 384, 4: 480, 5: 480}
    assert layout.block_count == 3


def test_draft_layers_are_marked_and_have_numbers_of_their_own() -> None:
    draft = replace(split(layers=(8,)).groups[0].layers[0], draft=True)
    group = Group(kind=GroupKind.ATTENTION, layers=(draft,), heads=HEADS)

    layout = Layout.join(split(), Layout(groups=(group,), block_tokens=4))

    assert [layer.draft for layer in layout.layers] == [False, False, True]
    with pytest.raises(ValueError, match="draft layers are numbered behind the model's own"):
        Layout.join(split(), split(layers=(7,)))


def test_one_layer_may_have_planes_in_two_groups() -> None:
    index = plane_from_strides(
        PlaneRole.INDEX,
        DType.FP8_E4M3,
        shape=(5, 4, 3),
        strides=(12, 3, 1),
        axes=(Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL),
    )
    layers = (Layer(number=0, planes=(index,)),)
    indexer = Layout(groups=(Group(kind=GroupKind.LATENT, layers=layers),), block_tokens=4)

    layout = Layout.join(mla(), indexer)

    assert [(cell.group, cell.layer) for cell in layout.cells] == [(0, 0), (0, 1), (1, 0)]


def test_k_and_v_may_interleave_but_not_overlap() -> None:
    k = k_plane()
    beside = replace(k, role=PlaneRole.V, offset=32)
    across = replace(k, role=PlaneRole.V, offset=17)

    assert one_layer(k, beside).block_bytes == 256
    with pytest.raises(ValueError, match="plane k from 0 on and plane v from 17 on overlap"):
        one_layer(k, across)


def test_blocks_that_interleave_are_told_from_blocks_that_overlap() -> None:
    # [head, block, token, channel]: the heads of a block are far apart.
    heads_outside = split(order=(Axis.HEAD, Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL))
    k, v = heads_outside.groups[0].layers[0].planes

    assert one_layer(k, replace(v, buffer=0, offset=k.end)).block_bytes == 256
    with pytest.raises(ValueError, match="overlap in buffer 0"):
        one_layer(k, replace(v, buffer=0, offset=k.end - 64))


def test_a_scale_for_several_tokens_is_allowed_if_it_comes_out_even() -> None:
    def with_scale(tokens: int) -> Layout:
        scale = plane_from_strides(
            PlaneRole.K_SCALE,
            DType.FP32,
            shape=(3, 2, tokens),
            strides=(64, 32, 4),
            axes=(Axis.BLOCK, Axis.HEAD, Axis.TOKEN),
            buffer=1,
        )
        return one_layer(k_plane(), scale)

    assert with_scale(2).cells[0].length == 64 + 8
    with pytest.raises(ValueError, match="plane k_scale of layer 0 has 3 token positions"):
        with_scale(3)


@pytest.mark.parametrize(
    ("first", "count", "total", "message"),
    [
        (0, 0, 8, "count of heads is 0"),
        (-1, 2, 8, "heads -1 to 0 must be within the model's 8"),
        (7, 2, 8, "heads 7 to 8 must be within the model's 8"),
        (0, 1, 1 << 32, "total of heads is 4294967296"),
    ],
)
def test_heads_that_the_model_does_not_have_are_refused(
    first: int, count: int, total: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HeadRange(first=first, count=count, total=total)


@pytest.mark.parametrize(
    ("kind", "heads", "planes", "message"),
    [
        (GroupKind.ATTENTION, None, (k_plane(),), "heads of a group of kind attention must be"),
        (GroupKind.LATENT, HEADS, (k_plane(),), "heads of a latent group are 4-5 of 8"),
        (GroupKind.STATE, None, (k_plane(),), "plane k of layer 0 has 2 heads, its group has 0"),
        (GroupKind.ATTENTION, HEADS, (k_plane(heads=3),), "has 3 heads, its group has 2"),
        (
            GroupKind.ATTENTION,
            HEADS,
            (
                k_plane(),
                opaque_plane(block_bytes=8, block_stride=8, block_count=4, encoding="t", buffer=1),
            ),
            "plane opaque of layer 0 has 4 blocks, others of its group 3",
        ),
    ],
)
def test_a_group_whose_planes_do_not_fit_is_refused(
    kind: GroupKind, heads: HeadRange | None, planes: tuple[Plane, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Group(kind=kind, layers=(Layer(number=0, planes=planes),), heads=heads)


def test_a_layer_needs_a_number_and_one_plane_of_each_role() -> None:
    with pytest.raises(ValueError, match="number of the layer is -1"):
        Layer(number=-1, planes=(k_plane(),))
    with pytest.raises(ValueError, match="layer 3 has no planes"):
        Layer(number=3, planes=())
    with pytest.raises(ValueError, match="layer 3 has more than one plane k"):
        Layer(number=3, planes=(k_plane(), k_plane(buffer=1)))


def test_empty_groups_and_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="group of kind latent has no layers"):
        Group(kind=GroupKind.LATENT, layers=())
    with pytest.raises(ValueError, match="groups is empty"):
        Layout(groups=(), block_tokens=4)
    with pytest.raises(ValueError, match=r"block_tokens is 0"):
        Layout(groups=mla().groups, block_tokens=0)
    with pytest.raises(ValueError, match=r"block_count is 0"):
        mla().packed(block_count=0)


WRONG_NUMBERS: list[Any] = [None, "4", 4.0, 4.5, math.nan, True, [4], 0, -4, 1j, 2**70]
WRONG: list[Any] = [None, "x", 5, [3.5], object()]
RIGHT: list[Any] = [("encoding", "x"), ("block_stride", None)]
DENSE: dict[str, Any] = {
    "layers": (0, 1),
    "channels": 4,
    "dtype": DType.FP16,
    "block_tokens": 4,
    "block_count": 3,
}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (Layout.split, {**DENSE, "heads": HEADS}),
        (Layout.packed_kv, {**DENSE, "heads": HEADS}),
        (Layout.mla, DENSE),
        (
            Layout.opaque,
            {
                "layers": (0,),
                "block_bytes": 8,
                "encoding": "t",
                "block_tokens": 4,
                "block_count": 3,
                "block_stride": 8,
            },
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(
    make: Callable[..., Layout], arguments: dict[str, Any]
) -> None:
    numpy_ints = {
        name: np.int64(value) if isinstance(value, int) else value
        for name, value in arguments.items()
    }
    assert make(**numpy_ints) == make(**arguments)
    for name, right in arguments.items():
        for wrong in WRONG_NUMBERS if isinstance(right, int) else WRONG:
            if (name, wrong) in RIGHT:
                continue
            with pytest.raises(ValueError, match=r" (is|has) .*must"):
                make(**{**arguments, name: wrong})


def test_a_layout_is_made_of_whole_numbers_and_its_own_parts() -> None:
    layout = mla()
    for wrong in WRONG_NUMBERS:
        with pytest.raises(ValueError, match=r"block_tokens is .*, must be an int"):
            Layout(groups=layout.groups, block_tokens=wrong)
        with pytest.raises(ValueError, match=r"block_count is .*, must be an int"):
            layout.packed(block_count=wrong)
        with pytest.raises(ValueError, match=r"of heads is .*, must be an int"):
            HeadRange(first=0, count=wrong, total=wrong)
    for wrong in WRONG:
        with pytest.raises(ValueError, match="groups"):
            Layout(groups=wrong, block_tokens=4)
        with pytest.raises(ValueError, match=r"layouts\[1\] is .*, must be of class Layout"):
            Layout.join(layout, wrong)
    with pytest.raises(ValueError, match="order has 'x', must have axes of block, token"):
        Layout.split(**DENSE, heads=HEADS, order=["x"])  # type: ignore[list-item]


def test_a_layer_is_in_a_group_once() -> None:
    layers = mla().groups[0].layers

    with pytest.raises(ValueError, match="layer 1 is twice in one group"):
        Group(kind=GroupKind.LATENT, layers=(*layers, layers[1]))


def test_layouts_of_different_blocks_do_not_join() -> None:
    other = Layout.mla(layers=(5,), channels=12, dtype=DType.BF16, block_tokens=8, block_count=5)

    with pytest.raises(ValueError, match=r"block_tokens is 8 in one layout and 4 in another"):
        Layout.join(mla(), other)
