"""From a configuration to what is served: every setting in effect, checked before anything starts.

One rule: what would fail in an instance fails here first, with one line, before any process is
started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.settings import CacheSettings, TierSettings
from penstock.config import Config, ModelSettings, TierKind, parse_config
from penstock.config.schema import TIER_KINDS, UNSIZED_BLOCKS
from penstock.config.serving import EngineTable, ServeTable
from penstock.config.values import DEVICE_NAME
from penstock.engine.checkpoints import find_model
from penstock.engine.sharding import share_of
from penstock.engine.spec import EngineSpec, InstanceSpec, PairSpec, Role
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.architecture import Architecture
    from penstock.engine.checkpoints import Model

BLOCKS = 512
"""With 16 tokens each, one whole context of the default model: 0.4 GB of float32."""
HOST_GIB = 1.0
HOST_TIER = "host"
TableT = TypeVar("TableT", EngineTable, ServeTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command line says; `None` leaves it to the file, or to the default."""

    model: str | None = None
    tp: int | None = None
    host_gib: float | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    instances: int | None = None
    role: str | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None


def settle(config: Config | None, wishes: Wishes) -> Config:
    """Every setting in effect: from the file, if there is one, changed by the command line.

    Raises:
        ConfigError: something is wrong with the model or with a setting.
        UnavailableError: the default model is not installed.
    """
    engine = _changed(
        (config and config.engine) or EngineTable(),
        model=wishes.model,
        role=wishes.role,
        **_pair_of(wishes),
        dtype=wishes.dtype,
        device=wishes.device,
    )
    serve = _changed(
        (config and config.serve) or ServeTable(),
        host=wishes.host,
        port=wishes.port,
        api_key=wishes.api_key,
        instances=wishes.instances,
    )
    model = find_model(engine.model or None)
    architecture, checkpoint = model.open()
    checkpoint.close()
    settled = _first(model) if config is None else config
    settled = replace(settled, engine=engine, serve=serve, model=_named(settled, model, engine))
    # Read back, so that what the command line says is held to the same bounds as a file.
    settled = parse_config(_sized(settled, wishes).to_toml())
    _require_sense(settled, architecture)
    return settled


def _pair_of(wishes: Wishes) -> dict[str, int | None]:
    """Who names the ranks of one role leaves the other one a single rank."""
    given = wishes.prefill_tp is not None or wishes.decode_tp is not None
    return {
        "prefill_tp": wishes.prefill_tp or (1 if given else None),
        "decode_tp": wishes.decode_tp or (1 if given else None),
    }


