"""Penstock keeps the KV cache of LLM serving.

    cache = penstock.open("penstock.toml", kv=arrays)      # Penstock manages the device blocks
    offload = penstock.open_offload("penstock.toml", kv=arrays)      # the engine does
    prefill = penstock.open_prefill(pair, kv=arrays)       # KV goes to another engine
    decode = penstock.open_decode(pair, kv=arrays)         # KV comes from another engine

docs/api.md describes them; everything an engine needs is exported here, from `exports.py`.

The one rule: this file loads nothing. Every import of a part of the package runs it, and small
processes such as the supervisor need none of the exports; those are loaded when the first of
them is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.exports import *  # noqa: F403
    from penstock.tiers.tensors import TensorTier as TensorTier
else:
    # torch is optional, and takes seconds to load: nothing but the name itself asks for it.
    _NEED_TORCH = {"TensorTier": "penstock.tiers.tensors"}

    def __getattr__(name: str) -> object:
        if name in _NEED_TORCH:
            return globals().setdefault(name, getattr(import_module(_NEED_TORCH[name]), name))
        exports = {} if name.startswith("_") else vars(import_module("penstock.exports"))
        if name in globals():  # A part of the package, which came with the exports.
            return globals()[name]
        if name not in exports:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        return globals().setdefault(name, exports[name])

    def __dir__() -> list[str]:
        return sorted({*globals(), *_NEED_TORCH, *vars(import_module("penstock.exports"))})
