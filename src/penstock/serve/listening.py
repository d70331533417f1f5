"""The port of the HTTP server, taken before anything is loaded.

The one rule: nothing heavy is imported here, so that a port in use is told at once.
"""

from __future__ import annotations

import socket

from penstock.errors import UnavailableError

BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens: from now on the port is ours.

    Raises:
        UnavailableError: the port is taken, or the address is none of this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Without this, two servers that start at once would both believe to have the port.
        bound.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        bound.close()
        problem = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise UnavailableError(f"cannot listen on {host}:{port}: {problem}") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Where clients find the server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