def instances_of(config: Config) -> tuple[InstanceSpec, ...]:
    """The instances of a settled configuration; their addresses are filled in when they start."""
    assert config.engine is not None
    assert config.serve is not None
    engine = config.engine
    # Several processes with a thread on every core each would mostly wait for each other.
    ranks = (engine.prefill_tp + engine.decode_tp) or config.cache.rank_count
    threads = max(1, len(os.sched_getaffinity(0)) // (ranks * config.serve.instances))
    config = replace(config, engine=replace(engine, threads=engine.threads or threads))
    found: list[InstanceSpec] = []
    for number in range(config.serve.instances if config.serve else 0):
        if not engine.prefill_tp:
            found.append(_instance(config, f"instance-{number}", Role(engine.role)))
            continue
        pair = PairSpec(
            prefill=EngineSpec(name=f"prefill-{number}", ranks=engine.prefill_tp, address=""),
            decode=EngineSpec(name=f"decode-{number}", ranks=engine.decode_tp, address=""),
        )
        found.append(_instance(config, pair.prefill.name, Role.PREFILL, pair))
        found.append(_instance(config, pair.decode.name, Role.DECODE, pair))
    return tuple(found)


def _instance(config: Config, name: str, role: Role, pair: PairSpec | None = None) -> InstanceSpec:
    engine = config.engine
    assert engine is not None
    ranks = config.cache.rank_count
    if pair is not None:
        ranks = pair.prefill.ranks if role is Role.PREFILL else pair.decode.ranks
    # What travels to the instances is visible to all who may list processes: no key in it.
    cache = replace(config.cache, rank_count=ranks)
    given = replace(config, engine=None, serve=None, cache=cache).to_toml()
    return InstanceSpec(
        name=name,
        model=engine.model or None,
        config=given,
        server="",
        ranks=ranks,
        role=role,
        pair=pair,
        dtype=engine.dtype,
        device=engine.device,
        step_tokens=engine.step_tokens,
        step_requests=engine.step_requests,
        waiting_max=engine.waiting_max,
        threads=engine.threads,
    )


def _changed(table: TableT, **wishes: str | int | None) -> TableT:
    given = {name: value for name, value in wishes.items() if value is not None}
    return replace(table, **given)  # type: ignore[arg-type]


def _first(model: Model) -> Config:
    """What is served when nobody says anything: the device, and host memory below it."""
    host = TierKind(name="host", options=_host_options(HOST_GIB))
    return Config(
        model=ModelSettings(name=model.name),
        cache=CacheSettings(
            device=TierSettings(name=DEVICE_NAME, slot_count=BLOCKS),
            tiers=(TierSettings(name=HOST_TIER, slot_count=UNSIZED_BLOCKS),),
        ),
        tier_kinds=(host,),
    )


def _host_options(gib: float) -> dict[str, int | float | str]:
    options = {name: key.default for name, key in TIER_KINDS["host"].items()}
    return {**options, "gib": gib}  # type: ignore[dict-item]


def _named(config: Config, model: Model, engine: EngineTable) -> ModelSettings:
    """Keys say which weights made the KV, and in which dtype it lies."""
    version = config.model.weights_version or model.weights_version()
    return replace(config.model, weights_version=version, kv_dtype=engine.dtype)


def _sized(config: Config, wishes: Wishes) -> Config:
    cache, kinds = config.cache, config.tier_kinds
    if cache.device is None:
        cache = replace(cache, device=TierSettings(name=DEVICE_NAME, slot_count=BLOCKS))
    assert cache.device is not None
    if wishes.blocks is not None:
        cache = replace(cache, device=replace(cache.device, slot_count=wishes.blocks))
    if wishes.block_tokens is not None:
        cache = replace(cache, block_tokens=wishes.block_tokens)
    if wishes.tp is not None:
        cache = replace(cache, rank_count=wishes.tp)
    if wishes.host_gib is not None:
        cache, kinds = _with_host(cache, kinds, wishes.host_gib)
    return replace(config, cache=cache, tier_kinds=kinds)


def _with_host(
    cache: CacheSettings, kinds: tuple[TierKind, ...], gib: float
) -> tuple[CacheSettings, tuple[TierKind, ...]]:
    """The tiers with so much host memory first; without any if it is 0."""
    below, kinds_below = cache.tiers, kinds
    if kinds and kinds[0].name == "host":
        below, kinds_below = below[1:], kinds[1:]
    if gib == 0:
        return replace(cache, tiers=below), kinds_below
    host = TierSettings(name=HOST_TIER, slot_count=UNSIZED_BLOCKS)
    kind = TierKind(name="host", options=_host_options(gib))
    return replace(cache, tiers=(host, *below)), (kind, *kinds_below)


def _require_sense(config: Config, architecture: Architecture) -> None:
    engine = config.engine
    assert engine is not None
    if engine.role != Role.BOTH.value:
        raise ConfigError(
            "engine.role",
            f"is {engine.role!r}, must be 'both': the two roles are started together, with "
            "engine.prefill_tp and engine.decode_tp",
        )
    for ranks in (engine.prefill_tp, engine.decode_tp) if engine.prefill_tp else (None,):
        count = ranks or config.cache.rank_count
        for rank in range(count):
            share_of(architecture, rank=rank, ranks=count)
    device = engine.device
    if device != "cpu":
        raise ConfigError(
            "engine.device",
            f"is {device!r}, must be 'cpu': the engine does not put its steps on a GPU in order "
            "with the copies of its blocks yet",
        )
