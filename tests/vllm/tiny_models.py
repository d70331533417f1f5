"""Small models with random weights, one of each kind of KV, and a trained one: all offline.

    python tiny_models.py llama|latent|hybrid|seeing|smollm2|eagle|mtp|states FOLDER

The weights are wider than usual: with the customary spread the output hardly depends on the
context, and a test that compares outputs would not notice wrong KV.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from smollm2 import make_smollm2
from tiny_llama import VOCABULARY, make_tiny_llama
from tiny_seeing import make_seeing
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SLIDING_WINDOW = 96


def make_latent(folder: Path) -> None:
    """Latent attention (MLA): one plane, the same on every rank."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=4096,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )
    save(DeepseekV2ForCausalLM(config), folder, embedding=1.0)


def make_hybrid(folder: Path) -> None:
    """Five layers with a sliding window to one without: several KV groups."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=SLIDING_WINDOW,
        max_position_embeddings=4096,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    # Its embeddings are scaled up and used twice: wider, they would drown the attention.
    save(Gemma3ForCausalLM(config), folder, embedding=0.15)


def make_eagle(folder: Path) -> None:
    """A Llama, and in `draft` an EAGLE head for it: the first of its layers."""
    make_tiny_llama(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".layers." in name and ".layers.0." not in name and weight.ndim == 2:
            # What the first layer says then tells much of what all of them say.
            weight.mul_(0.5)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    drafting = {
        name.removeprefix("model."): weight.clone()
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    drafting["fc.weight"] = mixing(weights["model.embed_tokens.weight"].shape[1])
    (folder / "draft").mkdir()
    save_file(drafting, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "draft" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))


def make_mtp(folder: Path) -> None:
    """Three layers, the last of them with experts, and one behind them that drafts (MTP)."""
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        max_position_embeddings=4096,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=False,
    )
    save(Glm4MoeForCausalLM(config), folder, embedding=1.0, layers=0.05)
    weights = load_file(folder / "model.safetensors")
    last, behind = "model.layers.2.", "model.layers.3."
    weights |= {
        name.replace(last, behind): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    hidden = config.hidden_size
    weights |= {
        f"{behind}{name}.weight": torch.ones(hidden)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    weights |= {
        f"{behind}eh_proj.weight": mixing(hidden),
        f"{behind}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{behind}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "num_nextn_predict_layers": 1}))


def make_states(folder: Path) -> None:
    """Three layers of linear attention (gated delta net), which keep states, to one with KV."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    save(Qwen3NextForCausalLM(config), folder, embedding=1.0)


def mixing(hidden: int) -> torch.Tensor:
    """What a draft makes of a token and of the hidden state before it: mostly the token."""
    draw = torch.Generator().manual_seed(7)
    return torch.cat([torch.eye(hidden), 0.02 * torch.randn(hidden, hidden, generator=draw)], 1)


def save(model: Any, folder: Path, *, embedding: float, layers: float = 0.08) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, embedding if "lm_head" in name or "embed" in name else layers)
    model.to(torch.float32).save_pretrained(folder)


MAKERS = {
    "llama": make_tiny_llama,
    "latent": make_latent,
    "hybrid": make_hybrid,
    "seeing": make_seeing,
    "smollm2": make_smollm2,
    "eagle": make_eagle,
    "mtp": make_mtp,
    "states": make_states,
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]))
