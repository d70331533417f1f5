"""The first token of questions about one document, by transformers: with the cache and without.

A round asks each side one question, in turns: plain `generate`, and `generate` with what the cache
has of the document. The time of the second is that of looking up, loading and computing; saving is
a row of its own. Weights are random: only shapes matter for the time. All answers are compared.
"""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock
from lab.bench.measure import interleave, summarize, times_faster

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lab.bench.report import BenchReport, Param
    from penstock.connectors.transformers.cache import PromptCache

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    },
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Of a small model for tests, SmolLM2-135M, and Llama 3.1 8B."""
QUESTION_TOKENS = 32
CONFIG = """
version = 1
model.name = "bench"
model.weights_version = "random"
tiers = [
    {{ name = "host", kind = "host", gib = {gib} }},
    {{ name = "disk", kind = "disk", path = "{folder}", gib = {gib}, write = "write_through" }},
]
"""


class Asked(NamedTuple):
    """One question, answered by one token."""

    first_s: float
    rest_s: float
    """After the token: what is saved."""
    token: int


class Sides:
    """The same questions for both sides, each in its own order."""

    def __init__(self, model: PreTrainedModel, *, document_tokens: int) -> None:
        self._model = model
        drawn = torch.Generator().manual_seed(0)
        vocabulary = model.config.vocab_size
        self._document = torch.randint(3, vocabulary, (1, document_tokens), generator=drawn)
        self._asked = {"plain": 0, "cached": 0}

    def _next(self, side: str) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(1 + self._asked[side])
        self._asked[side] += 1
        question = torch.randint(3, 256, (1, QUESTION_TOKENS), generator=drawn)
        ids = torch.cat([self._document, question], dim=1).to(self._model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _first_token(self, inputs: dict[str, torch.Tensor], kv: object) -> int:
        found = self._model.generate(
            **inputs, past_key_values=kv, max_new_tokens=1, do_sample=False
        )
        return int(found[0, -1])

    def plain(self) -> Asked:
        """Computes all of a question."""
        inputs = self._next("plain")
        began = time.perf_counter()
        token = self._first_token(inputs, None)
        return Asked(time.perf_counter() - began, 0.0, token)

    def cached(self, cache: PromptCache) -> Asked:
        """Computes what the cache does not have."""
        inputs = self._next("cached")
        began = time.perf_counter()
        with cache.prompt(**inputs) as kv:
            token = self._first_token(inputs, kv)
            first = time.perf_counter()
        return Asked(first - began, time.perf_counter() - first, token)


def make_model(shape: str, device: str) -> PreTrainedModel:
    """A model of that shape with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=131072, eos_token_id=None, pad_token_id=0
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def run_transformers(
    report: BenchReport, *, shape: str, device: str, tokens: int, rounds: int
) -> None:
    """Measures both sides; then the first question after a restart, whose document is on disk."""
    report.progress(f"making a model: shape={shape}")
    model = make_model(shape, device)
    sides = Sides(model, document_tokens=tokens)
    sizes = SHAPES[shape]
    heads = sizes.get("num_key_value_heads", sizes["num_attention_heads"])
    channels = sizes["hidden_size"] // sizes["num_attention_heads"]
    token_bytes = 2 * sizes["num_hidden_layers"] * heads * channels * model.dtype.itemsize
    gib = round(0.1 + 2 * token_bytes * (tokens + rounds * QUESTION_TOKENS) / (1 << 30), 2)
    with tempfile.TemporaryDirectory() as made:
        config = penstock.parse_config(CONFIG.format(folder=f"{made}/disk", gib=gib))
        with penstock.transformers.open(model, config) as cache:
            report.progress("warming up")
            warm = [sides.plain(), sides.cached(cache)]
            report.progress(f"asking {rounds} questions of each side")
            found = interleave(
                {"plain": sides.plain, "cached": lambda: sides.cached(cache)}, rounds
            )
            report.add_note(str(cache.report()).replace("\n", "; "))
        with penstock.transformers.open(model, config) as cache:
            report.progress("asking after a restart")
            again = sides.cached(cache)
    params: dict[str, Param] = {"shape": shape, "device": device, "tokens": tokens}
    first = {side: [each.first_s for each in asked] for side, asked in found.items()}
    for side, seconds in {
        **first,
        "cached, saving": [each.rest_s for each in found["cached"]],
        "the document, saving": [warm[1].rest_s],
        "cached, after a restart": [again.first_s],
    }.items():
        report.add_row(
            bench="transformers",
            side=side,
            params=params,
            metric="time",
            unit="s",
            summary=summarize(seconds),
        )
    answers = zip(found["plain"], found["cached"], strict=True)
    differing = sum(plain.token != cached.token for plain, cached in answers)
    report.add_note(f"{differing} of {rounds} first tokens differ")
    faster = times_faster(first["cached"], first["plain"])
    report.add_ratio("first token, times sooner", faster, at_least=1.0)
