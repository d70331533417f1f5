"""The toy model: every byte of its KV tells which tokens came before."""

from __future__ import annotations

import numpy as np
import pytest

from lab.demo.toy_model import ToyModel, device_arrays, device_layout

TOKENS = [7, 7, 3, 1, 4, 1, 5, 9, 2, 6]


def changed_tokens(tokens: list[int], model: ToyModel) -> set[int]:
    """The positions at which the KV differs in every number from that of `TOKENS`."""
    usual = ToyModel(weights=1).kv(TOKENS)[:, :, : len(tokens)]
    differs = usual != model.kv(tokens)[:, :, : usual.shape[2]]
    # Two 16-bit numbers are equal by chance once in 65536 times: nearly all must differ.
    return set(np.flatnonzero(differs.mean(axis=(0, 1, 3, 4)) > 0.9).tolist())


def test_the_same_tokens_have_the_same_kv() -> None:
    assert changed_tokens(TOKENS, ToyModel(weights=1)) == set()


def test_the_kv_of_later_tokens_can_be_computed_alone() -> None:
    model = ToyModel(weights=1)

    later = model.kv(TOKENS, first=6)

    assert np.array_equal(later, model.kv(TOKENS)[:, :, 6:])


@pytest.mark.parametrize(
    "tokens",
    [
        [7, 7, 3, 1, 8, 1, 5, 9, 2, 6],
        [7, 7, 3, 1, 1, 4, 5, 9, 2, 6],
        [7, 7, 3, 1, 0, 4, 1, 5, 9, 2],
    ],
    ids=["another token", "two exchanged", "one inserted"],
)
def test_a_change_reaches_every_token_after_it(tokens: list[int]) -> None:
    changed = changed_tokens(tokens, ToyModel(weights=1))

    assert changed >= {4}
    assert changed.isdisjoint(range(4))


def test_other_weights_change_everything() -> None:
    assert changed_tokens(TOKENS, ToyModel(weights=2)) == set(range(len(TOKENS)))


def test_samples_of_one_prompt_differ() -> None:
    model = ToyModel(weights=1)

    assert len({model.next_token(TOKENS, sample=sample) for sample in range(4)}) == 4


def test_the_layout_describes_the_arrays() -> None:
    kv = device_arrays(block_count=3, block_tokens=16)
    layout = device_layout(block_count=3, block_tokens=16)

    assert layout.buffer_bytes == {number: layer.nbytes for number, layer in enumerate(kv)}
    assert layout.block_bytes * 3 == kv.nbytes
