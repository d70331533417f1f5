"""The settings of `penstock serve`, and the specs of the instances that it starts.

The one rule: whatever would fail in an instance fails here first, with one line, before any process
is started.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.config import Config, parse_config
from penstock.config.values import EngineTable, ServeTable, require_address
from penstock.engine.checkpoints import find_model
from penstock.engine.defaults import (
    config_of,
    handoff_settings,
    require_memory,
    with_disk_tier,
    with_host_tier,
)
from penstock.engine.sharding import share_of
from penstock.engine.spec import EngineSpec, InstanceRole, InstanceSpec, PairSpec
from penstock.errors import ConfigError
from penstock.serve.role_secret import secret_between
from penstock.vocabulary.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.settings import CacheSettings
    from penstock.config import TierKind
    from penstock.engine.architecture import Architecture
    from penstock.transport.machine_keys import Secret

ROUTER = "router"
"""The role of a command that starts no instances and accepts those of other commands."""
TableT = TypeVar("TableT", EngineTable, ServeTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of the command line; `None`: the file's value, or the default."""

    model: str | None = None
    tp: int | None = None
    host_gib: float | None = None
    disk: str | None = None
    disk_gib: float | None = None
    blocks: int | None = None
    block_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: str | None = None
    drain_s: float | None = None
    log_level: str | None = None
    log_json: bool | None = None
    instances: int | None = None
    role: str | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None
    prefill_at: str | None = None
    decode_at: str | None = None
    router: str | None = None
    number: int | None = None
    keys_file: str | None = None


def settle(config: Config | None, options: ServeOptions) -> Config:
    """The complete configuration: the file's settings, overridden by the command line.

    Raises:
        ConfigError: the model or a setting is wrong.
        UnavailableError: the default model is not installed.
    """
    given = config.engine if config else None
    engine = _changed(given or EngineTable(), options, _pair_of(options, given))
    serve = _changed((config and config.serve) or ServeTable(), options, _key_of(options))
    model = find_model(engine.model or None)
    architecture, checkpoint = model.open()
    checkpoint.close()
    settled = config_of(model, config, dtype=engine.dtype)
    settled = replace(settled, engine=engine, serve=serve)
    # Parsed again, so that options of the command line are checked as those of a file are.
    settled = parse_config(_sized(settled, options).to_toml())
    assert settled.serve is not None
    settled = replace(settled, serve=replace(settled.serve, api_key=serve.api_key))
    _require_sense(settled, architecture)
    return settled


def serves_http(config: Config | None, options: ServeOptions) -> bool:
    """Whether this command serves HTTP, and not only instances for a router elsewhere."""
    engine, serve = (config and config.engine) or EngineTable(), (config and config.serve)
    role = engine.role if options.role is None else options.role
    router = (serve or ServeTable()).router if options.router is None else options.router
    return role == ROUTER or not router


def _pair_of(options: ServeOptions, table: EngineTable | None) -> dict[str, int | None]:
    """The ranks of a pair: if one side or a role is given, the other side has one rank."""
    role = options.role or (table.role if table else "")
    alone = role in {InstanceRole.PREFILL.value, InstanceRole.DECODE.value}
    given = alone or options.prefill_tp is not None or options.decode_tp is not None
    return {
        "prefill_tp": options.prefill_tp or (table and table.prefill_tp) or (1 if given else None),
        "decode_tp": options.decode_tp or (table and table.decode_tp) or (1 if given else None),
    }


def _key_of(options: ServeOptions) -> dict[str, str | None]:
    """A key of the command line overrides both keys of the file."""
    if options.api_key is not None and options.api_key_file is not None:
        raise ConfigError(
            "--api-key", "is given beside --api-key-file, must be only one of the two"
        )
    for option, given in (
        ("--api-key", options.api_key),
        ("--api-key-file", options.api_key_file),
    ):
        if given == "":
            raise ConfigError(option, "is empty, must be left out to serve without a key")
    if options.api_key is None and options.api_key_file is None:
        return {}
    return {"api_key": options.api_key or "", "api_key_file": options.api_key_file or ""}


def instances_of(config: Config) -> tuple[InstanceSpec, ...]:
    """The instances that this command starts; their local addresses are filled in at the start."""
    assert config.engine is not None
    assert config.serve is not None
    engine, serve = config.engine, config.serve
    if engine.role == ROUTER:
        return ()
    if engine.role != InstanceRole.BOTH.value:
        role = InstanceRole(engine.role)
        config = _threaded(config, _ranks_of(engine, role))
        pair = _pair_elsewhere(engine, serve.number)
        name = (pair.prefill if role is InstanceRole.PREFILL else pair.decode).name
        return (_instance(config, name, role, pair),)
    # If each of several processes had a thread on every core, they would slow each other down.
    ranks = (engine.prefill_tp + engine.decode_tp) or config.cache.rank_count
    config = _threaded(config, ranks * serve.instances)
    found: list[InstanceSpec] = []
    for number in range(serve.number, serve.number + serve.instances):
        if not engine.prefill_tp:
            found.append(_instance(config, f"instance-{number}", InstanceRole.BOTH))
            continue
        pair = _pair(engine, number)
        found.append(_instance(config, pair.prefill.name, InstanceRole.PREFILL, pair))
        found.append(_instance(config, pair.decode.name, InstanceRole.DECODE, pair))
    return tuple(found)


