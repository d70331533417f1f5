"""Which vLLM is installed, which connector it gets, and its log.

| vLLM                           | gets                                              |
|--------------------------------|---------------------------------------------------|
| the version that was tested    | the connector, `adapter`                          |
| another one                    | one that is off, `untested`                       |
| another one, and `any_version` | the connector, if it has what the connector needs |

Two rules. Names that only the tested version is known to have are imported after the version was
compared: a name that another version lacks must not keep vLLM from starting. And code below
`penstock.connectors` logs a line once, to the logger `penstock` or to `log`, not to both: vLLM
configures only its own loggers, so `log_into_vllm` forwards Penstock's lines there.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from penstock.errors import UnavailableError

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401


TESTED = (0, 32)
"""The version of vLLM, major and minor, that `make test-vllm` runs."""
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
    """The class for the tested version, whatever version this is.

    Raises `UnavailableError`: this vLLM lacks what the connector imports, or wants more of it.
    """
    found = _from_vllm("adapter").PenstockConnector
    if found.__abstractmethods__:
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise UnavailableError(_cannot_run(f"it has no method {missing}"))
    return found


def which() -> str:
    """Which vLLM this is, and which one was tested."""
    major, minor = TESTED
    return f"this is vLLM {found_version()}, the connector is tested with {major}.{minor}"


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is one of those that were tested."""
    return version.partition("+")[0].split(".")[:2] == [str(part) for part in TESTED]


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
