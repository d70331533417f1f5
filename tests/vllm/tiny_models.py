"""Small models with random weights, one of each kind of KV, and a trained one: all offline.

    python tiny_models.py llama|latent|hybrid|seeing|smollm2 FOLDER

The weights are wider than usual: with the customary spread the output hardly depends on the
context, and a test that compares outputs would not notice wrong KV.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from smollm2 import make_smollm2
from tiny_llama import VOCABULARY, make_tiny_llama
from tiny_seeing import make_seeing
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
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


def save(model: Any, folder: Path, *, embedding: float) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, embedding if "lm_head" in name or "embed" in name else 0.08)
    model.to(torch.float32).save_pretrained(folder)


MAKERS = {
    "llama": make_tiny_llama,
    "latent": make_latent,
    "hybrid": make_hybrid,
    "seeing": make_seeing,
    "smollm2": make_smollm2,
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]))
