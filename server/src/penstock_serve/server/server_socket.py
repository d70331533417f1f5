"""The socket of the HTTP server, and how many connections it may have.

A host may be `unix:/PATH`: a socket that only the user of the server can connect to.

This module imports no HTTP library, so that `penstock serve` reports a port in use before it
spends time on imports and on the model.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import socket
import stat
from contextlib import suppress

from penstock.config import UNIX
from penstock.errors import UnavailableError

logger = logging.getLogger("penstock.serve.server_socket")

BACKLOG = 1024
"""Connections that may wait in the kernel to be accepted."""
RESERVED_DESCRIPTORS = 256
"""Not for HTTP connections: restarted instances, files, pipes, and one round of accepts."""


def listen(host: str, port: int) -> socket.socket:
    """Binds the port and listens on it; or a Unix socket, for which the port means nothing.

    Raises `UnavailableError`: the port is in use, or the address is not one of this machine.
    """
    if host.startswith(UNIX):
        return _listen_at(host.removeprefix(UNIX))
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # With SO_REUSEADDR, two servers can bind the same port; only one of them can listen.
        bound.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        bound.close()
        problem = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise UnavailableError(f"cannot listen on {host}:{port}: {problem}") from error
    return bound


class _UnixSocket(socket.socket):
    """A listening socket whose name goes with it."""

    path = ""

    def close(self) -> None:
        """Closes it; the next server finds no name that leads nowhere."""
        path, self.path = self.path, ""
        if path:
            with suppress(FileNotFoundError):
                os.unlink(path)
        super().close()


def _listen_at(path: str) -> socket.socket:
    bound = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before it has a name: nobody else gets in, whatever the umask is.
        os.fchmod(bound.fileno(), 0o600)
        try:
            bound.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_behind(path):
                raise
            os.unlink(path)
            bound.bind(path)
        bound.path = path
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise UnavailableError(f"cannot listen on {UNIX}{path}: {error.strerror}") from error
    return bound


def _is_left_behind(path: str) -> bool:
    """Whether it is the socket of a server that was killed: nobody listens there any more."""
    # Files refuse connections, too.
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(0)
        return caller.connect_ex(path) == errno.ECONNREFUSED


def address_of(bound: socket.socket) -> str:
    """The URL of the server, for clients."""
    if bound.family == socket.AF_UNIX:
        return f"{UNIX}{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_descriptor_limit(connections_max: int) -> int:
    """Raises the process's limit of open descriptors; returns how many connections fit.

    Some descriptors stay reserved: libzmq aborts the process when it cannot open one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + RESERVED_DESCRIPTORS
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    reserved = min(RESERVED_DESCRIPTORS, soft // 2)
    fit = max(1, min(connections_max, soft - reserved))
    if fit < connections_max:
        logger.warning(
            "fewer connections than asked for: serve.connections_max=%d allowed=%d descriptors=%d",
            connections_max,
            fit,
            soft,
        )
    return fit
