"""How a writer and a target of shared memory find each other, and know whom they found.

    description    magic (8 bytes), version (1), msgpack map: address, token, size
    writer  ──→    the token (16 bytes)
    target  ──→    one byte, with the descriptor of the memory
    writer  ──→    notices, each led by one byte

They meet at a Unix socket under an abstract name. The one rule: before a target gives memory to
anybody, it holds a pidfd of who gets it, from the kernel and not from what the writer says.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from typing import Annotated

import msgspec

from penstock.errors import UnavailableError

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
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet.


class Description(msgspec.Struct, frozen=True, tag="shared memory", forbid_unknown_fields=True):
    """What a writer has to know of an area."""

    peer: Annotated[str, msgspec.Meta(max_length=200)]
    """Whose area it is."""
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
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


def listen() -> tuple[socket.socket, str]:
    """A socket for writers to come to, and its address, which nobody can guess."""
    address = f"penstock-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind("\0" + address)
    listener.listen()
    return listener, address


def call(description: Description) -> socket.socket:
    """A connection to the target of an area, on which the token was sent.

    Raises:
        UnavailableError: nobody is there, or too many are calling.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect("\0" + description.address)
        connection.send(description.token)
    except OSError as error:
        connection.close()
        raise UnavailableError(
            f"no way to the area of {description.peer!r}: {error.strerror}"
        ) from error
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
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid = struct.unpack("3i", raw)[0]
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
