"""Grids: how a transfer is cut into parts, and which of them are computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.handoff.protocol.grid import (
    PART_BLOCKS_MAX,
    PART_COUNT_MAX,
    Grid,
    cut,
    from_bytes,
    to_bytes,
)

grids = st.builds(
    Grid,
    layer_first=st.integers(0, 3),
    layer_count=st.integers(1, 5),
    block_first=st.integers(0, 3),
    block_count=st.integers(1, 6),
    part_layers=st.integers(1, 6),
    part_blocks=st.integers(1, 7),
    block_tokens=st.integers(1, 4),
)


@given(grids)
def test_every_cell_lies_in_exactly_one_part(grid: Grid) -> None:
    cells = [
        (layer, block)
        for part in range(grid.part_count)
        for layer in grid.layers_of(part)
        for block in grid.blocks_of(part)
    ]

    assert sorted(cells) == [
        (grid.layer_first + layer, grid.block_first + block)
        for layer in range(grid.layer_count)
        for block in range(grid.block_count)
    ]


@given(grids, st.lists(st.integers(0, 40), min_size=9, max_size=9), st.integers(0, 3))
def test_a_part_is_ready_when_all_its_cells_are(grid: Grid, marks: list[int], short: int) -> None:
    end = (grid.block_first + grid.block_count) * grid.block_tokens
    token_count = max(1, end - min(short, grid.block_tokens - 1))
    watermarks = tuple(min(mark, token_count) for mark in marks)

    ready = grid.ready(watermarks, 0, token_count)

    assert ready == sum(
        1 << part
        for part in range(grid.part_count)
        if all(
            watermarks[layer] >= min((block + 1) * grid.block_tokens, token_count)
            for layer in grid.layers_of(part)
            for block in grid.blocks_of(part)
        )
    )


@given(st.sets(st.integers(0, 300)))
def test_a_set_of_parts_survives_the_way(parts: set[int]) -> None:
    number = sum(1 << part for part in parts)

    assert from_bytes(to_bytes(number)) == number


@given(
    layers=st.integers(1, 40),
    blocks=st.integers(1, 300),
    cell_bytes=st.integers(1, 2000),
    berth_bytes=st.integers(2000, 20_000),
    part_bytes_min=st.integers(0, 30_000),
)
def test_a_cut_fits_its_berths_and_loses_nothing(
    layers: int, blocks: int, cell_bytes: int, berth_bytes: int, part_bytes_min: int
) -> None:
    grid = cut(
        layers=range(3, 3 + layers),
        blocks=range(5, 5 + blocks),
        cell_bytes=cell_bytes,
        block_tokens=16,
        berth_bytes=berth_bytes,
        part_bytes_min=part_bytes_min,
    )

    sizes = [
        len(grid.layers_of(part)) * len(grid.blocks_of(part)) * cell_bytes
        for part in range(grid.part_count)
    ]
    assert max(sizes) == grid.part_bytes <= berth_bytes
    assert sum(sizes) == layers * blocks * cell_bytes
    assert not grid.problem()


def test_a_layer_of_good_size_is_a_part_of_its_own() -> None:
    # An 8B-like model: 32 layers, blocks of 16 tokens with 64 KiB a layer, a prompt of 640 tokens.
    grid = cut(
        layers=range(32),
        blocks=range(40),
        cell_bytes=65_536,
        block_tokens=16,
        berth_bytes=4 << 20,
    )

    assert (grid.part_layers, grid.part_blocks, grid.part_count) == (1, 40, 32)


def test_a_part_has_no_more_blocks_than_a_gpu_has_tables_for() -> None:
    # One head of an 8B-like model: 8 KiB a block and layer, a prompt of 40,000 tokens.
    grid = cut(
        layers=range(32), blocks=range(2500), cell_bytes=8192, block_tokens=16, berth_bytes=16 << 20
    )

    assert (grid.part_layers, grid.part_blocks, grid.part_count) == (1, PART_BLOCKS_MAX, 96)


def test_tiny_layers_travel_together() -> None:
    grid = cut(
        layers=range(32), blocks=range(1), cell_bytes=65_536, block_tokens=16, berth_bytes=4 << 20
    )

    assert (grid.part_layers, grid.part_count) == (16, 2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cell_bytes": 4097}, "cell_bytes is 4097, must be at most berth_bytes 4096"),
        ({"layers": range(0)}, "nothing to cut"),
        ({"blocks": range(3, 3)}, "nothing to cut"),
    ],
)
def test_what_cannot_be_cut_is_refused(change: dict[str, object], problem: str) -> None:
    plain = {
        "layers": range(2),
        "blocks": range(2),
        "cell_bytes": 16,
        "block_tokens": 1,
        "berth_bytes": 4096,
    }

    with pytest.raises(ValueError, match=problem):
        cut(**{**plain, **change})


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        (Grid(0, 1, 0, 1), ""),
        (Grid(0, 0, 0, 1), "grid of 0 layers and 1 block is empty"),
        (Grid(0, 1, 0, 1, part_layers=0), "part_layers is 0, must be at least 1"),
        (Grid(0, 1, 0, PART_COUNT_MAX + 1), f"grid has {PART_COUNT_MAX + 1} parts"),
    ],
)
def test_a_grid_says_what_is_wrong_with_it(grid: Grid, problem: str) -> None:
    assert grid.problem().startswith(problem)
    assert bool(grid.problem()) == bool(problem)
