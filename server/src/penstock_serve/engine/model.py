"""The decoder of the Llama family in plain torch, over KV in blocks, one rank's share of it.

    tokens → embedding → [ norm → attention → + → norm → MLP → + ] × layers → norm → logits

Each rank computes its heads and its part of the MLP; two all-reduces a layer (`Ranks`) add the
parts. Logits are computed for the requested rows, each rank for its part of the vocabulary, and
gathered on the first rank. These collectives are part of a step and run in the same order on every
rank; the cache and the handoff use none.

K and V of a layer are one tensor [2, blocks, tokens of a block, heads, channels]. A step first
writes its own K and V and then reads them back together with the earlier ones, so cached and
computed prefixes take the same path. `PlainAttention` uses torch alone, on any device;
`penstock_serve.engine.cuda.attention` does the same with kernels on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import distributed
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from penstock.errors import UnavailableError
from penstock_serve.engine.architecture import Architecture, rotary_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock import EngineSteps
    from penstock_serve.engine.architecture import Share
    from penstock_serve.engine.batch import DecodeRows, PrefillRows, StepBatch
    from penstock_serve.engine.checkpoints import RankWeights
    from penstock_serve.engine.cuda.attention import CudaAttention

    Attention: TypeAlias = "PlainAttention | CudaAttention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """This rank's part of one layer's weights."""

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        found = [getattr(self, field.name) for field in fields(self)]
        return [tensor for tensor in found if tensor is not None]

    def copy_from(self, other: LayerWeights) -> None:
        """Copies the weights of another checkpoint over these, tensor by tensor."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


def layer_waits(gates: EngineSteps | None, stream: int) -> Callable[[int], None]:
    """For `Decoder.forward`: has the stream wait before each layer."""
    return _ignore if gates is None else lambda layer: gates.wait_layer(layer, stream)


def _ignore(_layer: int) -> None:
    pass


