"""The socket of the store process: how it is opened, and how a client connects to it.

    listener = StoreListener.open(path)      # in the store process
    connection = connect_store(path)         # elsewhere: a socket, and a pidfd of its process

The socket has mode 0600 and lies in a folder of the user. A lock beside it (`NAME.lock`) belongs to
the process that serves: whoever holds it may replace a socket that a dead process left behind.

The one rule: both sides know whom they speak with. The process serves its own user and root; a
client watches the process that it is connected to by a pidfd, so that its death is seen.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import UnavailableError
from penstock.store.messages import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

BACKLOG = 128
"""Connections that wait to be accepted: all ranks of a machine start at once."""
SEND_BUFFER_BYTES = 2 * FRAME_BYTES_MAX
"""What is asked for; the kernel may give less, and gives one frame in any case."""
_CREDENTIALS = struct.Struct("3i")


class StoreBusyError(UnavailableError):
    """Another process serves this socket, and is alive."""


class PeerCredentials(NamedTuple):
    """Who is at the other end of a Unix socket."""

    pid: int
    uid: int
    gid: int


def peer_credentials(channel: socket.socket) -> PeerCredentials:
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(raw))


class StoreListener:
    """The socket that a store process listens on, and the lock that makes it the only one."""

    def __init__(self, path: Path, listener: socket.socket, lock: int, folder: int) -> None:
        self.path = path
        self._listener = listener
        self._lock = lock
        self._folder = folder
        # Given up for a moment where no descriptor is left to accept a connection with.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Listens at a path; its folder is made if it is missing.

        Raises `StoreBusyError`: another process listens there; `UnavailableError`: the folder or
        the socket cannot be made.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as undo:
                folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                undo.callback(os.close, folder)
                lock = os.open(
                    f"{path.name}.lock",
                    os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
                    0o600,
                    dir_fd=folder,
                )
                undo.callback(os.close, lock)
                _take_lock(lock, path)
                listener = undo.enter_context(_new_socket())
                with suppress(FileNotFoundError):
                    os.unlink(path.name, dir_fd=folder)
                # Before it has a name: nobody else can connect, not even for a moment.
                os.fchmod(listener.fileno(), 0o600)
                listener.bind(_short_path(folder, path.name))
                listener.listen(BACKLOG)
                undo.pop_all()
        except OSError as error:
            raise UnavailableError(f"no socket at {path}: {error.strerror}") from error
        return cls(path, listener, lock, folder)

    @property
    def descriptor(self) -> int:
        """Readable while somebody waits to be accepted."""
        return self._listener.fileno()

    def accept(self) -> Iterator[tuple[socket.socket, PeerCredentials]]:
        """Those who have connected since the last call."""
        for _ in range(BACKLOG):
            try:
                channel, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in {errno.EMFILE, errno.ENFILE, errno.ECONNABORTED}:
                    raise
                self._turn_away()
                return
            channel.settimeout(0)
            _set_buffer(channel)
            yield channel, peer_credentials(channel)

    def _turn_away(self) -> None:
        """Closes the next connection: left alone, it would wake the loop again and again."""
        os.close(self._spare)
        with suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Stops listening, and removes the socket; then another process may serve."""
        with suppress(FileNotFoundError):
            os.unlink(self.path.name, dir_fd=self._folder)
        self._listener.close()
        for fd in (self._lock, self._folder, self._spare):
            os.close(fd)


class StoreConnection(NamedTuple):
    """A connection to a store process; whoever has it closes both."""

    channel: socket.socket
    pid: int
    pidfd: int
    """Readable when the process is dead, with all its threads."""


def connect_store(path: Path) -> StoreConnection | None:
    """Connects; `None` if nobody listens. Never waits.

    Raises `UnavailableError`: somebody listens, and this process cannot connect.
    """
    with ExitStack() as undo:
        channel = undo.enter_context(_new_socket())
        try:
            folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, folder)
            channel.connect(_short_path(folder, path.name))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise UnavailableError(f"cannot connect to {path}: {error.strerror}") from error
        peer = peer_credentials(channel)
        if peer.uid not in {os.getuid(), 0}:
            raise UnavailableError(
                f"{path} is served by user {peer.uid}, must be by user {os.getuid()} or root"
            )
        pidfd = _watch(peer.pid, channel, path)
        os.close(folder)
        undo.pop_all()
        return StoreConnection(channel, peer.pid, pidfd)


def _watch(pid: int, channel: socket.socket, path: Path) -> int:
    if pid <= 0:
        raise UnavailableError(
            f"{path} is served in another PID namespace, must be in that of this process: its "
            "end could not be seen"
        )
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(
            f"the process {pid} that serves {path} cannot be watched: {error.strerror}"
        ) from error
    # A process that was alive after its number was looked up is the one that has this number.
    poller = select.poll()
    poller.register(channel, 0)
    if any(events & select.POLLHUP for _, events in poller.poll(0)):
        os.close(pidfd)
        raise UnavailableError(f"the process {pid} that served {path} has ended")
    return pidfd


def _new_socket() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(0)
    _set_buffer(channel)
    return channel


def _set_buffer(channel: socket.socket) -> None:
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _short_path(folder: int, name: str) -> str:
    """A path that fits into a socket's address, whatever the folder is called."""
    return f"/proc/self/fd/{folder}/{name}"


def _take_lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError(f"another process serves {path}") from None
