"""Who may connect to a listener with the keys of machines.

ZeroMQ asks, for each connection, a socket of the same context whether the peer's key is good (its
authentication protocol, RFC 27). Here the listener's own thread answers when it looks after its
listener: no thread waits for it. A context of its own keeps the question from the sockets of
channels, whose keys come from the listener's welcome.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from penstock.transport.machine_keys import MachineKeys
    from penstock.transport.zmq_link import Socket

logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_REQUEST_PARTS = 7
"""Version, request, domain, address, identity, mechanism, and the key."""
LOGGED_MAX = 64
"""Strangers that are named in the log; later ones are counted only."""


class KeyCheck:
    """Answers for the sockets of `context`, which must be made after it."""

    def __init__(self, keys: MachineKeys) -> None:
        self._keys = keys
        self.context: zmq.Context[Socket] = zmq.Context()
        self._socket: Socket = self.context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)
        self._logged: set[tuple[bytes, bytes]] = set()

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def answer(self) -> int:
        """Answers all questions that are waiting; how many peers were refused."""
        refused = 0
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return refused
            version, request, _, address, _, mechanism, *key = parts
            good = (
                len(parts) == _REQUEST_PARTS and mechanism == b"CURVE" and self._keys.admits(key[0])
            )
            if not good:
                refused += 1
                self._log(address, key[0] if key else b"")
            status = b"200" if good else b"400"
            self._socket.send_multipart([version, request, status, b"", b"", b""])

    def close(self) -> None:
        """Ends the context; its other sockets must be closed before."""
        self._socket.close(linger=0)
        self.context.term()

    def _log(self, address: bytes, key: bytes) -> None:
        if (address, key) in self._logged or len(self._logged) >= LOGGED_MAX:
            return
        self._logged.add((address, key))
        logger.warning(
            "refused a connection from %s: its key %s is not among the peers of this machine",
            *(address.decode(errors="replace"), key.hex()),
        )
