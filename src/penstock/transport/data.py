"""Which data transports there are: how KV gets from a prefill rank into a decode rank's memory.

`HandoffPair.transport` names one. Other distributions add theirs by an entry point: see
`penstock.extensions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config.values import SHARED_MEMORY
from penstock.errors import ConfigError
from penstock.extensions import OTHER_TRANSPORTS, DataTransport
from penstock.transport.shared_memory import SharedTarget, connect_shared

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.transport.remote import PinMemory, Target


def _shared_target(folder: Path | None, *, pin: PinMemory | None = None) -> Target:
    return SharedTarget(huge_pages=False, pin=pin, folder=folder)


TRANSPORTS: dict[str, DataTransport] = {
    SHARED_MEMORY: DataTransport(open_target=_shared_target, connect=connect_shared, pins=True)
}
"""The built-in ones."""


def transport_named(name: str, *, place: str = "transport") -> DataTransport:
    """The data transport with this name: a built-in one, or that of an entry point.

    Raises:
        ConfigError: there is none, or its entry point is broken; `place` is the setting.
    """
    found = TRANSPORTS.get(name) or OTHER_TRANSPORTS.find(name, place)
    if found is None:
        known = ", ".join([*TRANSPORTS, *OTHER_TRANSPORTS.names()])
        raise ConfigError(place, f"is {name!r}, must be one of {known}")
    return found
