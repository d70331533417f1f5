"""The first half of a dialled channel: a hello to a listener, and its answer.

The one rule: an answer decides where the channel goes, so only the kind of address that was
dialled is accepted in it, and for tcp only the host that was dialled.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

import zmq

from penstock.transport.wire import (
    HELLO_BYTES_MAX,
    ChannelHello,
    ChannelRefusal,
    ChannelWelcome,
    RefusalReason,
    WireError,
    decode_greeting,
    encode_greeting,
)
from penstock.transport.zmq_link import (
    CURVE_BYTES,
    Socket,
    ZmqLink,
    ZmqPulse,
    keys_from,
    knock_with,
    new_socket,
)

if TYPE_CHECKING:
    from collections import Counter

    from penstock.transport.zmq_link import ChannelSettings


_BROKEN_OFF = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Dialling:
    """A socket to a listener, on which a hello was sent."""

    def __init__(
        self, address: str, hello: ChannelHello, settings: ChannelSettings, *, secret: bytes
    ) -> None:
        self._address = address
        self._settings = settings
        self._socket: Socket = new_socket(zmq.DEALER, bytes_max=HELLO_BYTES_MAX + CURVE_BYTES)
        if secret:
            knock_with(self._socket, keys_from(secret).public)
        self._monitor: Socket = self._socket.get_monitor_socket(_BROKEN_OFF)
        self._socket.connect(address)
        self._socket.send(encode_greeting(hello), zmq.DONTWAIT)

    def answer(self, refused: Counter[RefusalReason]) -> ChannelWelcome | ChannelRefusal | None:
        """What the listener answered, if it did; what is no answer is counted in `refused`."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                return self._read(parts)
            except WireError as error:
                refused[error.reason] += 1
                if error.reason is RefusalReason.VERSION:
                    return ChannelRefusal(cause=str(error))

    def _read(self, parts: list[bytes]) -> ChannelWelcome | ChannelRefusal:
        greeting = decode_greeting(parts[0])
        if len(parts) != 1 or isinstance(greeting, ChannelHello):
            raise WireError(
                RefusalReason.GARBAGE, "a hello, or several parts, where an answer belongs"
            )
        if isinstance(greeting, ChannelWelcome):
            for address in (greeting.link, greeting.pulse):
                if _scheme(address) != _scheme(self._address):
                    raise WireError(
                        RefusalReason.GARBAGE,
                        f"{self._address} answered with the address {address}",
                    )
        return greeting

    def connect(self, welcome: ChannelWelcome) -> tuple[ZmqLink, ZmqPulse]:
        """The connections to where the listener waits."""
        link = ZmqLink(self._settings, peer_window_frames=welcome.window.frames)
        key = welcome.key.encode()
        link.connect(_reachable(welcome.link, dialled=self._address), key)
        pulse = ZmqPulse(self._settings)
        pulse.connect(_reachable(welcome.pulse, dialled=self._address), key)
        return link, pulse

    @property
    def broken_off(self) -> bool:
        """Whether somebody is there who broke off before our hello: without the same secret."""
        return bool(self._monitor.poll(0))

    def watch(self, epoll: select.epoll) -> None:
        """Has an epoll wake up for the answer."""
        epoll.register(self._socket.fileno(), select.EPOLLIN)

    def close(self, epoll: select.epoll) -> None:
        """Gives the socket back."""
        epoll.unregister(self._socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _reachable(address: str, *, dialled: str) -> str:
    """An address as it can be called from here: a listener may know itself as 0.0.0.0."""
    if not address.startswith("tcp://"):
        return address
    host, _, _ = dialled.rpartition(":")
    return f"{host}:{address.rpartition(':')[2]}"
