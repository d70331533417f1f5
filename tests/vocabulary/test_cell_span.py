"""Checksums of whole blocks: what is found, in which cell, on which rank and in which layout."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.cell_sums import CellSums, add_sums, cell_seed, cell_sum, faults_of
from lab.fixtures.shards import Shard
from penstock.vocabulary.checksums import Algorithm, CellSpan
from penstock.vocabulary.layout import HeadRange, Layer, Layout
from penstock.vocabulary.planes import Axis, DType, PlaneRole, plane_from_strides
from penstock.vocabulary.reshard import Blocks, copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VECTORS: dict[str, Any] = json.loads(
    Path(__file__).with_name("checksum_vectors.json").read_text(encoding="utf-8")
)
KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))
BOTH = pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)


def split(
    *,
    layers: Sequence[int] = range(3),
    heads: HeadRange | None = None,
    order: tuple[Axis, ...] = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
) -> Layout:
    return Layout.split(
        layers=layers,
        heads=heads or HeadRange.all_of(4),
        channels=8,
        dtype=DType.FP8_E4M3,
        block_tokens=4,
        block_count=2,
        order=order,
        scale_dtype=DType.FP16,
    )


def some_blocks(layout: Layout, count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, layout.block_bytes), dtype=np.uint8)


def tables(
    layout: Layout, blocks: NDArray[np.uint8], keys: Sequence[bytes], algorithm: Algorithm
) -> list[CellSums]:
    sums = CellSpan.of(layout).sum_blocks(blocks, keys, algorithm)
    return [CellSums.of(row) for row in sums]


@BOTH
def test_sums_of_a_block_are_those_of_the_vectors(algorithm: Algorithm) -> None:
    vector = VECTORS["block"]
    layout = split(layers=range(1, 3), heads=HeadRange(first=2, count=2, total=4))
    counted = np.arange(layout.block_bytes, dtype=np.uint32) * 7 % 251
    block = counted.astype(np.uint8)[np.newaxis]

    (table,) = tables(layout, block, [bytes.fromhex(vector["key"])], algorithm)

    assert table.to_bytes().hex() == vector[algorithm.value]


def with_a_plane_without_heads(layer: Layer) -> Layer:
    scale = plane_from_strides(
        PlaneRole.K_SCALE,
        DType.FP32,
        shape=(1,),
        strides=(4,),
        axes=(Axis.BLOCK,),
        buffer=1000 + layer.number,
    )
    return replace(layer, planes=(*layer.planes, scale))


@BOTH
@pytest.mark.parametrize(("layer_count", "block_count"), [(2, 12), (17, 2)])
def test_many_blocks_are_summed_like_one_after_the_other(
    layer_count: int, block_count: int, algorithm: Algorithm
) -> None:
    # Several blocks, then several parts of a block, fill a chunk of mix64. The planes without
    # heads put unequal distances between the others; the opaque ones end within a word.
    (group,) = Layout.split(
        layers=range(layer_count),
        heads=HeadRange.all_of(2),
        channels=256,
        dtype=DType.BF16,
        block_tokens=16,
        block_count=1,
    ).groups
    layers = tuple(with_a_plane_without_heads(layer) for layer in group.layers)
    layout = Layout.join(
        Layout(groups=(replace(group, layers=layers),), block_tokens=16),
        Layout.opaque(
            layers=range(20, 22), block_bytes=333, encoding="t", block_tokens=16, block_count=1
        ),
    )
    blocks = some_blocks(layout, block_count)
    keys = [bytes([number]) * 16 for number in range(block_count)]

    found = CellSpan.of(layout).sum_blocks(blocks, keys, algorithm)

    for block, key, row in zip(blocks, keys, found.tolist(), strict=True):
        expected = [
            add_sums(
                cell_sum(
                    block[s.start : s.start + s.length].tobytes(),
                    cell_seed(key, layer=cell.layer, plane=s.plane.role, head=cell.head),
                    algorithm,
                )
                for s in cell.segments
            )
            for cell in layout.cells
        ]
        assert row == expected


@BOTH
def test_a_sound_block_verifies(algorithm: Algorithm) -> None:
    layout = split()
    blocks = some_blocks(layout, 2)

    stored = tables(layout, blocks, [KEY, OTHER_KEY], algorithm)

    assert faults_of(CellSpan.of(layout), blocks, [KEY, OTHER_KEY], stored, algorithm) == []


@BOTH
@given(choice=st.data())
def test_a_flipped_bit_is_found_in_its_cell_and_no_other(
    choice: st.DataObject, algorithm: Algorithm
) -> None:
    layout = split()
    blocks = some_blocks(layout, 2)
    stored = tables(layout, blocks, [KEY, OTHER_KEY], algorithm)
    block = choice.draw(st.integers(0, 1))
    byte = choice.draw(st.integers(0, layout.block_bytes - 1))

    blocks[block, byte] ^= 1 << choice.draw(st.integers(0, 7))

    (cell,) = [
        index
        for index, each in enumerate(layout.cells)
        if each.start <= byte < each.start + each.length
    ]
    assert faults_of(CellSpan.of(layout), blocks, [KEY, OTHER_KEY], stored, algorithm) == [
        (block, cell)
    ]


@BOTH
def test_exchanged_slots_fail_in_every_cell(algorithm: Algorithm) -> None:
    layout = split()
    blocks = some_blocks(layout, 2)
    stored = tables(layout, blocks, [KEY, OTHER_KEY], algorithm)

    bad = faults_of(CellSpan.of(layout), blocks[::-1].copy(), [KEY, OTHER_KEY], stored, algorithm)

    assert len(bad) == 2 * len(layout.cells)


@BOTH
def test_a_slot_found_with_its_own_sums_under_another_key_fails(algorithm: Algorithm) -> None:
    layout = split()
    older = some_blocks(layout, 1)
    stored = tables(layout, older, [KEY], algorithm)

    bad = faults_of(CellSpan.of(layout), older, [OTHER_KEY], stored, algorithm)

    assert len(bad) == len(layout.cells)


@BOTH
def test_an_older_generation_of_a_slot_fails(algorithm: Algorithm) -> None:
    layout = split()
    older, newer = some_blocks(layout, 1, seed=1), some_blocks(layout, 1, seed=2)
    stored = tables(layout, newer, [KEY], algorithm)

    bad = faults_of(CellSpan.of(layout), older, [KEY], stored, algorithm)

    assert len(bad) == len(layout.cells)


@BOTH
def test_exchanged_layers_or_heads_fail_with_and_without_their_sums(algorithm: Algorithm) -> None:
    layout = split()
    span = CellSpan.of(layout)
    blocks = some_blocks(layout, 1)
    (stored,) = tables(layout, blocks, [KEY], algorithm)

    for one, other in combinations(range(len(layout.cells)), 2):
        moved, values = blocks.copy(), stored.values.copy()
        first, second = (
            np.s_[0, cell.start : cell.start + cell.length]
            for cell in (layout.cells[one], layout.cells[other])
        )
        moved[first], moved[second] = blocks[second], blocks[first]
        assert faults_of(span, moved, [KEY], [stored], algorithm) == [(0, one), (0, other)]
        values[[one, other]] = values[[other, one]]
        moved_with_sums = [CellSums.of(values)]
        assert faults_of(span, moved, [KEY], moved_with_sums, algorithm) == [(0, one), (0, other)]


@BOTH
def test_exchanged_k_and_v_of_a_cell_fail(algorithm: Algorithm) -> None:
    layout = split()
    blocks = some_blocks(layout, 1)
    stored = tables(layout, blocks, [KEY], algorithm)
    k, v = (np.s_[0, s.start : s.start + s.length] for s in layout.cells[2].segments[:2])

    blocks[k], blocks[v] = blocks[v].copy(), blocks[k].copy()

    assert faults_of(CellSpan.of(layout), blocks, [KEY], stored, algorithm) == [(0, 2)]


@BOTH
def test_cells_keep_their_sums_on_other_ranks_and_in_other_layouts(algorithm: Algorithm) -> None:
    whole = split()
    numbers = np.random.default_rng(3).integers(0, 256, whole.block_bytes, dtype=np.uint8)
    sums = CellSpan.of(whole).sum_blocks(numbers[np.newaxis], [KEY], algorithm)[0]
    of_cell = {
        (cell.layer, cell.head): (numbers[cell.start : cell.start + cell.length], each)
        for cell, each in zip(whole.cells, sums, strict=True)
    }

    for tensor_size, stage_count in ((1, 3), (2, 1), (4, 2), (8, 1)):
        for rank, stage in ((0, 0), (tensor_size - 1, stage_count - 1)):
            shard = Shard(
                tensor_size=tensor_size, tensor_rank=rank, stage_count=stage_count, stage=stage
            )
            part = split(layers=shard.layers(3), heads=shard.heads(4))
            held = [of_cell[cell.layer, cell.head] for cell in part.cells]
            block = np.concatenate([content for content, _ in held])[np.newaxis]

            found = CellSpan.of(part).sum_blocks(block, [KEY], algorithm)

            assert found[0].tolist() == [each for _, each in held]


@BOTH
def test_sums_do_not_depend_on_the_order_of_axes_in_memory(algorithm: Algorithm) -> None:
    token_first = split()
    head_first = split(order=(Axis.HEAD, Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL))
    random = np.random.default_rng(4)
    buffers = {
        buffer: random.integers(0, 256, size, dtype=np.uint8)
        for buffer, size in token_first.buffer_bytes.items()
    }
    turned = {buffer: np.zeros_like(content) for buffer, content in buffers.items()}
    source = Blocks(layout=token_first, buffers=buffers, numbers=[0, 1])
    copy_blocks(source, replace(source, layout=head_first, buffers=turned))

    def packed_sums(layout: Layout, content: dict[int, NDArray[np.uint8]]) -> list[CellSums]:
        packed = np.zeros((2, layout.block_bytes), dtype=np.uint8)
        copy_blocks(
            Blocks(layout=layout, buffers=content, numbers=[0, 1]),
            Blocks(
                layout=layout.packed(block_count=2),
                buffers={0: packed.reshape(-1)},
                numbers=[0, 1],
            ),
        )
        return tables(layout, packed, [KEY, OTHER_KEY], algorithm)

    assert packed_sums(head_first, turned) == packed_sums(token_first, buffers)


@BOTH
def test_some_layers_or_heads_are_verified_alone(algorithm: Algorithm) -> None:
    layout = split()
    blocks = some_blocks(layout, 1)
    (stored,) = tables(layout, blocks, [KEY], algorithm)
    # Heads 1 and 2 of layer 2, as a part of a handoff may bring them.
    part = layout.cells[9:11]
    content = blocks[:, part[0].start : part[-1].start + part[-1].length].copy()
    span = CellSpan(part)

    sound = faults_of(span, content, [KEY], [stored.part(9, 2)], algorithm)
    content[0, -1] ^= 1

    assert sound == []
    assert faults_of(span, content, [KEY], [stored.part(9, 2)], algorithm) == [(0, 1)]


@BOTH
def test_blocks_may_lie_apart_like_slots_of_an_arena(algorithm: Algorithm) -> None:
    layout = split()
    blocks = some_blocks(layout, 3)
    arena = np.zeros((6, layout.block_bytes + 13), dtype=np.uint8)
    arena[1::2, : layout.block_bytes] = blocks
    keys = [KEY, OTHER_KEY, KEY]
    span = CellSpan.of(layout)

    found = span.sum_blocks(arena[1::2, : layout.block_bytes], keys, algorithm)

    assert np.array_equal(found, span.sum_blocks(blocks, keys, algorithm))


@BOTH
def test_no_blocks_have_no_sums(algorithm: Algorithm) -> None:
    layout = split()
    nothing = np.zeros((0, layout.block_bytes), dtype=np.uint8)
    span = CellSpan.of(layout)

    assert span.sum_blocks(nothing, [], algorithm).shape == (0, len(layout.cells))
    assert faults_of(span, nothing, [], [], algorithm) == []


def test_blocks_that_are_no_packed_blocks_are_refused() -> None:
    layout = split()
    span = CellSpan.of(layout)
    blocks = some_blocks(layout, 2)

    with pytest.raises(ValueError, match=r"must be \[blocks, bytes\] of uint8"):
        span.sum_blocks(blocks[0], [KEY], Algorithm.XXH3)
    with pytest.raises(ValueError, match="blocks has shape"):
        span.sum_blocks(blocks[:, 1:], [KEY, KEY], Algorithm.XXH3)
    with pytest.raises(ValueError, match="blocks has shape"):
        span.sum_blocks(blocks, [KEY], Algorithm.XXH3)
    with pytest.raises(ValueError, match="bytes of a block are 2 apart, must be 1"):
        span.sum_blocks(np.repeat(blocks, 2, axis=1)[:, ::2], [KEY, KEY], Algorithm.XXH3)


def test_sums_that_are_not_of_these_blocks_are_refused() -> None:
    layout = split()
    blocks = some_blocks(layout, 1)
    span = CellSpan.of(layout)

    with pytest.raises(ValueError, match="sums has 0 tables, must have one for each of 1 keys"):
        faults_of(span, blocks, [KEY], [], Algorithm.XXH3)
    with pytest.raises(ValueError, match=r"sums\[0\] has 1 cells, must have 12"):
        faults_of(span, blocks, [KEY], [CellSums(bytes(8))], Algorithm.XXH3)


def test_a_span_is_made_of_cells_that_follow_each_other() -> None:
    cells = split().cells

    with pytest.raises(ValueError, match="cells is empty"):
        CellSpan(())
    with pytest.raises(ValueError, match="cells must follow each other"):
        CellSpan((cells[0], cells[2]))
