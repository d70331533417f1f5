"""The decoder of the Llama family in plain torch, over KV in blocks, one rank's share of it.

    tokens → embedding → [ norm → attention → + → norm → MLP → + ] × layers → norm → logits

Each rank computes its heads and its part of the MLP; two sums over the ranks a layer put them
together. Logits are computed for the rows that are wanted, each rank for its part of the
vocabulary, and gathered on the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from penstock.engine.architecture import Architecture, rotary_frequencies
from penstock.engine.attention import Heads, PlainAttention, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.engine.attention import Attention
    from penstock.engine.batch import StepBatch
    from penstock.engine.collectives import Ranks
    from penstock.engine.weights import RankWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights, as far as this rank has them."""

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def _nothing(_layer: int) -> None:
    """Nobody wants to know."""


class Decoder:
    """One rank's share of a model."""

    def __init__(
        self,
        architecture: Architecture,
        weights: RankWeights,
        ranks: Ranks,
        *,
        attention: Attention | None = None,
        progress: Callable[[int], None] = _nothing,
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
        self._output = weights.output(
            "model.embed_tokens.weight" if architecture.tied else "lm_head.weight"
        )
        frequencies = torch.tensor(rotary_frequencies(architecture), dtype=torch.float64)
        angles = torch.arange(architecture.positions, dtype=torch.float64)[:, None] * frequencies
        # Both halves of a head turn by the same angles.
        both = torch.cat((angles, angles), dim=-1)
        placed = {"device": self._embedding.device, "dtype": self._embedding.dtype}
        self._angles = Turn(both.cos().to(**placed), both.sin().to(**placed))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """What its weights and its KV are made of."""
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        kv: Sequence[torch.Tensor],
        *,
        after_layer: Callable[[int], None] = _nothing,
    ) -> torch.Tensor | None:
        """The logits of the wanted rows on the first rank, nothing on the others.

        `after_layer` is called once the KV of a layer is computed, for those who wait for it.
        """
        hidden = embedding(batch.tokens, self._embedding)
        turn = self._attention.turn(self._angles, batch)
        for number, layer in enumerate(self._layers):
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
