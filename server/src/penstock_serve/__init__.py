"""A reference engine and a server with OpenAI's API on the KV cache of Penstock.

    llm = penstock_serve.LLM("MODEL")      # answers prompts in this process

`cli` has the commands `penstock serve`, `router`, `demo`, `load`, `status`, `top`, `dashboard` and
`cache`. Engines that have a server of their own need the wheel `penstock` alone. Loggers have names
below `penstock`, so that its level and handlers are those of the server, too.

The one rule: this package imports the exported names of `penstock` only (pyproject.toml lists the
modules), so what it needs, any other engine can have.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_serve.engine.llm import LLM as LLM
    from penstock_serve.engine.llm import Completion as Completion
else:
    # Processes of the server import parts of the package, and most need no engine.
    _ENGINE = ("LLM", "Completion")

    def __getattr__(name: str) -> object:
        if name not in _ENGINE:
            raise AttributeError(f"module 'penstock_serve' has no attribute {name!r}")
        engine = import_module("penstock_serve.engine.llm")
        return globals().setdefault(name, getattr(engine, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ENGINE})
