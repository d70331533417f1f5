"""Addresses in settings: of hosts, ports and sockets, each refused where it cannot be one."""

from __future__ import annotations

import re
from ipaddress import ip_address

from penstock.errors import ConfigError

UNIX = "unix:"
"""Before the path of a Unix socket, in the place of a host."""
UNIX_PATH_MAX = 107
"""The kernel takes no more."""
PORT_MAX = 65_535
HOST_NAME_MAX = 253
"""Characters, as DNS has it."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_ADDRESS = re.compile(r"tcp://(?P<host>[^:/*\s]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")
ANYWHERE = frozenset({"0.0.0.0", "[::]"})
"""Hosts to listen at, which nobody can dial."""


def require_address(key: str, address: str) -> tuple[str, int]:
    """Host and port of an address that others dial.

    Raises `ConfigError`: it cannot be dialled.
    """
    found = _ADDRESS.fullmatch(address)
    host, port = (found["host"], int(found["port"])) if found else ("", 0)
    if host in {"", *ANYWHERE} or not 1 <= port <= PORT_MAX:
        raise ConfigError(
            key,
            f"is {address!r}, must be tcp://HOST:PORT, with a host that the others can dial and a "
            f"port from 1 to {PORT_MAX}",
        )
    return host, port


def require_host(key: str, host: str) -> None:
    """Refuses what is neither an IP address nor can be the name of a host.

    Raises `ConfigError`: names `key`.
    """
    try:
        ip_address(host)
    except ValueError:
        numeric = re.fullmatch(r"[0-9.]*", host) is not None or ":" in host
        if numeric or len(host) > HOST_NAME_MAX or _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                key,
                f"is {host!r}, must be an address to listen on, such as '127.0.0.1', '0.0.0.0' or "
                "'::1', or the name of this host",
            ) from None


def require_name(key: str, name: str) -> None:
    """Refuses what cannot be the name of a host.

    Raises `ConfigError`: names `key`.
    """
    if len(name) > HOST_NAME_MAX or _HOST_NAME.fullmatch(name) is None:
        raise ConfigError(
            key,
            f"has {name!r}, must have names of hosts without scheme and port, separated by commas, "
            "such as 'llm.example.com'",
        )


def require_socket(key: str, host: str) -> None:
    """Refuses what is not `unix:` and the absolute path of a socket.

    Raises `ConfigError`: names `key`.
    """
    path = host.removeprefix(UNIX)
    # Before it is encoded: what is no text cannot be.
    is_path = re.match("/[^/]", path) is not None and path.isprintable()
    if not host.startswith(UNIX) or not is_path or len(path.encode()) > UNIX_PATH_MAX:
        raise ConfigError(
            key,
            f"is {host!r}, must be {UNIX} and the absolute path of a socket of at most "
            f"{UNIX_PATH_MAX} bytes",
        )


def port_range(ports: str) -> range:
    """The ports that a process may listen on; empty: any.

    Raises `ConfigError`: it is neither a port nor a range of them.
    """
    first, dash, last = ports.partition("-")
    texts = (first, last) if dash else (first, first)
    if not all(text.isascii() and text.isdecimal() and len(text) <= 5 for text in texts):
        low, high = -1, -1
    else:
        low, high = (int(text) for text in texts)
    if (low, high) == (0, 0):
        return range(0)
    if not 1 <= low <= high <= PORT_MAX:
        raise ConfigError(
            "serve.ports",
            f"is {ports!r}, must be '0' for any, a port, or a range of ports from 1 to "
            f"{PORT_MAX} such as '5200-5299'",
        )
    return range(low, high + 1)