class Decoder:
    """One rank's share of a model."""

    def __init__(
        self,
        architecture: Architecture,
        weights: RankWeights,
        ranks: Ranks,
        *,
        attention: Attention | None = None,
        progress: Callable[[int], None] = _ignore,
    ) -> None:
        self.architecture = architecture
        self._ranks = ranks
        self._attention = attention or PlainAttention()
        self._embedding = weights.whole("model.embed_tokens.weight")
        self._layers: list[LayerWeights] = []
        for number in range(architecture.layers):
            self._layers.append(_layer_weights(architecture, weights, number))
            progress(number + 1)
        self._norm = weights.whole("model.norm.weight")
        self._output = weights.output(_output_name(architecture))
        frequencies = torch.tensor(rotary_frequencies(architecture), dtype=torch.float64)
        angles = torch.arange(architecture.positions, dtype=torch.float64)[:, None] * frequencies
        # Both halves of a head rotate by the same angles.
        both = torch.cat((angles, angles), dim=-1)
        placed = {"device": self._embedding.device, "dtype": self._embedding.dtype}
        self._angles = Turn(both.cos().to(**placed), both.sin().to(**placed))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its weights."""
        yield self._embedding
        for layer in self._layers:
            yield from layer.tensors()
        yield self._norm
        yield self._output

    @property
    def share(self) -> Share:
        """The part of the model that this rank has."""
        return self._ranks.share

    @torch.inference_mode()
    def load(self, weights: RankWeights) -> None:
        """Copies other weights over its own; they need memory for one layer besides."""
        architecture = self.architecture
        self._embedding.copy_(weights.whole("model.embed_tokens.weight"))
        for number, layer in enumerate(self._layers):
            layer.copy_from(_layer_weights(architecture, weights, number))
        self._norm.copy_(weights.whole("model.norm.weight"))
        self._output.copy_(weights.output(_output_name(architecture)))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        kv: Sequence[torch.Tensor],
        *,
        before_layer: Callable[[int], None] = _ignore,
        after_layer: Callable[[int], None] = _ignore,
    ) -> torch.Tensor | None:
        """The logits of the output rows on the first rank, `None` on the others.

        `before_layer` is called before the KV of a layer is used, and `after_layer` when it is
        computed, or queued on a GPU.
        """
        hidden = embedding(batch.tokens, self._embedding)
        turn = self._attention.turn(self._angles, batch)
        for number, layer in enumerate(self._layers):
            before_layer(number)
            hidden = hidden + self._attended(layer, hidden, kv[number], turn, batch)
            after_layer(number)
            hidden = hidden + self._mlp(layer, hidden)
        if not len(batch.outputs):
            return None
        wanted = self._normed(hidden[batch.outputs], self._norm)
        return self._ranks.gathered(linear(wanted, self._output))

    def _attended(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        kv: torch.Tensor,
        turn: Turn,
        batch: StepBatch,
    ) -> torch.Tensor:
        share, channels = self._ranks.share, self.architecture.head_dim
        heads, kv_heads = len(share.heads), len(share.kv_heads)
        normed = self._normed(hidden, layer.attention_norm)
        projected = linear(normed, layer.query_key_value, layer.query_key_value_bias)
        query, key, value = projected.view(-1, heads + 2 * kv_heads, channels).split(
            (heads, kv_heads, kv_heads), dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._normed(query, layer.query_norm), self._normed(key, layer.key_norm)
        found = self._attention.attend(Heads(query, key, value), turn, kv, batch)
        return self._ranks.summed(linear(found.flatten(1), layer.attention_output))

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        both = linear(self._normed(hidden, layer.mlp_norm), layer.gate_up)
        gate, up = both.chunk(2, dim=-1)
        return self._ranks.summed(linear(silu(gate) * up, layer.down))

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, (hidden.shape[-1],), weight, self.architecture.norm_epsilon)


def _output_name(architecture: Architecture) -> str:
    return "model.embed_tokens.weight" if architecture.tied else "lm_head.weight"


def _layer_weights(architecture: Architecture, weights: RankWeights, number: int) -> LayerWeights:
    at = f"model.layers.{number}"
    attention = f"{at}.self_attn"
    bias = None
    if architecture.qkv_bias:
        bias = torch.cat(
            (
                weights.query(f"{attention}.q_proj.bias"),
                weights.key_value(f"{attention}.k_proj.bias"),
                weights.key_value(f"{attention}.v_proj.bias"),
            )
        )
    normed = architecture.qk_norm
    return LayerWeights(
        attention_norm=weights.whole(f"{at}.input_layernorm.weight"),
        query_key_value=torch.cat(
            (
                weights.query(f"{attention}.q_proj.weight"),
                weights.key_value(f"{attention}.k_proj.weight"),
                weights.key_value(f"{attention}.v_proj.weight"),
            )
        ),
        query_key_value_bias=bias,
        query_norm=weights.whole(f"{attention}.q_norm.weight") if normed else None,
        key_norm=weights.whole(f"{attention}.k_norm.weight") if normed else None,
        attention_output=weights.from_heads(f"{attention}.o_proj.weight"),
        mlp_norm=weights.whole(f"{at}.post_attention_layernorm.weight"),
        gate_up=torch.cat(
            (weights.up(f"{at}.mlp.gate_proj.weight"), weights.up(f"{at}.mlp.up_proj.weight"))
        ),
        down=weights.down(f"{at}.mlp.down_proj.weight"),
    )


class Heads(NamedTuple):
    """The projections of a layer: [tokens, heads, channels] each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Turn(NamedTuple):
    """The rotary embedding of each position: [positions, channels] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class PlainAttention:
    """One layer's attention in plain torch: rotates, writes K and V to blocks, and attends."""

    def turn(self, angles: Turn, batch: StepBatch) -> Turn:
        """The angles of the batch's positions, once for all layers, the same for all heads."""
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
    """The mask of a chunk: each token attends to all tokens up to it.

    torch has a bias for this that needs no memory, but its import takes two seconds.
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
    # The query heads of one KV head are rows of one matrix, so K and V are not copied for each.
    found = scaled_dot_product_attention(
        query.view(count, kv_heads, heads // kv_heads, channels),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=seen[:, None, None, :],
    )
    return found.reshape(count, heads, channels)


class Alone:
    """The only rank, which needs no collectives."""

    def __init__(self, share: Share) -> None:
        if share.ranks != 1:
            raise ValueError(f"share is one of {share.ranks}, must be the only one")
        self.share = share

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        return logits


class Together:
    """One of several ranks of an initialised `torch.distributed` group."""

    def __init__(self, share: Share, vocabulary_sizes: list[int]) -> None:
        self.share = share
        self._sizes = vocabulary_sizes

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, on every rank."""
        try:
            distributed.all_reduce(part)
        except RuntimeError as error:
            raise _lost(error) from error
        return part

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """All logits, on the first rank."""
        # Shares differ in size by at most one row, and gather needs equal shapes.
        widest = max(self._sizes)
        if logits.shape[1] < widest:
            logits = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        parts = [torch.empty_like(logits) for _ in self._sizes] if self.share.is_first else None
        try:
            distributed.gather(logits.contiguous(), parts)
        except RuntimeError as error:
            raise _lost(error) from error
        if parts is None:
            return None
        return torch.cat(
            [part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1
        )


Ranks = Alone | Together
"""Whoever adds the parts of all ranks, and gathers their logits."""


def _lost(error: RuntimeError) -> UnavailableError:
    # gloo and nccl raise a plain `RuntimeError` when a peer is gone.
    return UnavailableError(f"another rank is lost: {error}")