def _threaded(config: Config, ranks: int) -> Config:
    """Sets the torch threads of each rank: together about one on each core."""
    assert config.engine is not None
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return replace(config, engine=replace(config.engine, threads=config.engine.threads or threads))


def _ranks_of(engine: EngineTable, role: InstanceRole) -> int:
    return engine.prefill_tp if role is InstanceRole.PREFILL else engine.decode_tp


def _pair(engine: EngineTable, number: int) -> PairSpec:
    return PairSpec(
        prefill=EngineSpec(name=f"prefill-{number}", ranks=engine.prefill_tp, address=""),
        decode=EngineSpec(name=f"decode-{number}", ranks=engine.decode_tp, address=""),
    )


def _pair_elsewhere(engine: EngineTable, number: int) -> PairSpec:
    """The same with the addresses of both, which may be started by different commands."""
    pair = _pair(engine, number)
    host, port = require_address(
        "engine.prefill_at", engine.prefill_at, ports=1 + pair.prefill.ranks
    )
    ranks = [f"tcp://{host}:{port + 1 + rank}" for rank in range(pair.prefill.ranks)]
    change = msgspec.structs.replace
    return PairSpec(
        prefill=change(pair.prefill, address=engine.prefill_at, rank_addresses=ranks),
        decode=change(pair.decode, address=engine.decode_at),
    )


def secrets_of(config: Config) -> tuple[Secret, Secret]:
    """What this command shares with other ones: for the router and for the pair.

    Raises:
        ConfigError: `serve.keys_file` cannot be used.
        UnavailableError: the secret of this user can be neither read nor created.
    """
    engine, serve = config.engine, config.serve
    assert engine is not None
    assert serve is not None
    places = {"engine.prefill_at": engine.prefill_at, "engine.decode_at": engine.decode_at}
    router = secret_between(serve, {"serve.router": serve.router}) if serve.router else b""
    return router, secret_between(serve, places) if engine.prefill_at else b""


def _instance(
    config: Config, name: str, role: InstanceRole, pair: PairSpec | None = None
) -> InstanceSpec:
    engine = config.engine
    assert engine is not None
    assert config.serve is not None
    ranks = config.cache.rank_count if pair is None else _ranks_of(engine, role)
    # Without the API key, which instances do not need.
    cache = replace(config.cache, rank_count=ranks)
    given = replace(config, engine=None, serve=None, cache=cache)
    return InstanceSpec(
        name=name,
        model=engine.model or None,
        digest=find_model(engine.model or None).weights_version(),
        config=given,
        server=config.serve.router,
        joins=bool(config.serve.router),
        # Where the server belongs to this command, it has drained before instances are stopped.
        drain_s=config.serve.drain_s if config.serve.router else 0.0,
        ranks=ranks,
        role=role,
        pair=pair,
        dtype=engine.dtype,
        device=engine.device,
        first_gpu=_first_gpu(engine, role),
        graphs=engine.graphs,
        step_tokens=engine.step_tokens,
        step_requests=engine.step_requests,
        waiting_max=engine.waiting_max,
        threads=engine.threads,
        log_level=config.serve.log_level,
        log_json=config.serve.log_json,
    )


def _changed(table: TableT, options: ServeOptions, more: Mapping[str, Any]) -> TableT:
    """The table with the options that have the names of its fields, and with `more`."""
    named = {field.name: getattr(options, field.name, None) for field in fields(table)}
    return replace(table, **{k: v for k, v in {**named, **more}.items() if v is not None})


def _sized(config: Config, options: ServeOptions) -> Config:
    cache, kinds = config.cache, config.tier_kinds
    assert cache.device is not None
    if options.blocks is not None:
        cache = replace(cache, device=replace(cache.device, slot_count=options.blocks))
    if options.block_tokens is not None:
        cache = replace(cache, block_tokens=options.block_tokens)
    if options.tp is not None:
        cache = replace(cache, rank_count=options.tp)
    if options.host_gib is not None:
        cache, kinds = with_host_tier(cache, kinds, options.host_gib)
    if options.disk is not None or options.disk_gib is not None:
        cache, kinds = _with_disk(cache, kinds, options)
    return replace(config, cache=cache, tier_kinds=kinds)


