"""Unix sockets that only this user can reach: the folder they lie in, and packets over them.

    folder = private_folder()            # of this process: made at the first call, gone at its end
    path = socket_path(folder)           # a name that is free, and short enough for a socket
    folder = shared_folder("a name")     # of all processes of this user that name it

The folder lies in `XDG_RUNTIME_DIR`, or else in the folder for temporary files, and has mode 0700:
other users cannot connect to what is bound in it. A process that was killed leaves its folder
behind; the next process of the user that makes one removes it.

The rule: a folder is removed only by its owner, or when its owner is gone. The owner holds a lock
(`flock`) on it for as long as it lives.

    ours, theirs = channel_pair()
    send_packet(ours, frame, arena.fd)
    packet = receive_packet(theirs, bytes_max)

The one rule: every descriptor that arrives has an owner, which is the caller of `receive_packet`.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import secrets
import select
import shutil
import socket
import stat
import struct
import tempfile
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from penstock.errors import UnavailableError
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty

SOCKET_PATH_BYTES_MAX = 107
"""`sockaddr_un` has 108 bytes, and the last one is zero."""
_NAME_HEX_BYTES = 8
_FOLDER_CHARACTERS = 16
"""Of a folder's name after the prefix, at most."""
_FOLDER_TRIES = 8
"""A folder may be taken for an abandoned one, and removed, before it is locked."""

_folders: dict[int, tuple[Path, int]] = {}
"""By process: after a fork, the child makes its own."""


def private_folder() -> Path:
    """The folder of this process for its sockets, with mode 0700.

    Raises:
        UnavailableError: there is no place where it could be made.
    """
    owned = _folders.get(os.getpid())
    if owned is None:
        owned = _folders[os.getpid()] = _make()
        atexit.register(_remove, os.getpid())
    return owned[0]


def socket_path(folder: Path) -> Path:
    """A path for a new socket in a folder.

    Raises:
        UnavailableError: it would be too long for a socket.
    """
    path = folder / secrets.token_hex(_NAME_HEX_BYTES)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise UnavailableError(
            f"a socket cannot be at {path}, of {len(os.fsencode(path))} bytes: must have at most "
            f"{SOCKET_PATH_BYTES_MAX}"
        )
    return path


def runtime_root(*, any_length: bool = False) -> Path:
    """Where private folders are made: `XDG_RUNTIME_DIR`, or a place for temporary files.

    Nobody else may be able to rename what is in it: it is this user's, or sticky as `/tmp` is. With
    `any_length` its name may be too long for the address of a socket.

    Raises:
        UnavailableError: there is none that can be written, or all have names too long.
    """
    tried: list[str] = []
    for text in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if text and (any_length or _is_short(Path(text))) and _is_usable(Path(text)):
            return Path(text)
        tried.append(text or "XDG_RUNTIME_DIR (not set)")
    raise UnavailableError(
        f"no folder for sockets can be made in any of {', '.join(tried)}: it must exist, have a "
        "short name, and be this user's or writable and sticky as /tmp; set XDG_RUNTIME_DIR or "
        "TMPDIR"
    )


class NamedFolder:
    """A private folder that other processes of this user find by its name.

    Raises:
        UnavailableError: another process has it, or it cannot be made.
    """

    def __init__(self, name: str) -> None:
        self.path = named_folder(name)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            require_private(self.path)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be made: {error.strerror}") from error
        if not _lock(self._fd) or not _is_at(self.path, self._fd):
            os.close(self._fd)
            raise UnavailableError(f"{self.path} is that of another process, which is alive")
        for left in self.path.iterdir():  # By an owner that was killed.
            left.unlink()

    def close(self) -> None:
        """Removes it, and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def named_folder(name: str) -> Path:
    """Where the folder of a name is, if there is one.

    Raises:
        UnavailableError: there is no place for such folders.
    """
    digest = blake2b(name.encode(), digest_size=_FOLDER_CHARACTERS // 2).hexdigest()
    return runtime_root() / f"{_prefix()}{digest}"


def shared_folder(name: str) -> Path:
    """The private folder that the processes of this user share under a name; made if missing.

    Where everybody may write, another user can take a name that he guesses. Such a folder is left
    alone: another one is made, and found by its owner from then on. It stays when they have ended.

    Raises:
        UnavailableError: there is no place for such folders.
    """
    root = runtime_root(any_length=True)
    digest = blake2b(name.encode(), digest_size=_FOLDER_CHARACTERS // 2).hexdigest()
    plain = root / f"penstock-shared-{os.getuid()}-{digest}"
    try:
        found = _first_private(plain)
        if found is None and not _make_private(plain):
            # Two may come here at once: both take the older one.
            _make_private(Path(f"{plain}-{time.time_ns():020d}-{secrets.token_hex(4)}"))
            found = _first_private(plain)
    except OSError as error:
        raise UnavailableError(f"no folder like {plain} can be made: {error.strerror}") from error
    return found or plain


def _first_private(plain: Path) -> Path | None:
    """The oldest folder that was made because another user has the plain name."""
    return next(filter(_is_private, sorted(plain.parent.glob(f"{plain.name}-*"))), None)


def _make_private(folder: Path) -> bool:
    """Makes a folder, unless there is one; whether it is this user's alone."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return _is_private(folder)


