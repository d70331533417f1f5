"""A small Llama with random weights, and adapters for it: nothing is downloaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 4, 4, 2, 32
RANK = 8


def make_tiny_llama(folder: Path) -> Path:
    """Writes the model to a folder.

    The weights are wider than usual: with the customary spread the output hardly depends on
    the context, and a test that compares outputs would not notice wrong KV.
    """
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                wide = 1.0 if "lm_head" in name or "embed" in name else 0.08
                weight.normal_(0, wide)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def make_tiny_adapter(folder: Path, seed: int) -> Path:
    """Writes a LoRA adapter for K and V: with it, every block of KV is another one."""
    draw = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            out = KV_HEADS * HEAD_DIM
            weights[f"{path}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=draw) * 0.2
            weights[f"{path}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    make_tiny_llama(Path(sys.argv[1]))
