"""Attention over blocks that lie anywhere: chunks of prompts one by one, decodes all at once.

K and V of a layer are one tensor [2, blocks, tokens of a block, heads, channels]. What a step
computes is written first, then read back together with what was there, so that a prefix from
the cache and a prefix just computed take the same way.

`PlainAttention` is torch alone, on any device. On a GPU, `penstock.engine.cuda.attention` has
kernels for the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from penstock.engine.batch import DecodeRows, PrefillRows, StepBatch


class Heads(NamedTuple):
    """What a layer projected: [tokens, heads, channels] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Turn(NamedTuple):
    """How the rotary embedding turns each position: [positions, channels] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Attention(Protocol):
    """One layer's attention: turns, writes K and V to their places, and reads."""

    def turn(self, angles: Turn, batch: StepBatch) -> Turn:
        """Prepares the angles of a batch, once for all layers."""
        ...

    def attend(self, heads: Heads, turn: Turn, kv: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """What every token reads from the tokens up to it: [tokens, heads, channels]."""
        ...


class PlainAttention:
    """Attention in plain torch."""

    def turn(self, angles: Turn, batch: StepBatch) -> Turn:
        """The angles of the batch's positions, the same for all heads."""
        return Turn(angles.cos[batch.positions, None], angles.sin[batch.positions, None])

    def attend(self, heads: Heads, turn: Turn, kv: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """What every token reads from the tokens up to it: [tokens, heads, channels]."""
        query, key = rotated(heads.query, turn), rotated(heads.key, turn)
        write_kv(kv, key, heads.value, batch.places)
        result = torch.empty_like(query)
        for rows in batch.prefills:
            part = slice(rows.first, rows.first + rows.length)
            result[part] = _prefill_by_gathering(query[part], kv, rows)
        if batch.decodes is not None:
            part = slice(batch.decodes.first, query.shape[0])
            result[part] = decode_by_gathering(query[part], kv, batch.decodes)
        return result


def rotated(heads: torch.Tensor, turn: Turn) -> torch.Tensor:
    """The rotary embedding of queries or keys."""
    first, second = heads.chunk(2, dim=-1)
    return heads * turn.cos + torch.cat((-second, first), dim=-1) * turn.sin


def write_kv(
    kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor
) -> None:
    """Puts K and V of the step's tokens into their blocks."""
    flat = kv.view(2, -1, *kv.shape[3:])
    flat[0].index_copy_(0, places, key)
    flat[1].index_copy_(0, places, value)


def _prefill_by_gathering(query: torch.Tensor, kv: torch.Tensor, rows: PrefillRows) -> torch.Tensor:
    """One chunk over a copy of its blocks, in token order."""
    key, value = (
        _heads_first(kv[part, rows.table].flatten(0, 1)[: rows.context], query.shape[1])
        for part in (0, 1)
    )
    whole = rows.length == rows.context
    found = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key[None],
        value[None],
        attn_mask=None if whole else _seen(rows, query.device),
        is_causal=whole,
    )
    return found[0].transpose(0, 1)


def _seen(rows: PrefillRows, device: torch.device) -> torch.Tensor:
    """Which tokens each token of a chunk attends to: all before the chunk, and those up to it.

    torch has this as a bias without memory, but to import it takes two seconds.
    """
    ones = torch.ones((rows.length, rows.context), dtype=torch.bool, device=device)
    return ones.tril(diagonal=rows.context - rows.length)


def _heads_first(gathered: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens, KV heads, channels] as [query heads, tokens, channels]."""
    return gathered.transpose(0, 1).repeat_interleave(heads // gathered.shape[1], dim=0)


def decode_by_gathering(query: torch.Tensor, kv: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
    """Decodes in plain torch: all requests in one call, padded to the longest."""
    count, heads, channels = query.shape
    kv_heads = kv.shape[3]
    key, value = (kv[part, rows.tables].flatten(1, 2)[:, : rows.longest] for part in (0, 1))
    seen = torch.arange(rows.longest, device=query.device) < rows.lengths[:, None]
    # The query heads of one KV head are rows of one matrix: no copy of K and V for each.
    found = scaled_dot_product_attention(
        query.view(count, kv_heads, heads // kv_heads, channels),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen[:, None, None, :],
    )
    return found.reshape(count, heads, channels)
