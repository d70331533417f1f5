"""Prefix reuse for a model of transformers, over calls, processes and restarts.

    cache = penstock.transformers.open(model, "penstock.toml")
    with cache.prompt(inputs.input_ids, inputs.attention_mask) as kv:
        out = model.generate(**inputs, past_key_values=kv, max_new_tokens=200)

Public: `open`, and in `cache` what it returns: `cache.PromptCache`, `cache.PromptBatch`.

The one rule: whatever fails here, `generate` gives the right answer without us. A model whose cache
is not understood, blocks that did not arrive, weights that were changed: the prompt is computed,
counted as a miss, and the reason is one line of the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.transformers.cache import open as open  # noqa: A004

__all__ = ["open"]


def __getattr__(name: str) -> object:
    # Imported on first use: torch and transformers take seconds.
    if name in __all__:
        from penstock.connectors.transformers import cache  # noqa: PLC0415

        return cache.open
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
