from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

# Matrices this small are computed by one thread sooner than by several.
torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 74,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}


def make_model(kind: str) -> Any:
    """A reference model whose output depends on its context, unlike one with customary weights."""
    make_config, make, options = KINDS[kind]
    torch.manual_seed(11)
    return telling(make(make_config(**SIZES, **options)))


def telling(model: Any) -> Any:
    """The model with weights that let every token before the last one tell on its output."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.0 if "lm_head" in name or "embed" in name else 0.15)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.3)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders with small checkpoints, made once for all tests of a process."""
    made: dict[str, tuple[Path, Any]] = {}

    def checkpoint(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            model = make_model(kind)
            model.save_pretrained(folder)
            made[kind] = (folder, model)
        return made[kind]

    return checkpoint
