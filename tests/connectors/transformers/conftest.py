"""Small models of transformers with random weights, and answers with and without the cache."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen3Config,
)

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.connectors.transformers.cache import PromptCache

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOW = 32
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen 3": Qwen3Config(**SIZES, head_dim=16),
    "Mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "Gemma 3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "GPT-OSS": GptOssConfig(
        **SIZES,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "DeepSeek V3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **EXPERTS,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "Phi 3": Phi3Config(**SIZES),
    # The shape of SmolLM2-135M, smaller: nine heads, three of them with KV, tied embeddings.
    "SmolLM2": LlamaConfig(
        **{
            **SIZES,
            "hidden_size": 72,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        }
    ),
}
SMALL = """
version = 1
model.name = "small"
cache.block_tokens = 8
tiers = [{ name = "host", kind = "host", gib = 0.01 }]
"""
LARGEST = 1e-6
"""By how much logits may differ: sums of float32 are added up in another order."""


@cache
def model_of(name: str) -> Any:
    """A model, made once: a test that changes one makes its own."""
    return new_model(CONFIGS[name])


def new_model(config: Any, *, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_with_disk(folder: Path, *, weights: str = "1", gib: float = 0.02) -> penstock.Config:
    return penstock.parse_config(
        SMALL.replace("tiers = [", f'model.weights_version = "{weights}"\ntiers = [').replace(
            "}]",
            f'}}, {{ name = "disk", kind = "disk", path = "{folder}", gib = {gib}, '
            'write = "write_through" }]',
        )
    )


def tokens_of(count: int, *, seed: int = 1) -> torch.Tensor:
    """A prompt: one row, without the token for padding."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.tensor([[int(torch.randint(1, 256, (1,), generator=drawn)) for _ in range(count)]])


def padded(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with padding on the left, and its mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, width - row.shape[1] :] = row[0]
        mask[number, width - row.shape[1] :] = 1
    return ids, mask


class Answer(NamedTuple):
    """What `generate` returned."""

    sequences: torch.Tensor
    logits: torch.Tensor


def answer(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, kv: Any = None, **wishes: Any
) -> Answer:
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=kv,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{"max_new_tokens": 4, **wishes},
    )
    return Answer(out.sequences, torch.stack(out.logits))


class Compared(NamedTuple):
    """An answer with the cache, beside the one without."""

    cached: tuple[int, ...]
    equal: bool
    largest: float
    """Difference of logits."""

    @property
    def right(self) -> bool:
        return self.equal and self.largest <= LARGEST


def compare(
    cache: PromptCache,
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    keep: bool = False,
    copies: int = 1,
    **wishes: Any,
) -> Compared:
    mask = torch.ones_like(ids) if mask is None else mask
    plain = answer(model, ids, mask, **wishes)
    with (prompt := cache.prompt(ids, mask, copies=copies)) as kv:
        found = answer(model, ids, mask, kv, **wishes)
        if keep:
            prompt.keep(found.sequences)
    return Compared(
        prompt.cached_tokens,
        found.sequences.equal(plain.sequences),
        float((found.logits - plain.logits).abs().max()),
    )


@pytest.fixture
def llama() -> Any:
    return model_of("Llama")


@pytest.fixture
def small(llama: Any) -> Iterator[PromptCache]:
    """A cache in host memory for the first of the models."""
    with penstock.transformers.open(llama, penstock.parse_config(SMALL)) as opened:
        yield opened