def _with_disk(
    cache: CacheSettings, kinds: tuple[TierKind, ...], options: ServeOptions
) -> tuple[CacheSettings, tuple[TierKind, ...]]:
    if options.disk is None or options.disk_gib is None:
        given, missing = ("--disk", "--disk-gib") if options.disk else ("--disk-gib", "--disk")
        raise ConfigError(given, f"is given without {missing}, must be given with it")
    if not cache.tiers:
        raise ConfigError("--disk", "is given without host memory, must be given with --host-gib")
    path = str(Path(options.disk).expanduser().absolute())
    return with_disk_tier(cache, kinds, path, options.disk_gib)


def _require_sense(config: Config, architecture: Architecture) -> None:
    engine = config.engine
    assert engine is not None
    _require_role(config)
    for ranks in (engine.prefill_tp, engine.decode_tp) if engine.prefill_tp else (None,):
        count = ranks or config.cache.rank_count
        for rank in range(count):
            share_of(architecture, rank=rank, ranks=count)
    _require_device(config)
    _require_handoff(config, architecture)
    _require_memory(config, architecture)


def _require_handoff(config: Config, architecture: Architecture) -> None:
    """Checks that a block of one layer, as it travels between two ranks, fits a berth."""
    engine = config.engine
    assert engine is not None
    if not engine.prefill_tp:
        return
    bounds = handoff_settings(config, engine.device).bounds
    heads = -(-architecture.kv_heads // max(engine.prefill_tp, engine.decode_tp))
    layer = 2 * heads * architecture.head_dim * DType.parse(engine.dtype).itemsize
    block_bytes = config.cache.block_tokens * layer
    if block_bytes > bounds.berth_bytes:
        raise ConfigError(
            "handoff.berth_bytes",
            f"is {bounds.berth_bytes}, must be at least {block_bytes}, a block of one layer",
        )


def _require_device(config: Config) -> None:
    """Checks that the GPUs exist: each rank of an instance has one, which instances may share."""
    engine = config.engine
    assert engine is not None
    device = engine.device
    if device == "cpu" or engine.role == ROUTER:
        return
    ranks = max(engine.prefill_tp, engine.decode_tp) or config.cache.rank_count
    if ranks > 1 and device != "cuda":
        raise ConfigError(
            "engine.device", f"is {device!r}, must be 'cuda' for several ranks: each has a GPU"
        )
    if ranks > _gpu_count():
        raise ConfigError(
            "engine.device", f"is {device!r} for {ranks} ranks, and torch sees {_gpu_count()} GPUs"
        )


def _gpu_count() -> int:
    import torch  # noqa: PLC0415  (takes seconds, and only GPUs need it here)

    return int(torch.cuda.device_count())


def _first_gpu(engine: EngineTable, role: InstanceRole) -> int:
    """The decode instance of a pair has GPUs of its own, if there are enough."""
    ranks = engine.prefill_tp + engine.decode_tp
    if engine.device != "cuda" or engine.role != InstanceRole.BOTH.value:
        return 0
    return engine.prefill_tp if role is InstanceRole.DECODE and ranks <= _gpu_count() else 0


def _require_memory(config: Config, architecture: Architecture) -> None:
    engine, serve = config.engine, config.serve
    assert engine is not None
    assert serve is not None
    if engine.device != "cpu" or engine.role == ROUTER:
        return
    roles = 2 if engine.prefill_tp and engine.role == InstanceRole.BOTH.value else 1
    instances = roles * serve.instances
    require_memory(config, architecture, dtype=engine.dtype, instances=instances)


def _require_role(config: Config) -> None:
    """A command that does not start all roles needs the addresses of the others."""
    engine, serve = config.engine, config.serve
    assert engine is not None
    assert serve is not None
    alone = engine.role in {InstanceRole.PREFILL.value, InstanceRole.DECODE.value}
    places = {"engine.prefill_at": engine.prefill_at, "engine.decode_at": engine.decode_at}
    for key, place in places.items():
        if alone and not place:
            raise ConfigError(
                key, f"is '', must be where that instance is found: engine.role is {engine.role!r}"
            )
        if place and not alone:
            raise ConfigError(
                key, f"is {place!r}, must be '' unless engine.role is 'prefill' or 'decode'"
            )
    if engine.role != InstanceRole.BOTH.value and not serve.router:
        raise ConfigError(
            "serve.router",
            f"is '', must be where the router lets instances in: engine.role is {engine.role!r}",
        )
    named = {**places, "serve.router": serve.router}
    if any(named.values()):
        secret_between(serve, {key: place for key, place in named.items() if place})
    if alone and serve.instances != 1:
        raise ConfigError(
            "serve.instances",
            f"is {serve.instances}, must be 1: engine.role is {engine.role!r}, and each has an "
            "address of its own",
        )
