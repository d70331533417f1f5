"""The two ZeroMQ connections of a channel, each a socket with a monitor.

    link (PAIR)        the messages ──────────────────┐
    pulse (DEALER)     heartbeats, and nothing else ──┼── epoll: one descriptor for all
    their monitors     what became of each ───────────┘

Connections are made once, so what is lost stays lost, and what arrives comes from the one that
was made. A peer that dies is told by the kernel at once, and its link is lost; of one that is
stopped, or unreachable, the pulse is lost.

The one rule: messages are read after the monitor. ZeroMQ hands over the last messages of a
connection before it reports the connection's end, so none of them is overlooked.
"""

from __future__ import annotations

import atexit
import os
import secrets
import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.transport.base import FRAME_BYTES_MAX
from penstock.transport.wire import (
    HEADER_BYTES,
    HELLO_BYTES_MAX,
    WINDOW_BYTES_MAX,
    WINDOW_FRAMES_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Socket: TypeAlias = zmq.Socket[bytes]

SOCKETS_MAX = 4096
"""A channel takes six: link and pulse, and for each the two ends of its monitor."""
CONTROL_FRAMES = 64
"""Room beside the window for what is not the caller's: opening, credit and closing."""

_NEVER_MS = 3_600_000
"""No connection is made twice; a link is closed long before. (The value that means never has
ZeroMQ drop messages that had arrived when the connection was lost.)"""

_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
)

