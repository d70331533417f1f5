"""Planes: strides in any order, read from the tensor, and refused where they cannot be."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.vocabulary.planes import (
    Axis,
    Dim,
    DType,
    Plane,
    PlaneRole,
    opaque_plane,
    pair_from_strides,
    plane_from_strides,
    planes_overlap,
)

BLOCK_TOKEN_HEAD = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)


def bytes_of(plane_dims: tuple[Dim, ...], offset: int, itemsize: int) -> list[int]:
    """The address of every byte of a plane, by counting through its axes."""
    return [
        offset + sum(index * dim.stride for index, dim in zip(place, plane_dims, strict=True)) + b
        for place in product(*(range(dim.size) for dim in plane_dims))
        for b in range(itemsize)
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "itemsize"),
    [
        ("bf16", DType.BF16, 2),
        ("torch.bfloat16", DType.BF16, 2),
        ("float16", DType.FP16, 2),
        ("torch.float8_e4m3fn", DType.FP8_E4M3, 1),
        ("float32", DType.FP32, 4),
        ("int8", DType.INT8, 1),
    ],
)
def test_the_names_that_engines_use_are_understood(name: str, dtype: DType, itemsize: int) -> None:
    assert DType.parse(name) is dtype
    assert dtype.itemsize == itemsize


def test_an_unknown_dtype_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"dtype is 'int3', must be one of bf16, bfloat16, "):
        DType.parse("int3")


def test_a_role_is_found_by_its_label() -> None:
    assert all(PlaneRole.of(role.label) is role for role in PlaneRole)
    with pytest.raises(ValueError, match="role is 'keys', must be one of"):
        PlaneRole.of("keys")


def test_a_plane_has_the_strides_of_its_array() -> None:
    array = np.arange(4 * 3 * 2 * 8, dtype=np.uint16).reshape(4, 3, 2, 8)
    turned = array.transpose(0, 2, 1, 3)

    plane = plane_from_strides(
        PlaneRole.K,
        DType.BF16,
        shape=turned.shape,
        strides=turned.strides,
        axes=(Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL),
    )

    assert np.array_equal(plane.view(array.reshape(-1).view(np.uint8)), turned)
    assert (plane.block_count, plane.heads, plane.tokens, plane.channels) == (4, 2, 3, 8)
    assert (plane.segment_bytes, plane.block_bytes, plane.end) == (48, 96, array.nbytes)


def test_runs_are_as_long_as_the_strides_allow() -> None:
    def runs_of(axes: tuple[Axis, ...], shape: tuple[int, ...]) -> tuple[list[int], int]:
        array = np.zeros(shape, dtype=np.uint16)
        plane = plane_from_strides(
            PlaneRole.K, DType.BF16, shape=shape, strides=array.strides, axes=axes
        )
        offsets, run_bytes = plane.runs(1, 1)
        return offsets.tolist(), run_bytes

    token_outer = runs_of(BLOCK_TOKEN_HEAD, (4, 3, 2, 8))
    head_outer = runs_of((Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL), (4, 2, 3, 8))
    channel_outer = runs_of((Axis.BLOCK, Axis.HEAD, Axis.CHANNEL, Axis.TOKEN), (4, 2, 2, 3))

    assert token_outer == ([96 + 16, 96 + 48, 96 + 80], 16)
    assert head_outer == ([96 + 48], 48)
    # Tokens are canonical before channels, here they lie closer: every number is its own run.
    assert channel_outer == ([36, 42, 38, 44, 40, 46], 2)


def test_a_channel_axis_in_two_parts_counts_outer_first() -> None:
    # [block, head, channel / 4, token, 4], as some decode kernels want their keys.
    array = np.arange(1 * 1 * 2 * 3 * 4, dtype=np.uint16).reshape(1, 1, 2, 3, 4)
    axes = (Axis.BLOCK, Axis.HEAD, Axis.CHANNEL, Axis.TOKEN, Axis.CHANNEL)
    plane = plane_from_strides(
        PlaneRole.K, DType.BF16, shape=array.shape, strides=array.strides, axes=axes
    )

    offsets, run_bytes = plane.runs(0, 0)

    assert plane.channels == 8
    assert run_bytes == 8
    assert offsets.tolist() == [0, 24, 8, 32, 16, 40]


def test_the_token_axis_of_a_block_made_of_smaller_blocks() -> None:
    # Three kernel blocks of 2 tokens make one block of 6; K and V alternate.
    array = np.arange(2 * 3 * 2 * 2 * 4, dtype=np.uint16).reshape(2, 3, 2, 2, 4)
    axes = (Axis.BLOCK, Axis.TOKEN, Axis.PART, Axis.TOKEN, Axis.CHANNEL)

    k, v = pair_from_strides(DType.BF16, shape=array.shape, strides=array.strides, axes=axes)

    raw = array.reshape(-1).view(np.uint8)
    assert k.tokens == 6
    assert np.array_equal(k.view(raw)[:, 0], array[:, :, 0])
    assert np.array_equal(v.view(raw)[:, 0], array[:, :, 1])


def test_k_and_v_in_one_tensor_become_two_planes_that_interleave() -> None:
    array = np.arange(2 * 4 * 3 * 2 * 8, dtype=np.uint16).reshape(2, 4, 3, 2, 8)
    axes = (Axis.PART, *BLOCK_TOKEN_HEAD)

    k, v = pair_from_strides(DType.BF16, shape=array.shape, strides=array.strides, axes=axes)

    raw = array.reshape(-1).view(np.uint8)
    assert (k.role, v.role) == (PlaneRole.K, PlaneRole.V)
    assert np.array_equal(k.view(raw), array[0].transpose(0, 2, 1, 3))
    assert np.array_equal(v.view(raw), array[1].transpose(0, 2, 1, 3))
    assert not planes_overlap(k, v)


def test_a_pair_needs_one_axis_of_two_parts() -> None:
    with pytest.raises(ValueError, match="must have one part axis, of size 2"):
        pair_from_strides(
            DType.BF16,
            shape=(3, 4, 8),
            strides=(64, 16, 2),
            axes=(Axis.PART, Axis.BLOCK, Axis.CHANNEL),
        )


def test_an_opaque_plane_knows_bytes_and_nothing_else() -> None:
    plane = opaque_plane(block_bytes=100, block_stride=128, block_count=3, encoding="tiles")

    offsets, run_bytes = plane.runs(2)

    assert plane.encoding
    assert not plane.has_heads
    assert (offsets.tolist(), run_bytes) == ([256], 100)
    assert plane.end == 356


def test_an_opaque_plane_may_know_the_bytes_of_each_head() -> None:
    plane = Plane(
        role=PlaneRole.OPAQUE,
        dtype=DType.UINT8,
        dims=dims((Axis.BLOCK, 3, 64), (Axis.HEAD, 4, 16), (Axis.CHANNEL, 16, 1)),
        encoding="tiles",
    )

    offsets, run_bytes = plane.runs(2, head=3)

    assert (offsets.tolist(), run_bytes) == ([176], 16)
    assert plane.block_bytes == 64


def dims(*axes: tuple[Axis, int, int]) -> tuple[Dim, ...]:
    return tuple(Dim(axis=axis, size=size, stride=stride) for axis, size, stride in axes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": dims((Axis.CHANNEL, 8, 2))}, "plane k has 0 block axes, must have 1"),
        (
            {"dims": dims((Axis.BLOCK, 2, 64), (Axis.HEAD, 2, 32), (Axis.HEAD, 2, 16))},
            "plane k has 2 head axes, must have at most 1",
        ),
        ({"dims": dims((Axis.BLOCK, 2, 64)), "offset": -2}, "offset of plane k is -2"),
        ({"dims": dims((Axis.BLOCK, 2, 64)), "buffer": -1}, "buffer of plane k is -1"),
        (
            {"dims": dims((Axis.BLOCK, 2, 16), (Axis.CHANNEL, 16, 2))},
            "strides of plane k overlap: block 2 every 16, channel 16 every 2",
        ),
        (
            {"dims": dims((Axis.BLOCK, 2, 16), (Axis.CHANNEL, 16, 1))},
            "(strides count bytes, not numbers)",
        ),
        (
            {"dims": dims((Axis.BLOCK, 2, 64), (Axis.TOKEN, 2, 8)), "encoding": "tiles"},
            "plane k has encoding 'tiles' and yet token axes",
        ),
        (
            {"dims": dims((Axis.BLOCK, 2, 64)), "role": PlaneRole.OPAQUE},
            "encoding of an opaque plane is empty",
        ),
    ],
)
def test_a_plane_that_cannot_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plane(**({"role": PlaneRole.K, "dtype": DType.BF16} | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axis", "size", "stride", "message"),
    [
        (Axis.TOKEN, 0, 2, "size of the token axis is 0"),
        (Axis.HEAD, 2, -2, "stride of the head axis is -2"),
        (Axis.HEAD, 2, 0, "stride of the head axis is 0"),
        (Axis.PART, 2, 2, "describe K and V as two planes"),
    ],
)
def test_an_axis_that_cannot_be_is_refused(
    axis: Axis, size: int, stride: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Dim(axis=axis, size=size, stride=stride)


def test_shape_strides_and_axes_must_match() -> None:
    with pytest.raises(ValueError, match="shape has 2 entries, strides 2, axes 1"):
        plane_from_strides(
            PlaneRole.K, DType.BF16, shape=(2, 8), strides=(16, 2), axes=(Axis.BLOCK,)
        )


def test_a_view_needs_the_whole_buffer() -> None:
    plane = opaque_plane(block_bytes=8, block_stride=8, block_count=2, encoding="tiles")

    with pytest.raises(ValueError, match="buffer 0 has 15 bytes, plane opaque needs 16"):
        plane.view(np.zeros(15, dtype=np.uint8))


@pytest.mark.parametrize(("block", "head"), [(4, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_block_or_head_that_is_not_there_has_no_runs(block: int, head: int) -> None:
    plane = Plane(
        role=PlaneRole.K, dtype=DType.BF16, dims=dims((Axis.BLOCK, 4, 4), (Axis.HEAD, 2, 2))
    )

    with pytest.raises(ValueError, match="must be from 0 to"):
        plane.runs(block, head)


sizes_and_strides = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4
)


def as_dims(found: list[tuple[int, int]]) -> tuple[Dim, ...]:
    axes = [Axis.BLOCK, *[Axis.CHANNEL] * (len(found) - 1)]
    return dims(*((axis, *each) for axis, each in zip(axes, found, strict=True)))


@given(sizes_and_strides, st.sampled_from([DType.INT8, DType.BF16, DType.FP32]))
def test_a_plane_is_refused_exactly_if_two_of_its_numbers_overlap(
    found: list[tuple[int, int]], dtype: DType
) -> None:
    addresses = bytes_of(as_dims(found), 0, dtype.itemsize)
    overlaps = len(set(addresses)) < len(addresses)

    with pytest.raises(ValueError, match="overlap") if overlaps else nullcontext():
        Plane(role=PlaneRole.K, dtype=dtype, dims=as_dims(found))


@given(
    sizes_and_strides,
    st.integers(0, 60),
    sizes_and_strides,
    st.integers(0, 60),
    st.sampled_from([DType.INT8, DType.FP32]),
)
def test_two_planes_overlap_exactly_if_they_share_a_byte(
    first: list[tuple[int, int]],
    first_offset: int,
    second: list[tuple[int, int]],
    second_offset: int,
    dtype: DType,
) -> None:
    first_bytes = bytes_of(as_dims(first), first_offset, dtype.itemsize)
    second_bytes = bytes_of(as_dims(second), second_offset, 2)
    assume(len(set(first_bytes)) == len(first_bytes))
    assume(len(set(second_bytes)) == len(second_bytes))
    one = Plane(role=PlaneRole.K, dtype=dtype, dims=as_dims(first), offset=first_offset)
    other = Plane(role=PlaneRole.V, dtype=DType.BF16, dims=as_dims(second), offset=second_offset)

    shared = set(first_bytes) & set(second_bytes)

    assert planes_overlap(one, other) == planes_overlap(other, one) == bool(shared)
