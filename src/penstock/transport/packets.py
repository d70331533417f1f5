"""Packets: frames over Unix sockets that keep their borders, with a descriptor where one is sent.

    ours, theirs = channel_pair()
    send_packet(ours, frame, arena.fd)
    packet = receive_packet(theirs, bytes_max)

The one rule: every descriptor that arrives has an owner, which is the caller of `receive_packet`.
"""

from __future__ import annotations

import array
import select
import socket
from typing import NamedTuple

from penstock.transport.base import ChannelClosed, ChannelFailed, Empty

_INT_BYTES = array.array("i").itemsize
# As plain numbers: every part of a handoff comes as a packet, and an enum takes microseconds.
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED, _LACKS_DESCRIPTORS = int(socket.MSG_TRUNC), int(socket.MSG_CTRUNC)
_ROOM_BYTES = socket.CMSG_SPACE(_INT_BYTES)


class Packet(NamedTuple):
    """A frame that arrived, and the descriptors that came with it."""

    frame: bytes
    descriptors: tuple[int, ...]
    problem: str
    """Why it is not all that was sent; empty if it is complete."""


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
