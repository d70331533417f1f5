"""Copies between layouts, over random strides, held against extents and logical arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.extents import block_extents
from penstock.vocabulary.layout import Group, GroupKind, HeadRange, Layer, Layout
from penstock.vocabulary.planes import Axis, Dim, DType, Plane, PlaneRole
from penstock.vocabulary.reshard import Blocks, Buffers, copy_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_COUNT = 3
TOKENS = 4
HEADS = HeadRange(first=1, count=2, total=3)
GAP = 0xEE


@dataclass(frozen=True, slots=True)
class World:
    """A layout with buffers in it, and the numbers that its planes should hold."""

    layout: Layout
    buffers: dict[int, NDArray[np.uint8]]


@st.composite
def planes(draw: st.DrawFn, role: PlaneRole, buffer: int) -> Plane:
    """A plane with axes in any order, gaps between them, some axes in two parts."""
    dtype = draw(st.sampled_from([DType.INT8, DType.BF16, DType.FP32]))
    sizes = [(Axis.BLOCK, BLOCK_COUNT), (Axis.HEAD, HEADS.count)]
    sizes += draw(st.sampled_from([[(Axis.TOKEN, 4)], [(Axis.TOKEN, 2), (Axis.TOKEN, 2)]]))
    sizes += draw(st.sampled_from([[(Axis.CHANNEL, 6)], [(Axis.CHANNEL, 3), (Axis.CHANNEL, 2)]]))
    nesting = draw(st.permutations(range(len(sizes))))
    strides = [0] * len(sizes)
    stride = dtype.itemsize
    for position in nesting:
        stride += draw(st.sampled_from([0, 0, dtype.itemsize, 7]))
        strides[position] = stride
        stride *= sizes[position][1]
    dims = tuple(
        Dim(axis=axis, size=size, stride=stride)
        for (axis, size), stride in zip(sizes, strides, strict=True)
    )
    offset = draw(st.integers(0, 9))
    return Plane(role=role, dtype=dtype, dims=dims, buffer=buffer, offset=offset)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    layers = tuple(
        Layer(
            number=number,
            planes=(
                draw(planes(PlaneRole.K, 2 * index)),
                draw(planes(PlaneRole.V, 2 * index + 1)),
            ),
        )
        for index, number in enumerate(draw(st.sampled_from([[0], [3, 4]])))
    )
    group = Group(kind=GroupKind.ATTENTION, layers=layers, heads=HEADS)
    layout = Layout(groups=(group,), block_tokens=TOKENS)
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    buffers = {buffer: np.full(n, GAP, np.uint8) for buffer, n in layout.buffer_bytes.items()}
    for layer in layout.layers:
        for plane in layer.planes:
            view = plane.view(buffers[plane.buffer])
            view[...] = random.integers(0, np.iinfo(view.dtype).max, view.shape, dtype=view.dtype)
    return World(layout, buffers)


def packed_bytes(world: World, numbers: list[int]) -> NDArray[np.uint8]:
    target = world.layout.packed(block_count=max(1, len(numbers)))
    out = np.zeros((max(1, len(numbers)), target.block_bytes), dtype=np.uint8)
    copy_blocks(
        Blocks(layout=world.layout, buffers=world.buffers, numbers=numbers),
        Blocks(layout=target, buffers={0: out.reshape(-1)}, numbers=range(len(numbers))),
    )
    return out[: len(numbers)]


def spelled(layout: Layout, buffers: Buffers, block: int) -> bytes:
    """The bytes of a block, extent after extent."""
    return b"".join(
        buffers[extent.place][extent.offset : extent.end].tobytes()
        for extent in block_extents(layout, block)
    )


@given(worlds())
def test_packed_blocks_are_what_the_extents_spell(world: World) -> None:
    packed = packed_bytes(world, [2, 0])

    assert packed[0].tobytes() == spelled(world.layout, world.buffers, 2)
    assert packed[1].tobytes() == spelled(world.layout, world.buffers, 0)


@given(worlds())
def test_packed_blocks_are_the_logical_arrays_one_after_the_other(world: World) -> None:
    (packed,) = packed_bytes(world, [1])

    expected = b""
    for layer in world.layout.layers:
        for head in range(HEADS.count):
            for plane in layer.planes:
                # Axes of the view: block, head, tokens, channels.
                expected += plane.view(world.buffers[plane.buffer])[1, head].tobytes()
    assert packed.tobytes() == expected


@given(worlds())
def test_unpacked_blocks_are_as_before_and_gaps_untouched(world: World) -> None:
    packed = packed_bytes(world, [0, 1, 2])
    back = {buffer: np.full_like(content, GAP) for buffer, content in world.buffers.items()}

    copy_blocks(
        Blocks(
            layout=world.layout.packed(block_count=3),
            buffers={0: packed.reshape(-1)},
            numbers=range(3),
        ),
        Blocks(layout=world.layout, buffers=back, numbers=range(3)),
    )

    for buffer, content in world.buffers.items():
        assert np.array_equal(back[buffer], content)


def test_blocks_are_copied_in_the_order_given() -> None:
    layout = Layout.mla(layers=[0], channels=1, dtype=DType.INT8, block_tokens=1, block_count=4)
    source = np.array([10, 11, 12, 13], dtype=np.uint8)
    target = np.zeros(4, dtype=np.uint8)

    copy_blocks(
        Blocks(layout=layout, buffers={0: source}, numbers=[3, 1]),
        Blocks(layout=layout, buffers={0: target}, numbers=[0, 2]),
    )

    assert target.tolist() == [13, 0, 11, 0]


def test_a_copy_needs_equal_cells_and_as_many_blocks() -> None:
    def latent(channels: int) -> Layout:
        return Layout.mla(
            layers=[0], channels=channels, dtype=DType.INT8, block_tokens=1, block_count=4
        )

    source = Blocks(layout=latent(2), buffers={0: np.zeros(8, dtype=np.uint8)}, numbers=[0])
    other = Blocks(layout=latent(1), buffers={0: np.zeros(4, dtype=np.uint8)}, numbers=[0])
    fewer = Blocks(layout=latent(2), buffers=source.buffers, numbers=[])

    with pytest.raises(ValueError, match="their forms differ"):
        copy_blocks(source, other)
    with pytest.raises(ValueError, match="source has 1 block, target 0"):
        copy_blocks(source, fewer)
