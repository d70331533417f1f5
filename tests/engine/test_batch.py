"""A step's input: where every token goes, and what is refused."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.batch import Span, on_device

CPU = torch.device("cpu")


def test_tokens_go_to_the_places_that_their_tables_say() -> None:
    batch = on_device(
        [Span(1, 2, [10, 11, 12], [7, 3], wants_output=False), Span(2, 5, [20], [0, 9])],
        block_tokens=4,
        device=CPU,
    )

    assert batch.tokens.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [2, 3, 4, 5]
    assert batch.places.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0, 9 * 4 + 1]
    assert batch.outputs.tolist() == [3]


def test_single_tokens_are_decoded_together_and_padded_to_the_longest() -> None:
    batch = on_device(
        [Span(1, 0, [1], [4]), Span(2, 9, [2], [5, 6, 7]), Span(3, 1, [3], [8])],
        block_tokens=4,
        device=CPU,
    )

    assert len(batch.prefills) == 1
    assert batch.decodes is not None
    assert batch.decodes.first == 1
    assert batch.decodes.tables.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.decodes.lengths.tolist() == [10, 2]


@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([Span(1, 0, [], [0])], "request 1 has no tokens"),
        ([Span(2, 3, [1, 2], [0])], "must have room for 5 tokens"),
        ([Span(1, 3, [1], [0]), Span(2, 0, [1, 2], [1])], "request 2 has a chunk of a prompt"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(spans: list[Span], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        on_device(spans, block_tokens=4, device=CPU)
