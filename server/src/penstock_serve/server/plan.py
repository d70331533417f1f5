"""The settings of `penstock serve`, and the specs of the instances that it starts.

The one rule: whatever would fail in an instance fails here first, with one line, before any process
is started.

What the roles of several commands share, to authenticate each other:

| where the other roles are      | what they share                                            |
|--------------------------------|------------------------------------------------------------|
| on the loopback interface      | a secret of this user, created at the first start          |
| anywhere, with a `keys_file`   | each other's public keys                                   |

Without keys, no role is off the loopback interface.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import DType, MachineKeys
from penstock.config import KEYS, Config, EngineTable, ServeTable, parse_completed, require_address
from penstock.errors import ConfigError, UnavailableError, counted
from penstock.toolkit import SECRET_BYTES_MIN, is_local, is_loopback, read_private
from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.defaults import (
    BLOCKS,
    HOST_TIER,
    complete,
    config_of,
    handoff_settings,
    require_memory,
)
from penstock_serve.engine.spec import InstanceRole, InstanceSpec
from penstock_serve.server.guard import require_usable_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.toolkit import Secret
    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.server.serve_options import ServeOptions

ROUTER = "router"
"""The role of a command that starts no instances and accepts those of other commands."""
_ALONE = frozenset({InstanceRole.PREFILL.value, InstanceRole.DECODE.value})
"""Roles of a command that starts instances of this role only."""
_NAMES = {
    InstanceRole.BOTH: "instance",
    InstanceRole.PREFILL: "prefill",
    InstanceRole.DECODE: "decode",
}
"""How instances are named, before their number."""
DISK_TIER = "disk"


PLACES = ("model", "disk", "keys_file", "router", "handoff_host")
"""Options that an unset variable of a shell leaves empty: for `--disk` the working folder."""


def settle(config: Config | None, options: ServeOptions) -> Config:
    """The complete configuration: the file's settings, overridden by the command line.

    Raises `ConfigError`: the model or a setting is wrong; `UnavailableError`: the default model is
    not installed.
    """
    _require_values(options)
    more: dict[str, Any] = {**_key_of(config, options), **_roles_of(config, options)}
    asked = parse_completed(
        "version = 1" if config is None else config.to_toml(),
        partial(_take_options, options=options, more=more),
    )
    engine, _ = _tables(asked)
    model = find_model(engine.model or None)
    architecture, checkpoint = model.open()
    checkpoint.close()
    settled = config_of(model, asked, dtype=engine.dtype)
    _require_sense(settled, architecture)
    return settled


def _take_options(document: dict[str, Any], *, options: ServeOptions, more: dict[str, Any]) -> None:
    """Writes options into the document of a file, so that they are checked as what it says is."""
    complete(document)
    # The engine's own device blocks; a file may leave them to its engine.
    document["cache"]["blocks"] = document["cache"].get("blocks") or BLOCKS
    named = {each.name: getattr(options, each.name) for each in fields(options)} | more
    renamed = {"ranks": options.tp, "blocks": options.blocks, "block_tokens": options.block_tokens}
    for name, given in (("engine", named), ("serve", named), ("cache", renamed)):
        table = document.setdefault(name, {})
        for key in KEYS[name]:
            if given.get(key) is not None:
                table[key] = given[key]
    tiers: list[dict[str, Any]] = document.setdefault("tiers", [])
    if options.host_gib is not None:
        host = tiers.pop(0) if tiers and tiers[0]["kind"] == HOST_TIER else {"name": HOST_TIER}
        host.pop("blocks", None)
        if options.host_gib:
            tiers.insert(0, {**host, "kind": HOST_TIER, "gib": options.host_gib})
    if options.disk is not None or options.disk_gib is not None:
        disks = [tier for tier in tiers if tier["kind"] == DISK_TIER]
        given = _disk_of(options, in_file=bool(disks), has_tiers=bool(tiers))
        if disks:
            disks[0].update(given)
        else:
            tiers.append({"name": DISK_TIER, "kind": DISK_TIER, **given})
        for further in disks[1:]:
            tiers.remove(further)


def serves_http(config: Config | None, options: ServeOptions) -> bool:
    """Whether this command serves HTTP, and not only instances for a router elsewhere."""
    engine, serve = (config and config.engine) or EngineTable(), (config and config.serve)
    role = engine.role if options.role is None else options.role
    router = (serve or ServeTable()).router if options.router is None else options.router
    return role == ROUTER or not router


def _roles_of(config: Config | None, options: ServeOptions) -> dict[str, int | None]:
    """Instances and ranks of both roles: where one of them is given, the other has one."""
    engine = (config and config.engine) or EngineTable()
    serve = (config and config.serve) or ServeTable()
    prefill, decode = options.prefill or serve.prefill, options.decode or serve.decode
    sizes = options.prefill_tp or engine.prefill_tp, options.decode_tp or engine.decode_tp
    role = options.role or engine.role
    if not (prefill or decode or any(sizes) or role in _ALONE):
        return {}
    counted = bool(prefill or decode)
    return {
        "prefill_tp": sizes[0] or 1,
        "decode_tp": sizes[1] or 1,
        "prefill": (prefill or 1) if counted else None,
        "decode": (decode or 1) if counted else None,
    }


def _key_of(config: Config | None, options: ServeOptions) -> dict[str, str]:
    """A key of the command line overrides both keys of the file; none is ever printed."""
    require_usable_options(options.api_key, options.api_key_file)
    if options.api_key is None and options.api_key_file is None:
        return {"api_key": config.serve.api_key} if config and config.serve else {}
    return {"api_key": options.api_key or "", "api_key_file": options.api_key_file or ""}


def _tables(config: Config) -> tuple[EngineTable, ServeTable]:
    """The tables that every settled configuration has."""
    assert config.engine is not None
    assert config.serve is not None
    return config.engine, config.serve


def instances_of(config: Config) -> tuple[InstanceSpec, ...]:
    """The instances that this command starts."""
    _, serve = _tables(config)
    roles = _roles(config)
    # If each of several processes had a thread on every core, they would slow each other down.
    config = _threaded(config, sum(_ranks_of(config, role) for role in roles) or 1)
    hands_over = len(roles) > 1 or bool(serve.router)
    numbers = {role: count(serve.number) for role in InstanceRole}
    gpus = _first_gpus(config, roles)
    return tuple(
        _instance(
            config,
            f"{_NAMES[role]}-{next(numbers[role])}",
            role,
            hands_over=hands_over or role is not InstanceRole.BOTH,
            first_gpu=gpu,
        )
        for role, gpu in zip(roles, gpus, strict=True)
    )


def _roles(config: Config) -> list[InstanceRole]:
    """The role of each instance that this command starts."""
    engine, serve = _tables(config)
    if engine.role == ROUTER:
        return []
    if engine.role in _ALONE:
        return [InstanceRole(engine.role)] * serve.instances
    if not engine.prefill_tp:
        return [InstanceRole.BOTH] * serve.instances
    return [
        *[InstanceRole.PREFILL] * (serve.prefill or serve.instances),
        *[InstanceRole.DECODE] * (serve.decode or serve.instances),
    ]


def _threaded(config: Config, ranks: int) -> Config:
    """Sets the torch threads of each rank: together about one on each core."""
    engine, _ = _tables(config)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return replace(config, engine=replace(engine, threads=engine.threads or threads))


def _ranks_of(config: Config, role: InstanceRole) -> int:
    engine, _ = _tables(config)
    if role is InstanceRole.BOTH:
        return config.cache.rank_count
    return engine.prefill_tp if role is InstanceRole.PREFILL else engine.decode_tp


def secrets_of(config: Config) -> tuple[Secret, Secret]:
    """What this command shares with other ones: for the router and for handoffs.

    Raises `ConfigError`: `serve.keys_file` cannot be used; `UnavailableError`: the secret of this
    user can be neither read nor created.
    """
    _, serve = _tables(config)
    if not serve.router:
        return b"", b""
    return secret_between(serve, {"serve.router": serve.router}), secret_between(serve, {})


def _instance(
    config: Config, name: str, role: InstanceRole, *, hands_over: bool, first_gpu: int
) -> InstanceSpec:
    engine, serve = _tables(config)
    ranks = _ranks_of(config, role)
    # Without the API key, which instances do not need.
    cache = replace(config.cache, rank_count=ranks)
    given = replace(config, engine=None, serve=None, routing=None, cache=cache)
    return InstanceSpec(
        name=name,
        engine=engine,
        digest=find_model(engine.model or None).weights_version(),
        config=given,
        server=serve.router,
        joins=bool(serve.router),
        # Where the server belongs to this command, it has drained before instances are stopped.
        drain_s=serve.drain_s if serve.router else 0.0,
        silence_s=serve.silence_s,
        ranks=ranks,
        role=role,
        hands_over=hands_over,
        ports=serve.ports,
        first_gpu=first_gpu,
        log_level=serve.log_level,
        log_json=serve.log_json,
    )


def _require_values(options: ServeOptions) -> None:
    for name in PLACES:
        if getattr(options, name) == "":
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(option, "is empty, must be left out or have a value")


def _disk_of(options: ServeOptions, *, in_file: bool, has_tiers: bool) -> dict[str, object]:
    """The keys of a disk tier that options set; without one in the file they must set both."""
    if not in_file and (options.disk is None or options.disk_gib is None):
        given, missing = ("--disk", "--disk-gib") if options.disk else ("--disk-gib", "--disk")
        raise ConfigError(given, f"is given without {missing}, must be given with it")
    if not has_tiers:
        raise ConfigError("--disk", "is given without host memory, must be given with --host-gib")
    path = None if options.disk is None else str(Path(options.disk).expanduser().absolute())
    found = {"path": path, "gib": options.disk_gib}
    return {key: value for key, value in found.items() if value is not None}


def _require_sense(config: Config, architecture: Architecture) -> None:
    engine, _ = _tables(config)
    config.namespace()  # A salt that cannot be read is told here, before anything is started.
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
    engine, _ = _tables(config)
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
    engine, _ = _tables(config)
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
            "engine.device",
            f"is {device!r} for {counted(ranks, 'rank')}, and torch sees "
            f"{counted(_gpu_count(), 'GPU')}",
        )


def _gpu_count() -> int:
    import torch  # noqa: PLC0415  (takes seconds, and only GPUs need it here)

    return int(torch.cuda.device_count())


def _first_gpus(config: Config, roles: Sequence[InstanceRole]) -> list[int]:
    """The first GPU of each instance: GPUs of their own, if there are enough for all roles."""
    engine, _ = _tables(config)
    ranks = [_ranks_of(config, role) for role in roles]
    if engine.device != "cuda" or not engine.prefill_tp or sum(ranks) > _gpu_count():
        return [0] * len(roles)
    return [sum(ranks[:number]) for number in range(len(roles))]


def _require_memory(config: Config, architecture: Architecture) -> None:
    engine, _ = _tables(config)
    if engine.device != "cpu" or engine.role == ROUTER:
        return
    require_memory(config, architecture, dtype=engine.dtype, instances=len(_roles(config)))


def _require_role(config: Config) -> None:
    """A command that does not start all roles needs the router of the others."""
    engine, serve = _tables(config)
    if engine.role != InstanceRole.BOTH.value and not serve.router:
        raise ConfigError(
            "serve.router",
            f"is '', must be where the router lets instances in: engine.role is {engine.role!r}",
        )
    if engine.role != InstanceRole.BOTH.value and serve.prefill:
        raise ConfigError(
            "serve.prefill",
            f"is {serve.prefill}, must be 0 where engine.role is {engine.role!r}: "
            "serve.instances counts those of one role",
        )
    if not serve.router:
        if engine.handoff_host:
            raise ConfigError(
                "engine.handoff_host",
                f"is {engine.handoff_host!r}, must be '' without serve.router: all instances are "
                "on this machine",
            )
        return
    secret_between(serve, {"serve.router": serve.router})
    if engine.handoff_host and not serve.keys_file and not is_loopback(engine.handoff_host):
        raise ConfigError(
            "serve.keys_file",
            "is '', must be a file with the keys of the machines for engine.handoff_host "
            f"{engine.handoff_host!r}, which is not on the loopback interface: {MAKE_KEYS}",
        )


SECRET_BYTES = 32
SECRET_BYTES_MAX = 4096
MAKE_KEYS = "make one with `penstock keys new FILE` and give it with --keys-file"


def secret_between(serve: ServeTable, addresses: Mapping[str, str]) -> Secret:
    """What the roles at these addresses share.

    Raises `ConfigError`: an address needs keys that are not there, or the file cannot be used;
    `UnavailableError`: the secret of this user can be neither read nor created.
    """
    for key, address in addresses.items():
        require_address(key, address)
        if not serve.keys_file and not is_local(address):
            raise ConfigError(
                "serve.keys_file",
                f"is '', must be a file with the keys of the machines for {key} {address!r}, "
                f"which is not on the loopback interface: {MAKE_KEYS}",
            )
    if not serve.keys_file:
        return _own_secret()
    keys = _read_keys(serve.keys_file)
    for address in addresses.values():
        try:
            keys.key_of(address)
        except UnavailableError as error:
            raise ConfigError("serve.keys_file", f"is {serve.keys_file!r}: {error}") from error
    return keys


def _read_keys(file: str) -> MachineKeys:
    try:
        return MachineKeys.read(Path(file).expanduser())
    except OSError as error:
        raise ConfigError(
            "serve.keys_file", f"is {file!r}, must be a file with keys: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError("serve.keys_file", f"is {file!r}: {error}") from error


def own_secret_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return folder / "penstock" / "secret"


def _own_secret() -> bytes:
    try:
        path = own_secret_path()
        if not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"the secret by which roles on this machine know each other cannot be had: {error}; "
            f"or {MAKE_KEYS}"
        ) from error


def _read(path: Path) -> bytes:
    secret = read_private(path, bytes_max=SECRET_BYTES_MAX).strip()
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"{path} has {len(secret)} bytes, must have at least {SECRET_BYTES_MIN}")
    return secret


def _make(path: Path) -> None:
    """Writes a new secret atomically, unless another command was quicker."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"secret.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES) + "\n")
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return
    finally:
        temporary.unlink()
