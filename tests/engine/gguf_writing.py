"""GGUF files for tests, written as llama.cpp's converter writes them.

Rows of queries and keys are put into its order, and tied embeddings are written once: what the
engine has to undo or to find out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
F32 = gguf.GGMLQuantizationType.F32


def pairs_together(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order in which llama.cpp keeps the rows of a head: rotary pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def as_they_are(weight: np.ndarray[Any, Any], _heads: int) -> np.ndarray[Any, Any]:
    """No converter does this: a reader that undoes an order gets another model."""
    return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a file is written, where it is not as usual."""

    family: str = "llama"
    kind_of: Callable[[str], Any] = lambda _: F32
    """The type of a tensor, by its name in the file."""
    order: Callable[[np.ndarray[Any, Any], int], np.ndarray[Any, Any]] = pairs_together
    """The order of rows in queries and keys."""
    rope_theta: float | None = None
    """Another base of the rotary embedding than the model's own."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More metadata: a value and its type, by name."""
    tensors: tuple[str, ...] = ()
    """More tensors, by name."""


USUAL = Manner()


def write_gguf(path: Path, model: Any, manner: Manner = USUAL) -> None:
    """Writes a model of transformers to a GGUF file."""
    writer = gguf.GGUFWriter(path, manner.family)
    _add_fields(writer, model.config, manner)
    for name in manner.tensors:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    for name, values in _tensors_of(model, manner):
        kind = manner.kind_of(name)
        if kind == F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_fields(writer: Any, config: Any, manner: Manner) -> None:
    own_theta = config.rope_parameters["rope_theta"]
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(own_theta if manner.rope_theta is None else manner.rope_theta)
    writer.add_eos_token_id(2)
    for name, value in manner.fields.items():
        writer.add_key_value(name, *value)


def _tensors_of(model: Any, manner: Manner) -> Any:
    config = model.config
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.numpy()
        if ".q_proj." in name:
            values = manner.order(values, config.num_attention_heads)
        elif ".k_proj." in name:
            values = manner.order(values, config.num_key_value_heads)
        yield stored_name(name), np.ascontiguousarray(values)


def stored_name(name: str) -> str:
    """What a tensor of transformers is called in a GGUF file."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name