_contexts: dict[int, zmq.Context[Socket]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """How long ends wait for each other, and how much they keep for each other."""

    heartbeat_s: float = 1.0
    """An end that hears nothing asks this often whether the other is there."""
    silence_s: float = 5.0
    """A peer that does not answer for so long is lost: found within `heartbeat_s + silence_s +
    settle_s` of its last sign of life."""
    open_s: float = 10.0
    """A channel that is not open by then has failed."""
    settle_s: float = 0.2
    """When the pulse is lost but not the link, so long is waited for what is on its way."""
    linger_s: float = 1.0
    """What was sent before `close` is kept for delivery no longer than this."""
    window_frames: int = 1024
    """How many frames the other end may send before any of them is taken."""
    window_bytes: int = 4 * FRAME_BYTES_MAX
    """How many bytes these frames may have together."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_s <= self.silence_s <= 3600:
            raise ValueError(
                f"heartbeat_s is {self.heartbeat_s} and silence_s {self.silence_s}, need "
                "0.01 <= heartbeat_s <= silence_s <= 3600"
            )
        for field, value in (
            ("open_s", self.open_s),
            ("settle_s", self.settle_s),
            ("linger_s", self.linger_s),
        ):
            if not 0 < value <= 3600:
                raise ValueError(f"{field} is {value}, must be more than 0 and at most 3600")
        if not 2 <= self.window_frames <= WINDOW_FRAMES_MAX:
            raise ValueError(
                f"window_frames is {self.window_frames}, must be from 2 to {WINDOW_FRAMES_MAX}"
            )
        if not 2 * FRAME_BYTES_MAX <= self.window_bytes <= WINDOW_BYTES_MAX:
            raise ValueError(
                f"window_bytes is {self.window_bytes}, must be from {2 * FRAME_BYTES_MAX}, twice "
                f"the longest frame, to {WINDOW_BYTES_MAX}"
            )


def context() -> zmq.Context[Socket]:
    """The ZeroMQ context of this process; after a fork, another one.

    At the end of the process it waits for last messages, for as long as their sockets linger.
    """
    found = _contexts.get(os.getpid())
    if found is None:
        found = _contexts[os.getpid()] = zmq.Context()
        found.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        atexit.register(found.destroy)
    return found


def private_address(near: str) -> str:
    """A new address to bind to, of the kind of `near`, that nobody else has or can guess.

    For ipc it is an abstract name: it lies in no file system, and is gone with its socket.
    """
    if near.startswith("ipc://"):
        return f"ipc://@penstock-{secrets.token_hex(16)}"
    host, _, _ = near.rpartition(":")
    return f"{host}:*"


class MonitoredSocket:
    """A socket for one peer, with the monitor that says what became of the connection."""

    def __init__(self, kind: zmq.SocketType, settings: ChannelSettings) -> None:
        self._socket: Socket = context().socket(kind)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(settings.open_s))
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._monitor: Socket = self._socket.get_monitor_socket(_EVENTS)
        self._binds = False
        self._connections: set[int] = set()
        self.connected = False
        """Whether there ever was a connection."""
        self.greeted = False
        """Whether the other end ever answered on it; the kernel connects to who is stopped, too."""
        self.lost = False
        """Whether the connection that there was is gone."""
        self.refused = False
        """Whether nobody was there to connect to."""

    def bind(self, address: str) -> str:
        """Waits for a peer at an address; returns it as the peer has to call it."""
        # It stays bound: ZeroMQ would end the connections of an address with it.
        self._socket.bind(address)
        self._binds = True
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Begins to connect to a peer that is bound."""
        self._socket.connect(address)

    def look(self) -> None:
        """Reads what the monitor has to tell."""
        while (parts := _receive(self._monitor)) is not None:
            event = parse_monitor_message(parts)
            kind, fd = event["event"], int(event["value"])
            if kind in {zmq.Event.ACCEPTED, zmq.Event.CONNECTED}:
                self._connections.add(fd)
                self.connected = True
                # Somebody else may have called at our door before; but we call once.
                self.lost &= not self._binds
            elif kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.greeted = True
            elif kind == zmq.Event.DISCONNECTED:
                self._connections.discard(fd)
                self.lost |= not self._connections
            elif kind == zmq.Event.CLOSED and not self._binds and not self.connected:
                self.refused = True

    def watch(self, epoll: select.epoll) -> None:
        """Has an epoll wake up for this socket and its monitor."""
        for socket in (self._socket, self._monitor):
            epoll.register(socket.fileno(), select.EPOLLIN)

    def close(self, epoll: select.epoll, *, linger_s: float = 0.0) -> None:
        """Gives the sockets back; what was sent is still delivered for a while if it lingers."""
        for socket in (self._socket, self._monitor):
            epoll.unregister(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=milliseconds(linger_s))


class Link(MonitoredSocket):
    """Carries the messages. A PAIR socket turns away who comes while its peer is there."""

    def __init__(self, settings: ChannelSettings, *, peer_window_frames: int) -> None:
        super().__init__(zmq.PAIR, settings)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + HEADER_BYTES)
        # A peer that keeps to its window never fills these; one that does not is stopped.
        self._socket.setsockopt(zmq.RCVHWM, settings.window_frames + CONTROL_FRAMES)
        self._socket.setsockopt(zmq.SNDHWM, peer_window_frames + CONTROL_FRAMES)

    def messages(self) -> Iterator[list[bytes]]:
        """Takes what has arrived, message by message, each in its parts."""
        while (parts := _receive(self._socket)) is not None:
            yield parts

    def send(self, message: bytes) -> bool:
        """Hands a message over; false when there is no room, or nobody to send to."""
        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True


class Pulse(MonitoredSocket):
    """Carries nothing but ZeroMQ's heartbeats, which its I/O thread sends and answers.

    They are not on the link, because ZeroMQ (4.3.5) aborts the process when a heartbeat is due
    on a connection that has ended while its messages could not be taken: as when a peer is
    killed soon after its channel was closed. Here no message is ever sent, and one of a
    stranger is always taken, since the latest replaces the one before.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(zmq.DEALER, settings)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, HELLO_BYTES_MAX)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(settings.heartbeat_s))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds(settings.silence_s))

    def look(self) -> None:
        """Reads what the monitor has to tell, and throws away what no peer of ours sends."""
        super().look()
        _receive(self._socket)


def _receive(socket: Socket) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def milliseconds(seconds: float) -> int:
    """As ZeroMQ takes times; a time that is not nothing does not become nothing."""
    return max(1, round(seconds * 1000)) if seconds > 0 else 0
