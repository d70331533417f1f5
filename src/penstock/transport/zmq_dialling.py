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
    Hello,
    Refusal,
    Refused,
    Welcome,
    WireError,
    decode_greeting,
    encode_greeting,
)
from penstock.transport.zmq_link import Link, Pulse, Socket, context

if TYPE_CHECKING:
    from collections import Counter

    from penstock.transport.zmq_link import ChannelSettings


class Dialling:
    """A socket to a listener, on which a hello was sent."""

    def __init__(self, address: str, hello: Hello, settings: ChannelSettings) -> None:
        self._address = address
        self._settings = settings
        self._socket: Socket = context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, HELLO_BYTES_MAX)
        self._socket.connect(address)
        self._socket.send(encode_greeting(hello), zmq.DONTWAIT)

    def answer(self, refused: Counter[Refused]) -> Welcome | Refusal | None:
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
                if error.reason is Refused.VERSION:
                    return Refusal(cause=str(error))

    def _read(self, parts: list[bytes]) -> Welcome | Refusal:
        greeting = decode_greeting(parts[0])
        if len(parts) != 1 or isinstance(greeting, Hello):
            raise WireError(Refused.GARBAGE, "a hello, or several parts, where an answer belongs")
        if isinstance(greeting, Welcome):
            for address in (greeting.link, greeting.pulse):
                if _scheme(address) != _scheme(self._address):
                    raise WireError(
                        Refused.GARBAGE, f"{self._address} answered with the address {address}"
                    )
        return greeting

    def connect(self, welcome: Welcome) -> tuple[Link, Pulse]:
        """The connections to where the listener waits."""
        link = Link(self._settings, peer_window_frames=welcome.window.frames)
        link.connect(_reachable(welcome.link, dialled=self._address))
        pulse = Pulse(self._settings)
        pulse.connect(_reachable(welcome.pulse, dialled=self._address))
        return link, pulse

    def watch(self, epoll: select.epoll) -> None:
        """Has an epoll wake up for the answer."""
        epoll.register(self._socket.fileno(), select.EPOLLIN)

    def close(self, epoll: select.epoll) -> None:
        """Gives the socket back."""
        epoll.unregister(self._socket.fileno())
        self._socket.close(linger=0)


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _reachable(address: str, *, dialled: str) -> str:
    """An address as it can be called from here: a listener may know itself as 0.0.0.0."""
    if not address.startswith("tcp://"):
        return address
    host, _, _ = dialled.rpartition(":")
    return f"{host}:{address.rpartition(':')[2]}"
