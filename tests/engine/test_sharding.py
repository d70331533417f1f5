"""Shares of a model: together they are the whole, each part once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock_serve.engine.architecture import Architecture, architecture_from_config, share_of

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1537,
    "vocab_size": 49153,
}


def architecture(heads: int, kv_heads: int) -> Architecture:
    return replace(architecture_from_config(CONFIG), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [(9, 3, 1), (9, 3, 2), (9, 3, 3), (9, 3, 5), (9, 3, 9), (32, 8, 8), (32, 8, 3), (32, 2, 7)],
)
def test_ranks_hold_every_part_once(heads: int, kv_heads: int, ranks: int) -> None:
    model = architecture(heads, kv_heads)

    shares = [share_of(model, rank=rank, ranks=ranks) for rank in range(ranks)]

    assert [head for share in shares for head in share.heads] == list(range(heads))
    assert [row for share in shares for row in share.intermediate] == list(range(1537))
    assert [row for share in shares for row in share.vocabulary] == list(range(49153))


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (3, 5), (8, 8), (2, 7), (1, 4)])
def test_every_query_head_finds_its_kv_head_on_its_rank(kv_heads: int, ranks: int) -> None:
    model = architecture(kv_heads * 8, kv_heads)

    for rank in range(ranks):
        share = share_of(model, rank=rank, ranks=ranks)

        assert {head // model.group for head in share.heads} == set(share.kv_heads)
        assert len(share.heads) % len(share.kv_heads) == 0


def test_three_kv_heads_on_two_ranks_are_two_and_one() -> None:
    shares = [share_of(architecture(9, 3), rank=rank, ranks=2) for rank in range(2)]

    assert [share.kv_heads for share in shares] == [range(2), range(2, 3)]
    assert [share.heads for share in shares] == [range(6), range(6, 9)]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 10), (2, 2), (-1, 2)])
def test_a_rank_that_would_hold_nothing_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        share_of(architecture(9, 3), rank=rank, ranks=ranks)
