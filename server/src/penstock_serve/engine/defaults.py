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
    TIER_KINDS,
    UNSIZED_BLOCKS,
    CacheSettings,
    Config,
    HandoffTable,
    ModelSettings,
    TierKind,
    TierSettings,
    load_completed,
)
from penstock.errors import ConfigError
from penstock.toolkit import gib, memory_limits, read_text
from penstock_serve.engine.checkpoints import DEFAULT_NAME
from penstock_serve.engine.sampling_options import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.config import Value
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.checkpoints import ModelFiles

BLOCKS = 512
"""With 16 tokens each, one whole context of the default model: 0.4 GB of float32."""
HOST_GIB = 1.0
ENGINE_MODEL = "the engine's model"
"""Stands for the name of the model in a configuration that was read and not yet completed."""
HOST_TIER = "host"
DISK_TIER = "disk"


def load_engine_config(path: str | Path) -> Config:
    """Reads a configuration file for an engine: it may leave out the model and all tiers.

    Raises `ConfigError`: the file cannot be read, or says something that has no meaning.
    """
    return load_completed(path, _complete)


def _complete(document: dict[str, object]) -> None:
    document.setdefault("model", {"name": ENGINE_MODEL})
    cache = document.setdefault("cache", {})
    if isinstance(cache, dict) and "blocks" not in cache and not document.get("tiers"):
        cache["blocks"] = BLOCKS
        if "tiers" not in document:
            document["tiers"] = [{"name": HOST_TIER, "kind": "host", "gib": HOST_GIB}]


def config_of(model: ModelFiles, given: Config | None, *, dtype: str) -> Config:
    """The configuration of an engine: the given one, completed by what the model determines."""
    config = given or _starting_config(model)
    # Keys depend on the weights and on the dtype of the KV.
    version = config.model.weights_version or model.weights_version()
    name = model.name if config.model.name == ENGINE_MODEL else config.model.name
    named = replace(config.model, name=name, weights_version=version, kv_dtype=dtype)
    cache = config.cache
    if cache.device is None:
        cache = replace(cache, device=TierSettings(name=DEVICE_NAME, slot_count=BLOCKS))
    return replace(config, model=named, cache=cache)


def _starting_config(model: ModelFiles) -> Config:
    cache, kinds = with_host_tier(
        CacheSettings(device=TierSettings(name=DEVICE_NAME, slot_count=BLOCKS)), (), HOST_GIB
    )
    return Config(model=ModelSettings(name=model.name), cache=cache, tier_kinds=kinds)


def with_host_tier(
    cache: CacheSettings, kinds: tuple[TierKind, ...], gib: float
) -> tuple[CacheSettings, tuple[TierKind, ...]]:
    """The tiers and their kinds, with `gib` of host memory as the first tier; 0: none."""
    below, kinds_below = cache.tiers, kinds
    if kinds and kinds[0].name == "host":
        below, kinds_below = below[1:], kinds[1:]
    if gib == 0:
        return replace(cache, tiers=below), kinds_below
    host = TierSettings(name=HOST_TIER, slot_count=UNSIZED_BLOCKS)
    kind = TierKind(name="host", options={**_defaults_of("host"), "gib": gib})
    return replace(cache, tiers=(host, *below)), (kind, *kinds_below)


def _defaults_of(kind: str) -> dict[str, Value]:
    """The keys of a kind of tier that need not be given."""
    defaults = {name: key.default for name, key in TIER_KINDS[kind].items()}
    return {name: value for name, value in defaults.items() if value is not None}


def with_disk_tier(
    cache: CacheSettings, kinds: tuple[TierKind, ...], path: str, gib: float
) -> tuple[CacheSettings, tuple[TierKind, ...]]:
    """The tiers and their kinds, with `gib` of disk in the folder `path` as the last tier."""
    kept = [index for index, kind in enumerate(kinds) if kind.name != DISK_TIER]
    disk = TierSettings(name=DISK_TIER, slot_count=UNSIZED_BLOCKS, stored=True)
    options = {**_defaults_of(DISK_TIER), "path": path, "gib": gib}
    kind = TierKind(name=DISK_TIER, options=options)
    tiers = (*(cache.tiers[index] for index in kept), disk)
    return replace(cache, tiers=tiers), (*(kinds[index] for index in kept), kind)


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
