"""Tiny models with random weights as GGUF files, and what `Llama` says with and without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import numpy as np
from llama_cpp import Llama, LogitsProcessorList

import penstock

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WIDTH, LAYERS, CONTEXT = 64, 2, 256
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
CONFIG = """
version = 1
model = {{ name = "tiny", weights_version = "{version}" }}
tiers = [
    {{ name = "host", kind = "host", gib = 0.01 }},
    {{ name = "disk", kind = "disk", path = "{folder}", gib = {gib} }},
]
"""
ATTENTION = {
    "attn_q": (WIDTH, WIDTH),
    "attn_k": (WIDTH // 2, WIDTH),
    "attn_v": (WIDTH // 2, WIDTH),
    "attn_output": (WIDTH, WIDTH),
    "ffn_gate": (2 * WIDTH, WIDTH),
    "ffn_up": (2 * WIDTH, WIDTH),
    "ffn_down": (WIDTH, 2 * WIDTH),
}
MAMBA = {
    "ssm_in": (4 * WIDTH, WIDTH),
    "ssm_conv1d": (2 * WIDTH, 4),
    "ssm_x": (4 + 32, 2 * WIDTH),
    "ssm_dt": (2 * WIDTH, 4),
    "ssm_out": (WIDTH, 2 * WIDTH),
}
ONES = {
    "llama": {"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)},
    "cohere2": {"attn_norm.weight": (WIDTH,)},
    "mamba": {
        "attn_norm.weight": (WIDTH,),
        "ssm_conv1d.bias": (2 * WIDTH,),
        "ssm_dt.bias": (2 * WIDTH,),
        "ssm_d": (2 * WIDTH,),
        "ssm_a": (2 * WIDTH, 16),
    },
}
"""What is no matrix in a layer. `cohere2` has sliding windows, `mamba` is recurrent."""


def write_model(path: Path, family: str = "llama", *, seed: int = 0) -> Path:
    drawn = np.random.default_rng(seed)
    file = gguf.GGUFWriter(path, family)
    file.add_context_length(2 * CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(2 * WIDTH)
    file.add_head_count(2)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_layer_norm_eps(1e-5)
    file.add_tokenizer_model("llama")
    file.add_token_list(TOKENS)
    file.add_token_scores([0.0] * len(TOKENS))
    file.add_token_types([2, 3, 3] + [6] * 256)
    if family == "mamba":
        file.add_ssm_conv_kernel(4)
        file.add_ssm_inner_size(2 * WIDTH)
        file.add_ssm_state_size(16)
        file.add_ssm_time_step_rank(4)
    if family == "cohere2":
        file.add_sliding_window(64)
        file.add_logit_scale(1.0)
    layer = MAMBA if family == "mamba" else ATTENTION
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output": (len(TOKENS), WIDTH)}
    if family == "cohere2":
        del shapes["output"]
    file.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    for number in range(LAYERS):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
        for name, shape in ONES[family].items():
            ones = np.ones(shape, dtype=np.float32)
            file.add_tensor(f"blk.{number}.{name}", -ones if name == "ssm_a" else ones)
    for name, shape in shapes.items():
        weights = 0.3 * drawn.standard_normal(shape)
        file.add_tensor(f"{name}.weight", weights.astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def load(path: Path, **settings: Any) -> Llama:
    usual = {"n_ctx": CONTEXT, "n_threads": 1, "n_threads_batch": 1, "seed": 7, "verbose": False}
    return Llama(str(path), **(usual | settings))


def config_in(folder: Path, *, gib: float = 0.01, version: str = "") -> penstock.Config:
    return penstock.parse_config(CONFIG.format(folder=folder, gib=gib, version=version))


def with_cache(path: Path, config: penstock.Config, **settings: Any) -> Llama:
    llm = load(path, **settings)
    llm.set_cache(penstock.llama_cpp.open(llm, config))
    return llm


def prompt_of(count: int, *, seed: int = 1) -> list[int]:
    return [1, *map(int, np.random.default_rng(seed).integers(35, 250, count - 1))]


class Answer(NamedTuple):
    """What a model said."""

    text: str
    logits: NDArray[np.single]
    """Of each token: `[token, vocabulary]`."""


def answer(llm: Llama, prompt: list[int], **wishes: Any) -> Answer:
    rows: list[NDArray[np.single]] = []

    def keep(_: object, scores: NDArray[np.single]) -> NDArray[np.single]:
        rows.append(scores.copy())
        return scores

    said = llm.create_completion(
        prompt,
        logits_processor=LogitsProcessorList([keep]),
        **{"max_tokens": 4, "temperature": 0.0, **wishes},
    )
    return Answer(said["choices"][0]["text"], np.stack(rows))
