"""A small Llama with random weights, made from a config: nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 2048


def make_tiny_llama(folder: Path) -> Path:
    """Writes the model to a folder.

    The weights are wider than usual: with the customary spread the output hardly depends on
    the context, and a test that compares outputs would not notice wrong KV.
    """
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
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


if __name__ == "__main__":
    make_tiny_llama(Path(sys.argv[1]))
