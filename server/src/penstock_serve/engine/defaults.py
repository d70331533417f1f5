"""Defaults of the engine: sizes of the cache and of handoffs, and options of sampling.

`penstock serve` and `penstock_serve.LLM` share them, so that they give equal answers. The options
of sampling are:

1. those of the model's `generation_config.json`, as in other servers (`do_sample` false: greedy);
2. for the default model, which has no such file, greedy;
3. otherwise OpenAI's defaults.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from penstock import DType, HandoffSettings
from penstock.config import (
    DEVICE_NAME,
    Config,
    HandoffTable,
    TierSettings,
    load_completed,
    parse_completed,
)
from penstock.errors import ConfigError
from penstock.toolkit import gib, memory_limits, read_text
from penstock_serve.engine.checkpoints import DEFAULT_NAME
from penstock_serve.engine.sampling_options import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.checkpoints import ModelFiles

BLOCKS = 512
"""With 16 tokens each, one whole context of the default model: 0.4 GB of float32."""
HOST_GIB = 1.0
ENGINE_MODEL = "the engine's model"
"""Stands for the name of the model in a configuration that was read and not yet completed."""
HOST_TIER = "host"


def load_engine_config(path: str | Path) -> Config:
    """Reads a configuration file for an engine: it may leave out the model and all tiers.

    Raises `ConfigError`: the file cannot be read, or says something that has no meaning.
    """
    return load_completed(path, complete)


def complete(document: dict[str, object]) -> None:
    """Adds what an engine's file may leave out."""
    document.setdefault("model", {"name": ENGINE_MODEL})
    cache = document.setdefault("cache", {})
    if isinstance(cache, dict) and "blocks" not in cache and not document.get("tiers"):
        cache["blocks"] = BLOCKS
        if "tiers" not in document:
            document["tiers"] = [{"name": HOST_TIER, "kind": "host", "gib": HOST_GIB}]


def config_of(model: ModelFiles, given: Config | None, *, dtype: str) -> Config:
    """The configuration of an engine: the given one, completed by what the model determines."""
    config = given or parse_completed("version = 1", complete)
    # Keys depend on the weights and on the dtype of the KV.
    version = config.model.weights_version or model.weights_version()
    name = model.name if config.model.name == ENGINE_MODEL else config.model.name
    named = replace(config.model, name=name, weights_version=version, kv_dtype=dtype)
    cache = config.cache
    if cache.device is None:
        cache = replace(cache, device=TierSettings(name=DEVICE_NAME, slot_count=BLOCKS))
    return replace(config, model=named, cache=cache)


def require_memory(
    config: Config, architecture: Architecture, *, dtype: str, instances: float = 1
) -> None:
    """Refuses a model that does not fit into memory: the kernel would kill the process.

    Raises `ConfigError`: weights and blocks need more memory than is available.
    """
    device = config.cache.device
    assert device is not None
    weights = sum(prod(shape) for _, shape in architecture.tensor_shapes())
    token = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim
    blocks = device.slot_count * config.cache.block_tokens * token
    needed = int((weights + blocks) * DType.parse(dtype).itemsize * instances)
    tightest = min(memory_limits(read_text), key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and needed > tightest.available_bytes:
        raise ConfigError(
            "engine.model",
            f"needs {gib(needed)} for weights and device blocks of {instances:g} "
            f"instances in {dtype}, must need at most the {gib(tightest.available_bytes)} "
            f"that are available: {tightest.source}",
        )


OF_OPENAI = Sampling(temperature=1.0)
GREEDY = Sampling(temperature=0.0)
"""For the default model. At temperature 0.2 with `top_p` 0.9, which its authors recommend, two of
three answers of a model of its size do not name the capital of France."""
FILE = "generation_config.json"


def defaults_of(model: ModelFiles) -> Sampling:
    """The options of sampling that a request does not set.

    Raises `ConfigError`: its file has a value that cannot be used.
    """
    if model.name == DEFAULT_NAME:
        return GREEDY
    path = model.path / FILE
    return _read(path) if path.is_file() else OF_OPENAI


def _read(path: Path) -> Sampling:
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
        return replace(OF_OPENAI, **found)
    except ValueError as error:
        raise ConfigError("model", f"has a {FILE} in which {error}") from error


def handoff_settings(config: Config, device: str) -> HandoffSettings:
    """Times and bounds of the parties on a device.

    Raises `ConfigError`: they do not fit each other; it names the key.
    """
    return HandoffSettings.of_table(config.handoff or HandoffTable(), on_gpu=device != "cpu")
