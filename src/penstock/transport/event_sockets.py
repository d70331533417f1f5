"""Two ZeroMQ sockets for numbered messages to anybody: published once, and sent again on request.

    PUB     topic, number, payload                to all who subscribed
    ROUTER  number →                              "from this one on", of anybody who connects
            → topic, number, payload, …           what was asked for, ended by the number -1

This is the wire form of vLLM's KV events. Nobody is let in or kept out here: `config` says which
address may be used for what.

The one rule: nothing waits for a reader. Messages for one that is too slow are dropped, which the
reader sees by their numbers. As in `zmq_link`, no socket has a receive limit.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

import zmq

from penstock.errors import UnavailableError
from penstock.transport.zmq_link import context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.transport.zmq_link import Socket

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number that ends an answer; in a request it asks for a snapshot."""
REQUEST_BYTES_MAX = 256
"""Subscriptions and requests are shorter; who sends more is disconnected."""
CLIENTS_MAX = 1024
"""Readers whose requests wait at a time; those of further ones are dropped."""
_REQUEST_PARTS = 3
"""The reader's name, which ZeroMQ adds, an empty part, and the number."""


class EventSockets:
    """The sockets of one stream of messages."""

    def __init__(
        self, host: str, port: int, replay_port: int, *, queue_count: int, replay_count: int
    ) -> None:
        """Binds both.

        Args:
            host: An IP address of this machine.
            port: Where messages are published; 0: any.
            replay_port: Where they can be asked for; 0: any.
            queue_count: How many messages are kept for a slow subscriber.
            replay_count: How many an answer may have.

        Raises:
            UnavailableError: an address cannot be used.
        """
        self._published: Socket = context().socket(zmq.PUB)
        self._asked: Socket = context().socket(zmq.ROUTER)
        try:
            self.address = _bind(self._published, host, port, queue_count)
            # ZeroMQ counts what was read as room only when that is half of the limit.
            room = 2 * (replay_count + 1)
            self.replay_address = _bind(self._asked, host, replay_port, room)
        except UnavailableError:
            self.close()
            raise

    @property
    def descriptor(self) -> int:
        """Becomes readable when a request may have arrived."""
        return int(self._asked.get(zmq.FD))

    def publish(self, topic: bytes, number: int, payload: bytes) -> None:
        """Sends a message to all subscribers that have room for it."""
        self._published.send_multipart((topic, _encode(number), payload), zmq.NOBLOCK)

    def requests(self) -> dict[bytes, int | None]:
        """Who asks, and from which number on; `None`: for a snapshot.

        Of several requests of one reader the last counts. What is no request is ignored.
        """
        found: dict[bytes, int | None] = {}
        while int(self._asked.get(zmq.EVENTS)) & zmq.POLLIN:
            parts = self._asked.recv_multipart(zmq.NOBLOCK)
            if len(parts) != _REQUEST_PARTS or parts[1] or len(parts[2]) != NUMBER_BYTES:
                continue
            if len(found) < CLIENTS_MAX or parts[0] in found:
                found[parts[0]] = None if parts[2] == END else int.from_bytes(parts[2], "big")
        return found

    def answer(self, reader: bytes, topic: bytes, number: int, payload: bytes) -> None:
        """Sends a message again to one who asked."""
        self._answer((reader, b"", topic, _encode(number), payload))

    def end_answer(self, reader: bytes) -> None:
        """That was all."""
        self._answer((reader, b"", b"", END, b""))

    def close(self) -> None:
        """Drops what is not sent; may be called twice."""
        self._published.close(linger=0)
        self._asked.close(linger=0)

    def _answer(self, parts: Sequence[bytes]) -> None:
        # A ROUTER drops what is for a reader that is gone, or that has no room.
        self._asked.send_multipart(parts, zmq.NOBLOCK)


def _encode(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _bind(socket: Socket, host: str, port: int, send_limit: int) -> str:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, send_limit)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    if ip_address(host).version == 6:
        socket.set(zmq.IPV6, 1)
        host = f"[{host}]"
    address = f"tcp://{host}:{port}"
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UnavailableError(f"{address} cannot be listened on: {error}") from error
    found: str = socket.get_string(zmq.LAST_ENDPOINT)
    return found
