"""Small Llamas with random weights for `lab bench vllm`: nothing is downloaded.

python -m lab.bench.vllm_model FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

LAYERS, KV_HEADS, HEAD_DIM = 8, 2, 64
"""A token takes 8 KiB of KV and 100 million operations, 12 for a byte. Llama 3 8B in bfloat16 takes
120 for a byte: there, a copied byte spares ten times as much."""
HIDDEN = 768
VOCABULARY = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffModel:
    """The sizes of the model of `--handoff`: a prompt of 8,192 tokens takes seconds on one core.

    A token takes 4 KiB of KV and 6 million operations beside attention: far fewer for a byte than
    any model that is served, so that what a handoff costs is seen.
    """

    layers: int = 4
    hidden: int = 256
    kv_heads: int = 2
    head_dim: int = 64
    positions: int = 16384

    @property
    def token_bytes(self) -> int:
        """KV of a token in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


def block_bytes(block_tokens: int) -> int:
    """Bytes of a block in float32."""
    return 2 * LAYERS * KV_HEADS * HEAD_DIM * block_tokens * 4


def make_model(folder: Path) -> None:
    """Writes the model of the conversations to a folder."""
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


def make_handoff_model(folder: Path, sizes: HandoffModel) -> None:
    """Writes the model of `--handoff` to a folder, with a tokenizer of a word a token.

    The weights are wider than usual: otherwise the output hardly depends on the context, and wrong
    KV would not show in log-probabilities.
    """
    import torch  # noqa: PLC0415 - only where vLLM is
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415
    from tokenizers.pre_tokenizers import Whitespace  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=sizes.hidden,
            intermediate_size=8 * sizes.hidden // 3,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.hidden // sizes.head_dim,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=sizes.positions,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.0 if "lm_head" in name or "embed" in name else 0.06)
    model.to(torch.float32).save_pretrained(folder)
    words = Tokenizer(
        WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
