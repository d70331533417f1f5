"""How a writer and a target of shared memory find each other, and know whom they found.

    description    magic (8 bytes), version (1), msgpack map: address, token, size
    writer  ──→    the token (16 bytes)
    target  ──→    one byte, with the descriptor of the memory
    writer  ──→    notices, each led by one byte

They meet at a Unix socket in a folder of mode 0700; each looks whether the other is of the same
user. The one rule: before a target gives memory to anybody, it holds a pidfd of who gets it, from
the kernel and not from what the writer says.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.errors import UnavailableError
from penstock.transport.private_folder import private_folder, socket_path

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"PENSTOCK"
VERSION = 1
TOKEN_BYTES = 16
GRANT = b"\x01"
"""What a descriptor is sent along with."""
NOTICE = b"\x02"
"""What a notice begins with, so that an empty one is not mistaken for the end."""
SIZE_MAX = 1 << 48

# As plain numbers: joining flags of an enum takes longer than the call.
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_CREDENTIALS = struct.Struct("3i")  # Process, user, group.
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet.


class Description(msgspec.Struct, frozen=True, tag="shared memory", forbid_unknown_fields=True):
    """What a writer has to know of an area."""

    peer: Annotated[str, msgspec.Meta(max_length=200)]
    """Whose area it is."""
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=107)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    size: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]


_DESCRIPTIONS = msgspec.msgpack.Decoder(Description)


def encode_description(description: Description) -> bytes:
    """As it goes over a control channel."""
    return MAGIC + bytes((VERSION,)) + msgspec.msgpack.encode(description)


def decode_description(encoded: bytes) -> Description:
    """What `encode_description` wrote; `ValueError` for anything else."""
    if not encoded.startswith(MAGIC) or len(encoded) <= len(MAGIC):
        raise ValueError("description is of no area: it does not begin as one")
    if encoded[len(MAGIC)] != VERSION:
        raise ValueError(
            f"description is of version {encoded[len(MAGIC)]}, this end knows {VERSION}"
        )
    try:
        return _DESCRIPTIONS.decode(encoded[len(MAGIC) + 1 :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"description cannot be read: {error}") from error


def listen(folder: Path | None = None) -> tuple[socket.socket, Path]:
    """A socket for writers to come to, and where it is: in a folder that only this user enters.

    Args:
        folder: where to make it; the private folder of this process if none is given.

    Raises:
        UnavailableError: it cannot be made there.
    """
    path = socket_path(private_folder() if folder is None else folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(bytes(path))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {path}: {error.strerror}") from error
    listener.listen()
    return listener, path


def user_of_peer(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def call(description: Description) -> socket.socket:
    """A connection to the target of an area, on which the token was sent.

    Raises:
        UnavailableError: nobody is there, or too many are calling.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(description.address)
        if user_of_peer(connection) != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        connection.send(description.token)
    except OSError as error:
        connection.close()
        raise UnavailableError(
            f"no way to the area of {description.peer!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        # A path with a zero byte: what is described is no socket.
        connection.close()
        raise UnavailableError(f"no way to the area of {description.peer!r}: {error}") from error
    return connection


def pidfd_of_peer(connection: socket.socket) -> int:
    """A descriptor of the process at the other end of a connection.

    Raises:
        UnavailableError: it is gone already.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EINVAL}:
            raise UnavailableError(f"the writer is gone: {error.strerror}") from error
    return _pidfd_by_number(connection)


def _pidfd_by_number(connection: socket.socket) -> int:
    """The same on an older kernel, which tells a number that may have been given again."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid = _CREDENTIALS.unpack(raw)[0]
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(f"the writer, process {pid}, is gone: {error.strerror}") from error
    if is_hung_up(connection):
        os.close(pidfd)
        raise UnavailableError(f"the writer, process {pid}, is gone")
    return pidfd


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end of a connection was closed, with its process or without."""
    try:
        return not connection.recv(1, _PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
