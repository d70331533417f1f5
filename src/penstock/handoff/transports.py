"""Which data transports there are: how KV gets from a prefill rank into a decode rank's memory.

| name            | between                                     | fence                      |
|-----------------|---------------------------------------------|----------------------------|
| `shared_memory` | processes of one machine                    | the writer's process ended |
| `nixl`          | any two machines that UCX joins (RDMA, TCP) | the area's agent destroyed |

`HandoffPair.transport` names one, or `auto`: see `choose_transport`. Other distributions add theirs
by an entry point: see `penstock.extensions`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config.values import AUTO, NIXL, SHARED_MEMORY
from penstock.errors import ConfigError, install_hint
from penstock.extensions import OTHER_TRANSPORTS, DataTransport
from penstock.relay.agents import is_installed
from penstock.relay.target import NixlTarget
from penstock.relay.writer import NixlWriter
from penstock.transport.machine_keys import host_of, is_local
from penstock.transport.shared_memory import SharedTarget, connect_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.transport.remote import HandoffAddresses, PinMemory, Target, WriterLink


def _shared_target(folder: Path | None, *, pin: PinMemory | None = None) -> Target:
    return SharedTarget(huge_pages=False, pin=pin, folder=folder)


def _nixl_target(
    _folder: Path | None,
    *,
    pin: PinMemory | None = None,
    addresses: HandoffAddresses | None = None,
) -> Target:
    return NixlTarget(pin=pin, addresses=addresses)


TRANSPORTS: dict[str, DataTransport] = {
    SHARED_MEMORY: DataTransport(open_target=_shared_target, connect=connect_shared, pins=True),
    NIXL: DataTransport(
        open_target=_nixl_target, open_writer=NixlWriter, pins=True, takes_addresses=True
    ),
}
"""The built-in ones."""


def transport_named(name: str, *, place: str = "transport") -> DataTransport:
    """The data transport with this name: a built-in one, or that of an entry point.

    Raises `ConfigError`: there is none, or its entry point is broken; `place` is the setting.
    """
    found = TRANSPORTS.get(name) or OTHER_TRANSPORTS.find(name, place)
    if found is None:
        known = ", ".join([AUTO, *TRANSPORTS, *OTHER_TRANSPORTS.names()])
        raise ConfigError(place, f"is {name!r}, must be one of {known}")
    return found


def choose_transport(name: str, addresses: Sequence[str], *, place: str = "transport") -> str:
    """The data transport that two engines use; both come to the same answer.

    | `name` | where the engines and their ranks listen            | answer          |
    |--------|-----------------------------------------------------|-----------------|
    | `auto` | all at `ipc` or loopback addresses, or at one host  | `shared_memory` |
    | `auto` | at several hosts                                    | `nixl`          |
    | other  | anywhere                                            | `name`          |
    Raises `ConfigError`: there is no such transport; or `auto` needs NIXL, which is not installed.
    """
    if name != AUTO:
        transport_named(name, place=place)
        return name
    hosts = sorted({"this machine" if is_local(each) else host_of(each) for each in addresses})
    if len(hosts) < 2:
        return SHARED_MEMORY
    if not is_installed():
        raise ConfigError(
            place,
            f"is {AUTO!r}, and the engines are on different machines ({', '.join(hosts)}), which "
            f"needs NIXL on each: {install_hint('nixl')}",
        )
    return NIXL


class Writer:
    """What a prefill rank connects with, whichever transport it is."""

    def __init__(
        self,
        transport: DataTransport,
        *,
        pin: PinMemory | None = None,
        addresses: HandoffAddresses | None = None,
    ) -> None:
        options = {} if pin is None else {"pin": pin}
        self._opened: Any = None
        if transport.open_writer is not None:
            places = {"addresses": addresses} if transport.takes_addresses else {}
            self._opened = transport.open_writer(**options, **places)
        plain = None if transport.connect is None else partial(transport.connect, **options)
        self.connect: Callable[[bytes], WriterLink] = plain or self._opened.connect
        """Makes a link to the area that a target described; see `penstock.transport.remote`."""

    def close(self) -> None:
        """Gives back what belongs to no single link."""
        if self._opened is not None:
            self._opened.close()
