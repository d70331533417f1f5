"""A small Llama with random weights for `lab bench vllm`: nothing is downloaded.

python -m lab.bench.vllm_model FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

LAYERS, KV_HEADS, HEAD_DIM = 8, 2, 64
"""A token takes 8 KiB of KV and 100 million operations, 12 for a byte. Llama 3 8B in bfloat16 takes
120 for a byte: there, a copied byte spares ten times as much."""
HIDDEN = 768
VOCABULARY = 2048


def block_bytes(block_tokens: int) -> int:
    """Bytes of a block in float32."""
    return 2 * LAYERS * KV_HEADS * HEAD_DIM * block_tokens * 4


def make_model(folder: Path) -> None:
    """Writes the model to a folder."""
    import torch  # noqa: PLC0415 - only where vLLM is
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=8 * HIDDEN // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // HEAD_DIM,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
