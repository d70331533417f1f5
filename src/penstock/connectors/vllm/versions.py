"""Which vLLM is installed, which connector it gets, its log, and the connector's settings.

| key           | means                                                                   |
|---------------|-------------------------------------------------------------------------|
| `config`      | the path of a Penstock configuration file, or its content               |
| `allow_fail`  | true: `kv_load_failure_policy` is meant to be "fail"                     |
| `any_version` | true: run with a version of vLLM that this connector was not tested with |
| `layerwise`   | true: steps compute on loads while they arrive, where vLLM allows it     |
| `handoff`     | true: with `kv_both`, prompts are handed over in both directions         |

| `kv_role`     | below the device     | prompts                                           |
|---------------|----------------------|---------------------------------------------------|
| `kv_both`     | saves and loads      | stay, unless `handoff` is true                    |
| `kv_producer` | saves and loads      | are computed for other engines as well            |
| `kv_consumer` | saves and loads      | are taken from other engines as well              |

The one rule: a key that is not known here is refused, never ignored.

| vLLM                           | gets                                              |
|--------------------------------|---------------------------------------------------|
| one that was tested            | the connector, `adapter`                          |
| another one                    | one that is off, `untested`                       |
| another one, and `any_version` | the connector, if it has what the connector needs |

Two rules. Names that only tested versions are known to have are imported after the version was
compared: a name that another version lacks must not keep vLLM from starting. And code below
`penstock.connectors` logs a line once, to the logger `penstock` or to `log`, not to both: vLLM
configures only its own loggers, so `log_into_vllm` forwards Penstock's lines there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.config import HandoffTable
from penstock.config.values import AUTO, GPU, SHARED_MEMORY
from penstock.connectors.base.settings import (
    is_version,
    name_versions,
    read_config,
    read_flag,
    require_known,
)
from penstock.errors import ConfigError, UnavailableError
from penstock.handoff.protocol.settings import HandoffSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config import Config


WHERE = "kv_connector_extra_config"
METRICS_PREFIX = "vllm:penstock_"
"""Comes before every name in `penstock.connectors.base.statistics` on vLLM's metrics page."""
KNOWN = ("config", "allow_fail", "any_version", "layerwise", "handoff")
ROLE = "kv_both"
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
ROLES = (ROLE, PRODUCER, CONSUMER)
RECOMPUTE = "recompute"
FAIL = "fail"
"""vLLM's policies for what could not be loaded; `FAIL` is its default."""
LOCAL = (AUTO, GPU, SHARED_MEMORY)
BERTHS = 16
"""Parts that are under way at a time on CPUs, where vLLM's threads leave little time for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """The settings of the connector."""

    config: Config
    layerwise: bool = False
    prefills: bool = False
    """Whether it computes prompts for other engines."""
    decodes: bool = False
    """Whether it takes prompts that other engines compute."""

    @property
    def hands_over(self) -> bool:
        """Whether it takes part in handoffs."""
        return self.prefills or self.decodes

    @property
    def transport(self) -> str:
        """How handed over KV travels.

        Raises `ConfigError`: it is one between machines, which vLLM's engines do not use.
        """
        named = AUTO if self.config.handoff is None else self.config.handoff.transport
        if named not in LOCAL:
            raise ConfigError(
                "handoff.transport",
                f"is {named!r}, must be one of {', '.join(LOCAL)}: vLLM's engines hand prompts "
                "over on one machine",
            )
        return named

    def handoff(self, device: str) -> HandoffSettings:
        """Times and bounds of handoffs on a device.

        Raises `ConfigError`: they do not fit each other.
        """
        table = self.config.handoff or HandoffTable()
        return HandoffSettings.of_table(table, on_gpu=device != "cpu", berths_on_cpu=BERTHS)


def read_settings(
    extra: Mapping[str, object], *, failure_policy: str, role: str | None = ROLE
) -> ConnectorSettings:
    """The settings that vLLM was given for this connector.

    Raises `ConfigError`: a key is unknown or missing, the configuration or the role is wrong, or a
    failed load would fail its request without `allow_fail`.
    """
    if role not in ROLES:
        raise ConfigError("kv_role", f"is {role!r}, must be one of {', '.join(ROLES)}")
    require_known(extra, KNOWN, WHERE)
    if failure_policy != RECOMPUTE and not read_flag(extra, "allow_fail", WHERE):
        raise ConfigError(
            "kv_load_failure_policy",
            f"is {failure_policy!r}, with which a block that fails its checksum fails its "
            f'request; must be "{RECOMPUTE}", or {WHERE}.allow_fail must be true',
        )
    asks_any_version(extra)
    both = read_flag(extra, "handoff", WHERE) and role == ROLE
    config = read_config(extra, WHERE)
    settings = ConnectorSettings(
        config=config,
        layerwise=read_flag(extra, "layerwise", WHERE),
        prefills=both or role == PRODUCER,
        decodes=both or role == CONSUMER,
    )
    # Refused whatever the device.
    settings.handoff("cpu")
    if settings.hands_over:
        _ = settings.transport
    return settings


def asks_any_version(extra: Mapping[str, object]) -> bool:
    """Whether the connector is to run in a vLLM that it was not tested with.

    Raises `ConfigError`: it is neither true nor false.
    """
    return read_flag(extra, "any_version", WHERE)


# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401


TESTED = ((0, 32), (0, 33))
"""Versions of vLLM, major and minor: that of `make test-vllm`, and those of `test-vllm-newest`."""
HERE = "penstock.connectors.vllm"


def connector_class() -> Any:
    """The class for the vLLM that is installed.

    Raises `UnavailableError`: this vLLM lacks what any connector needs.
    """
    return (
        connector_itself()
        if is_tested(found_version())
        else _from_vllm("untested").DisabledConnector
    )


def connector_itself() -> Any:
    """The class for tested versions, whatever version this is.

    Raises `UnavailableError`: this vLLM lacks what the connector imports, or wants more of it.
    """
    found = _from_vllm("adapter").PenstockConnector
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UnavailableError(_cannot_run(f"it has no method {missing}"))
    return found


def which() -> str:
    """Which vLLM this is, and which ones were tested."""
    return f"this is vLLM {found_version()}, the connector is tested with {tested_versions()}"


def tested_versions() -> str:
    """Those that were tested, for messages."""
    return name_versions(TESTED)


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is one of those that were tested."""
    return is_version(version, TESTED)


def found_version() -> str:
    """The version of vLLM that is installed."""
    # Imported late: the rest of this package works without vLLM.
    from vllm import __version__  # noqa: PLC0415

    return str(__version__)


def _from_vllm(name: str) -> Any:
    try:
        return import_module(f"{HERE}.{name}")
    except ImportError as error:
        if (error.name or "").split(".")[0] != "vllm":
            raise
        raise UnavailableError(_cannot_run(str(error))) from error


def _cannot_run(why: str) -> str:
    return f"{which()}, and cannot run in this one: {why}"


# Below vLLM's own logger, so that its settings for format and level hold.
log = logging.getLogger("vllm.penstock")


class _VllmHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "Penstock: %s", record.getMessage())


def log_into_vllm() -> None:
    """Starts forwarding in this process; a second call changes nothing."""
    penstock = logging.getLogger("penstock")
    if not any(isinstance(handler, _VllmHandler) for handler in penstock.handlers):
        penstock.addHandler(_VllmHandler())


def log_off(why: str) -> None:
    """Logs that vLLM runs without Penstock; the scheduler calls it once for all ranks."""
    log.warning("Penstock is off, vLLM runs without it: %s", why)
