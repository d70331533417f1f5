"""Parts of layouts: cuts along heads and layers, and windows of tokens."""

from __future__ import annotations

import pytest

from lab.fixtures.extents import cell_extents, cell_positions, plane_extents
from penstock.vocabulary.layout import (
    Cut,
    Group,
    GroupKind,
    HeadRange,
    Layer,
    Layout,
    narrow,
    token_window,
)
from penstock.vocabulary.planes import Axis, DType, PlaneRole, plane_from_strides

LAYOUT = Layout.split(
    layers=range(3),
    heads=HeadRange(first=4, count=4, total=8),
    channels=2,
    dtype=DType.BF16,
    block_tokens=4,
    block_count=2,
)


def test_a_cut_shows_the_same_memory_under_the_same_names() -> None:
    cut = Cut(group=0, layers=(1, 2), heads=HeadRange(first=5, count=2, total=8))

    seen = narrow(LAYOUT, [cut])

    assert [(cell.layer, cell.head) for cell in seen.cells] == [(1, 5), (1, 6), (2, 5), (2, 6)]
    for cell, position in zip(seen.cells, cell_positions(LAYOUT, [cut]), strict=True):
        whole = LAYOUT.cells[position]
        assert (whole.layer, whole.head) == (cell.layer, cell.head)
        assert cell_extents(1, cell) == cell_extents(1, whole)


def test_windows_of_a_block_are_its_bytes_in_their_order() -> None:
    windows = [token_window(LAYOUT, first=first, count=2) for first in (0, 2)]

    for cell, first, second in zip(LAYOUT.cells, windows[0].cells, windows[1].cells, strict=True):
        for plane, halves in zip(
            cell.segments, zip(first.segments, second.segments, strict=True), strict=True
        ):
            whole = plane_extents(plane.plane, 1, plane.local_head)
            parts = [
                extent
                for half in halves
                for extent in plane_extents(half.plane, 1, half.local_head)
            ]
            assert parts == whole


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (3, 2), (0, 5)])
def test_a_window_outside_of_a_block_is_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1 and within the 4 of a block"):
        token_window(LAYOUT, first=first, count=count)


def test_a_window_does_not_go_through_a_step_of_the_inner_token_axis() -> None:
    """Tokens in pairs, as some kernels keep them, can be windowed two by two."""
    plane = plane_from_strides(
        PlaneRole.K,
        DType.BF16,
        shape=(2, 4, 1, 3, 2),
        strides=(48, 12, 2, 4, 2),
        axes=(Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL, Axis.TOKEN),
    )
    group = Group(
        kind=GroupKind.ATTENTION,
        layers=(Layer(number=0, planes=(plane,)),),
        heads=HeadRange.all_of(1),
    )
    layout = Layout(groups=(group,), block_tokens=8)

    window = token_window(layout, first=2, count=4)

    assert window.layers[0].planes[0].offset == 12
    assert window.layers[0].planes[0].tokens == 4
    with pytest.raises(ValueError, match="step of 2 tokens"):
        token_window(layout, first=1, count=4)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut(group=1, layers=(0,), heads=None), "group is 1, must be from 0 to 0"),
        (Cut(group=0, layers=(5,), heads=HeadRange.all_of(4)), r"layers \[5\]"),
        (Cut(group=0, layers=(0,), heads=None), "heads of the cut are None"),
        (Cut(group=0, layers=(0,), heads=HeadRange.all_of(5)), "0-4 of 5, must be within 4-7 of 8"),
    ],
)
def test_a_cut_outside_of_a_layout_is_refused(cut: Cut, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        narrow(LAYOUT, [cut])
