"""Penstock keeps the KV cache of LLM serving.

    cache = penstock.open("penstock.toml", kv=arrays)      # Penstock manages the device blocks
    offload = penstock.open_offload("penstock.toml", kv=arrays)      # the engine does
    prefill = penstock.open_prefill(pair, kv=arrays)       # KV goes to another engine
    decode = penstock.open_decode(pair, kv=arrays)         # KV comes from another engine
    cache = penstock.transformers.open(model, "penstock.toml")       # prompts of transformers
    cache = penstock.llama_cpp.open(llm, "penstock.toml")            # prompts of llama-cpp-python

docs/api.md describes them; everything an engine needs is exported here, from `exports.py`.

The one rule: this file loads nothing. Every import of a part of the package runs it, and small
processes such as the supervisor need none of the exports; those are loaded when the first of
them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.connectors import llama_cpp as llama_cpp
    from penstock.connectors import transformers as transformers
    from penstock.exports import *  # noqa: F403
    from penstock.tiers.tensors import TensorTier as TensorTier
else:
    _EXPORTS = "penstock.exports"
    # torch is optional, and takes seconds to load: nothing but the name itself asks for it.
    _NEED_TORCH = frozenset({"TensorTier"})
    # Each is a package of its own, beside what it is for.
    _CONNECTORS = frozenset({"llama_cpp", "transformers"})

    def __getattr__(name: str) -> object:
        from penstock.lazy_names import homes_of, import_module, load_name  # noqa: PLC0415

        if name in _NEED_TORCH:
            value = load_name("penstock.tensors", name)
        elif name in _CONNECTORS:
            value = import_module(f"penstock.connectors.{name}")
        elif name in homes_of(_EXPORTS):
            value = load_name(_EXPORTS, name)
        else:
            if not name.startswith("_"):
                import_module(_EXPORTS)  # A part of the package may have come with it.
            if name not in globals():
                raise AttributeError(f"module 'penstock' has no attribute {name!r}")
            value = globals()[name]
        return globals().setdefault(name, value)

    def __dir__() -> list[str]:
        from penstock.lazy_names import homes_of  # noqa: PLC0415

        return sorted({*globals(), *_NEED_TORCH, *_CONNECTORS, *homes_of(_EXPORTS)})
