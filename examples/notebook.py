"""A notebook's day with a model of transformers: one document, some questions, a restart.

    python examples/notebook.py [MODEL [FOLDER]]

MODEL is what `from_pretrained` takes, FOLDER where its prompts are kept; without them, a tiny model
with random weights and an empty folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock

CONFIG = """
version = 1
model.name = "notebook"
tiers = [
    {{ name = "host", kind = "host", gib = 0.25 }},
    {{ name = "disk", kind = "disk", path = "{folder}", gib = 1, write = "write_through" }},
]
"""
QUESTIONS = 3


def tiny_model(folder: Path) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=256, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def ask(model: torch.nn.Module, folder: Path) -> None:
    """One run of the notebook, from opening the cache to the end of the kernel."""
    document = torch.arange(1_000)[None] % 200 + 3  # What a tokenizer would return.
    config = penstock.parse_config(CONFIG.format(folder=folder))
    with penstock.transformers.open(model, config) as cache:
        for question in range(QUESTIONS):
            input_ids = torch.cat([document, torch.full((1, 8), 210 + question)], dim=1)
            began = time.perf_counter()
            prompt = cache.prompt(input_ids, torch.ones_like(input_ids))
            with prompt as kv:
                model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    past_key_values=kv,
                    max_new_tokens=1,
                )
            took = time.perf_counter() - began
            cached = prompt.cached_tokens[0]
            print(f"question {question}: {cached} of {input_ids.shape[1]} cached, {took:.2f} s")
        print(cache.report())


def main(given: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        name = given[0] if given else tiny_model(Path(made) / "model")
        folder = Path(given[1]) if len(given) > 1 else Path(made) / "prompts"
        model = AutoModelForCausalLM.from_pretrained(name)
        for run in ("first run", "after a restart"):
            print(f"{run}:")
            ask(model, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
