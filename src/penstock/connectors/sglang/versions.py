"""Which SGLang is installed, which linker it gets, and settings of linker and storage backend.

| key in `linker_extra_config` | means                                                            |
|------------------------------|------------------------------------------------------------------|
| `config`                     | the path of a Penstock configuration file, or its content        |
| `any_version`                | true: run with a version of SGLang that this was not tested with |

| SGLang                         | gets                                              |
|--------------------------------|---------------------------------------------------|
| one that was tested            | the linker, `linker`                              |
| another one                    | one that is off, `untested`                       |
| another one, and `any_version` | the linker, if SGLang has what it needs           |

SGLang before 0.5.23 has no linkers from outside: it refuses its own flags. The storage backend has
the same settings; in an untested SGLang it is off, or cannot be imported, and a line says so.

The one rule: names that only tested versions are known to have are imported after the version was
compared. A name that another version lacks must not keep SGLang from starting.
"""

# SGLang has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.connectors.base.settings import (
    is_version,
    name_versions,
    read_config,
    read_flag,
    require_known,
)
from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config import Config

TESTED = ((0, 5, 23),)
"""The version of `make test-sglang`."""
HERE = "penstock.connectors.sglang"
WHERE = "linker_extra_config"
WHERE_STORED = "hicache_storage_backend_extra_config"
KNOWN = ("config", "any_version")
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""What SGLang itself wants to know, or takes out before: its thresholds and timeouts."""

log = logging.getLogger("penstock.sglang")


def read_settings(extra: Mapping[str, object]) -> Config:
    """The configuration that SGLang was given for this linker.

    Raises `ConfigError`: a key is unknown or missing, or the configuration is wrong.
    """
    require_known(extra, KNOWN, WHERE)
    asks_any_version(extra)
    return read_config(extra, WHERE)


def asks_any_version(extra: Mapping[str, object]) -> bool:
    """Whether the linker is to run in an SGLang that it was not tested with.

    Raises `ConfigError`: it is neither true nor false.
    """
    return read_flag(extra, "any_version", WHERE)


def read_storage_settings(extra: Mapping[str, object]) -> Config:
    """The configuration that SGLang was given for the storage backend.

    Raises `ConfigError`: a key is unknown or missing, or the configuration is wrong or would keep
    nothing.
    """
    require_known({key: extra[key] for key in extra if key not in OF_SGLANG}, KNOWN, WHERE_STORED)
    read_flag(extra, "any_version", WHERE_STORED)
    if extra.get("interface_v1") != 1:
        raise ConfigError(
            f"{WHERE_STORED}.interface_v1",
            f"is {extra.get('interface_v1')!r}, must be 1: otherwise SGLang copies each page once "
            "more, in Python",
        )
    config = read_config(extra, WHERE_STORED)
    if not any(tier.stored for tier in config.cache.tiers):
        raise ConfigError(
            "tiers",
            "has none that outlives the process, must have a disk or a shared store below host "
            "memory: HiCache keeps pages in host memory itself",
        )
    if not config.persists:
        raise ConfigError(
            "model.weights_version",
            "is not given, must say which weights these are: pages of other weights could be taken "
            "for those of this model",
        )
    return config


def storage_is_off(extra: Mapping[str, object]) -> bool:
    """Whether the storage backend must keep nothing, as it was not tested with this SGLang."""
    tested = is_version(found_version(), TESTED)
    return not tested and not read_flag(extra, "any_version", WHERE_STORED)


def storage_class() -> Any:
    """The storage backend; in an untested SGLang it is off.

    Raises `UnavailableError`: this SGLang lacks what it imports.
    """
    return _from_sglang("storage").PenstockStorage


def linker_class() -> Any:
    """The class for the SGLang that is installed.

    Raises `UnavailableError`: this SGLang lacks what any linker needs.
    """
    if is_version(found_version(), TESTED):
        return linker_itself()
    return _from_sglang("untested").DisabledLinker


def linker_itself() -> Any:
    """The class for tested versions, whatever version this is.

    Raises `UnavailableError`: this SGLang lacks what the linker imports, or wants more of it.
    """
    found = _from_sglang("linker").PenstockLinker
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UnavailableError(_cannot_run(f"it has no method {missing}"))
    return found


def which() -> str:
    """Which SGLang this is, and which ones were tested."""
    tested = name_versions(TESTED)
    return f"this is SGLang {found_version()}, the linker is tested with {tested}"


def found_version() -> str:
    """The version of SGLang that is installed."""
    # Imported late: the rest of this package works without SGLang.
    from sglang.version import __version__  # noqa: PLC0415

    return str(__version__)


def log_off(why: str) -> None:
    """Logs that SGLang runs without Penstock."""
    log.warning("Penstock is off, SGLang runs without it: %s", why)


def _from_sglang(name: str) -> Any:
    try:
        return import_module(f"{HERE}.{name}")
    except ImportError as error:
        if (error.name or "").split(".")[0] != "sglang":
            raise
        raise UnavailableError(_cannot_run(str(error))) from error


def _cannot_run(why: str) -> str:
    return f"{which()}, and cannot run in this one: {why}"
