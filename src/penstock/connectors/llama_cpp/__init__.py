"""Prompts of llama-cpp-python, found again over processes and restarts.

    llm.set_cache(penstock.llama_cpp.open(llm, "penstock.toml"))

Public: `open`, and in `cache` what it returns: `cache.StateCache`.

The one rule: whatever fails here, the answer is right without us, and one line says what failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.connectors.llama_cpp.cache import open as open  # noqa: A004

__all__ = ["open"]


def __getattr__(name: str) -> object:
    # Imported on first use: llama_cpp loads its library.
    if name in __all__:
        from penstock.connectors.llama_cpp import cache  # noqa: PLC0415

        return cache.open
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
