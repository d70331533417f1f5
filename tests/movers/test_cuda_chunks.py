"""A layout as kernels see it: every byte of every layer in some chunk, once."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.movers.cuda.tables import CELL_COLUMN, WORD_BYTES, chunk_tables, layer_spans
from penstock.testing.tier_suite import LAYOUTS
from penstock.tiers.host import slot_bytes

START_COLUMN, CHUNK_COLUMN = 2, 3


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_chunks_of_a_block_are_all_of_its_bytes(kind: str) -> None:
    layout = LAYOUTS[kind]
    covered = np.zeros(layout.block_bytes, dtype=int)

    tables = chunk_tables(layout, dict.fromkeys(layout.buffer_bytes, 0), pitch=slot_bytes(layout))
    for pattern, rows in tables:
        for row in rows:
            first = row[CHUNK_COLUMN] * pattern.chunk_words * WORD_BYTES
            end = min(first + pattern.chunk_words * WORD_BYTES, pattern.segment_bytes)
            covered[row[START_COLUMN] + first : row[START_COLUMN] + end] += 1

    assert (covered == 1).all()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_chunks_of_a_layer_follow_each_other_in_their_table(kind: str) -> None:
    layout = LAYOUTS[kind]
    bytes_of: dict[int, int] = {}

    tables = chunk_tables(layout, dict.fromkeys(layout.buffer_bytes, 0), pitch=slot_bytes(layout))
    for table in tables:
        spans = list(layer_spans(table, layout))
        for layer, first, count in spans:
            rows = table.rows[first : first + count]
            assert {layout.cells[row[CELL_COLUMN]].layer for row in rows} == {layer}
            segments = count // table.pattern.chunk_count
            bytes_of[layer] = bytes_of.get(layer, 0) + segments * table.pattern.segment_bytes
        assert [first for _, first, _ in spans] == [
            sum(count for _, _, count in spans[:number]) for number in range(len(spans))
        ]
        assert sum(count for _, _, count in spans) == len(table.rows)

    wanted: dict[int, int] = {}
    for cell in layout.cells:
        wanted[cell.layer] = wanted.get(cell.layer, 0) + cell.length
    assert bytes_of == wanted
