"""A step's input: where every token goes, and what is refused."""

from __future__ import annotations

import pytest
import torch

from penstock_serve.engine.batch import NOWHERE, PREVIOUS, BatchShape, TokenSpan, lay_out, on_device

CPU = torch.device("cpu")


def test_tokens_go_to_the_places_that_their_tables_say() -> None:
    batch = on_device(
        [TokenSpan(1, 2, [10, 11, 12], [7, 3], wants_output=False), TokenSpan(2, 5, [20], [0, 9])],
        block_tokens=4,
        device=CPU,
    )

    assert batch.tokens.tolist() == [10, 11, 12, 20]
    assert batch.positions.tolist() == [2, 3, 4, 5]
    assert batch.places.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4 + 0, 9 * 4 + 1]
    assert batch.outputs.tolist() == [3]


def test_single_tokens_are_decoded_together_and_padded_to_the_longest() -> None:
    batch = on_device(
        [TokenSpan(1, 0, [1], [4]), TokenSpan(2, 9, [2], [5, 6, 7]), TokenSpan(3, 1, [3], [8])],
        block_tokens=4,
        device=CPU,
    )

    assert len(batch.prefills) == 1
    assert batch.decodes is not None
    assert batch.decodes.first == 1
    assert batch.decodes.tables.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.decodes.lengths.tolist() == [10, 2]


def test_a_token_that_the_step_before_chose_is_filled_in_on_the_device() -> None:
    spans = [
        TokenSpan(4, 0, [7, 8], [1]),
        TokenSpan(2, 5, [PREVIOUS], [0, 9]),
        TokenSpan(3, 6, [30], [2, 3]),
    ]
    batch = lay_out(spans, block_tokens=4, draws=[1, 2], last={3: 0, 2: 1}).sent(CPU)

    batch.fill(torch.tensor([77, 88]))

    assert batch.tokens.tolist() == [7, 8, 88, 30]
    assert batch.drawn.tolist() == [1, 2]


def test_a_token_that_no_step_chose_is_refused() -> None:
    with pytest.raises(ValueError, match="request 2 takes a token from the step before"):
        lay_out([TokenSpan(2, 5, [PREVIOUS], [0, 9])], block_tokens=4, last={3: 0})


def test_a_draw_needs_logits() -> None:
    with pytest.raises(ValueError, match="span 0, which wants no output"):
        lay_out([TokenSpan(1, 0, [5], [0], wants_output=False)], block_tokens=4, draws=[0])


def test_steps_that_are_filled_up_look_alike() -> None:
    shape = BatchShape(3, 4, 5, 6)
    spans = [TokenSpan(4, 8, [7, 8], [1, 0, 5]), TokenSpan(2, 5, [PREVIOUS], [0, 9])]

    batch = lay_out(spans, block_tokens=4, draws=[0, 1], last={2: 0}).sent(CPU, shape)
    empty = lay_out([], block_tokens=4).sent(CPU, shape)
    batch.fill(torch.tensor([55]))

    assert batch.tokens.tolist() == [7, 8, 0, 0, 0, 55, 0, 0]
    assert batch.positions.tolist() == [8, 9, *[NOWHERE] * 3, 5, NOWHERE, NOWHERE]
    assert batch.places.tolist() == [20, 21, *[NOWHERE] * 3, 37, NOWHERE, NOWHERE]
    assert batch.outputs.tolist() == [1, 5, 6, 7]
    assert batch.drawn.tolist() == [0, 1]
    assert batch.decodes is not None
    assert batch.decodes.tables.tolist() == [[0, 9, 0, 0], [0] * 4, [0] * 4]
    assert [(rows.length, rows.context) for rows in batch.prefills] == [(5, 24)]
    # A graph reads the beginning, which all steps of a shape have in common.
    assert len(empty.packed) == len(batch.packed) - len(batch.drawn) - 2


@pytest.mark.parametrize(
    ("spans", "reported"),
    [
        ([TokenSpan(1, 0, [], [0])], "request 1 has no tokens"),
        ([TokenSpan(2, 3, [1, 2], [0])], "must have room for 5 tokens"),
        (
            [TokenSpan(1, 3, [1], [0]), TokenSpan(2, 0, [1, 2], [1])],
            "request 2 has a chunk of a prompt",
        ),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(spans: list[TokenSpan], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        on_device(spans, block_tokens=4, device=CPU)