def _is_private(folder: Path) -> bool:
    with suppress(UnavailableError, FileNotFoundError):
        require_private(folder)
        return True
    return False


def require_private(folder: Path) -> None:
    """Refuses a folder that belongs to another user, or that others can enter.

    Raises:
        UnavailableError: it is not private.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UnavailableError(
            f"{folder} is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}, must be "
            f"a folder of user {os.getuid()} with mode drwx------"
        )


def _is_short(root: Path) -> bool:
    name = f"{_prefix()}{'x' * _FOLDER_CHARACTERS}/{'x' * 2 * _NAME_HEX_BYTES}"
    return len(os.fsencode(root / name)) <= SOCKET_PATH_BYTES_MAX


def _is_usable(root: Path) -> bool:
    if not root.is_absolute() or not root.is_dir() or not os.access(root, os.W_OK | os.X_OK):
        return False
    found = root.stat()
    own = found.st_uid == os.getuid() and not found.st_mode & 0o022
    return own or bool(found.st_mode & stat.S_ISVTX)


def _prefix() -> str:
    return f"penstock-{os.getuid()}-"


def _make() -> tuple[Path, int]:
    root = runtime_root()
    _remove_abandoned(root)
    for _ in range(_FOLDER_TRIES):
        try:
            folder = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # Somebody took it for abandoned before it was locked.
        except OSError as error:
            raise UnavailableError(f"no folder for sockets in {root}: {error.strerror}") from error
        if _lock(fd) and _is_at(folder, fd):
            return folder, fd
        os.close(fd)
    raise UnavailableError(f"no folder for sockets in {root}: each was removed as it was made")


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(folder: Path, fd: int) -> bool:
    """Whether a folder is still what a descriptor was opened for."""
    with suppress(FileNotFoundError):
        return os.path.samestat(folder.lstat(), os.fstat(fd))
    return False


def _remove_abandoned(root: Path) -> None:
    """Removes the folders of processes of this user that are gone."""
    for folder in root.glob(f"{_prefix()}*"):
        # It may go at any moment; and what is not ours, or open to others, is left alone.
        with suppress(OSError, UnavailableError):
            require_private(folder)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _lock(fd) and _is_at(folder, fd):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)


def _remove(owner: int) -> None:
    """Removes the folder at the end of the process that made it; a fork of it leaves it alone."""
    if os.getpid() != owner:
        return
    folder, fd = _folders.pop(owner)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(fd)


_INT_BYTES = array.array("i").itemsize
# As plain numbers: every part of a handoff comes as a packet, and an enum takes microseconds.
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED, _LACKS_DESCRIPTORS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_ROOM_BYTES = socket.CMSG_SPACE(_INT_BYTES)
_CREDENTIALS = struct.Struct("3i")


class Packet(NamedTuple):
    """A frame that arrived, and the descriptors that came with it."""

    frame: bytes
    descriptors: tuple[int, ...]
    problem: str
    """Why it is not all that was sent; empty if it is complete."""


class SocketPeer(NamedTuple):
    """Who is at the other end of a Unix socket."""

    pid: int
    uid: int
    gid: int


def socket_peer(channel: socket.socket) -> SocketPeer:
    """The process at the other end, as the kernel knows it."""
    raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return SocketPeer(*_CREDENTIALS.unpack(raw))


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one channel; neither blocks, and no other program inherits them."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.settimeout(0)
    return pair


def send_packet(channel: socket.socket, frame: bytes, fd: int | None = None) -> bool:
    """Sends a frame, with a descriptor if there is one; false if there is no room now.

    Raises `OSError`: the other end is lost.
    """
    ancillary = []
    if fd is not None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        channel.sendmsg([frame], ancillary, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    return True


def receive_packet(
    channel: socket.socket, bytes_max: int
) -> Packet | Empty | ChannelClosed | ChannelFailed:
    """The next packet, if there is one; the caller owns its descriptors."""
    try:
        frame, ancillary, flags, _ = channel.recvmsg(bytes_max, _ROOM_BYTES, _CLOSE_ON_EXEC)
    except BlockingIOError:
        return Empty()
    except ConnectionError as error:
        return ChannelFailed(f"the channel broke: {error.strerror}")
    descriptors = _descriptors(ancillary) if ancillary else ()
    if not frame and not descriptors and _hung_up(channel):
        return ChannelClosed()
    problem = ""
    if flags & _TRUNCATED:
        problem = f"frame is longer than {bytes_max} bytes"
    elif flags & _LACKS_DESCRIPTORS:
        problem = "more descriptors came than one, or than this process has room for"
    return Packet(frame, descriptors, problem)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % _INT_BYTES])
    return tuple(found)


def _hung_up(channel: socket.socket) -> bool:
    """Whether the channel has ended; an empty packet reads the same."""
    poller = select.poll()
    poller.register(channel, 0)
    return any(events & select.POLLHUP for _, events in poller.poll(0))
