"""What a request gets that says nothing about how its tokens are chosen: it depends on the model.

1. What the model's `generation_config.json` says, as in other servers. One that does not sample
   takes the most likely token.
2. For the default model, which has no such file, the most likely token.
3. OpenAI's defaults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.checkpoints import DEFAULT_NAME
from penstock.engine.wishes import Sampling
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.engine.checkpoints import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """How tokens are chosen unless a request says otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


CALM = Defaults(temperature=0.0)
"""For the default model. One of its size answers questions with nonsense otherwise: at 0.2 with
`top_p` 0.9, which its authors recommend, two of three answers do not name the capital of France."""
FILE = "generation_config.json"


def defaults_of(model: Model) -> Defaults:
    """The defaults of a model.

    Raises:
        ConfigError: its file has a value that cannot be used.
    """
    if model.name == DEFAULT_NAME:
        return CALM
    path = model.path / FILE
    return _read(path) if path.is_file() else Defaults()


def _read(path: Path) -> Defaults:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", f"has a {FILE} that is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError("model", f"has a {FILE} that is no JSON object")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: given[name] for name in names if given.get(name) is not None}
    for name, value in found.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ConfigError(
                "model",
                f"has {name} {value!r} in {FILE}, must be a {'whole ' if whole else ''}number",
            )
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        Sampling(**found)
    except ValueError as error:
        raise ConfigError("model", f"has a {FILE} in which {error}") from error
    return Defaults(**found)
