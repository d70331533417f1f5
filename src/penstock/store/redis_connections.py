"""Connections to Redis: which servers, how they are opened, and which are free.

redis-py opens them: it looks up names, speaks TLS, logs in, and asks Sentinels. That takes as long
as it takes (nobody can bound the look-up of a name), so a thread does it, and a caller waits for
the thread no longer than it has time. A connection that comes too late is there for the next call.

The one rule: a password is in the memory of redis-py while a connection is opened, and nowhere
else: not in a URL, a message, a `repr` or a log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.config.shared_stores import Node
from penstock.errors import ConfigError, UnavailableError, install_hint
from penstock.store.blobs import BlobStoreError
from penstock.store.redis_wire import RedisWire

if TYPE_CHECKING:
    from types import ModuleType

    from penstock.config.shared_stores import RedisSettings

OPEN_S = 3.0
"""For the connection, for each message of TLS, and for each reply of the log-in. A server that does
not answer in it is tried anew, so that one that was started again is found."""


class RedisConnections:
    """Opens connections, and keeps those that nobody uses."""

    def __init__(self, settings: RedisSettings) -> None:
        try:
            import redis  # noqa: PLC0415 - Only who has such a tier needs the package.
        except ImportError as problem:
            raise UnavailableError(
                f"Redis needs the package redis: {install_hint('redis')} ({problem})"
            ) from None
        self._redis: ModuleType = redis
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[Node | None, list[RedisWire]] = {}
        self._late: dict[Node | None, deque[_Opening]] = {}
        self._closed = False

    def take(self, node: Node | None, deadline: float) -> RedisWire:
        """A connection to a server; `None` is the one of the URL, or that the Sentinels name.

        Raises `BlobStoreError`: there is none before the deadline.
        """
        while True:
            with self._lock:
                idle = self._idle.get(node)
                wire = idle.pop() if idle else None
            if wire is None:
                return self._open(node, deadline)
            if wire.is_idle():
                return wire
            wire.close()

    def give_back(self, node: Node | None, wire: RedisWire) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(node, []).append(wire)
                return
        wire.close()

    def drop(self) -> None:
        """Closes all that nobody uses: one was lost, so the others are of no use either."""
        with self._lock:
            dropped = [wire for wires in self._idle.values() for wire in wires]
            self._idle.clear()
        for wire in dropped:
            wire.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            late = [opening for openings in self._late.values() for opening in openings]
        for opening in late:
            opening.abandon()
        self.drop()

    def _open(self, node: Node | None, deadline: float) -> RedisWire:
        opening = self._late_one(node) or _Opening(self, node)
        if not opening.done.wait(max(0.0, deadline - time.monotonic())):
            with self._lock:
                self._late.setdefault(node, deque()).append(opening)
            raise BlobStoreError(f"{self._called(node)} could not be reached in time")
        if opening.wire is None:
            raise BlobStoreError(f"{self._called(node)} cannot be reached: {opening.problem}")
        return opening.wire

    def _late_one(self, node: Node | None) -> _Opening | None:
        """A connection that an earlier caller did not wait for, unless it came to nothing.

        So threads do not pile up behind a server that does not answer.
        """
        while True:
            with self._lock:
                late = self._late.get(node)
                if not late:
                    return None
                opening = late.popleft()
            if not opening.done.is_set() or (opening.wire is not None and opening.wire.is_idle()):
                return opening
            if opening.wire is not None:
                opening.wire.close()

    def _called(self, node: Node | None) -> str:
        nodes = [node] if node is not None else self._settings.nodes
        return f"Redis at {', '.join(map(str, nodes))}"

    def dial(self, node: Node | None) -> RedisWire:
        """Opens a connection, however long it takes."""
        if node is None:
            node = self._settings.nodes[0] if not self._settings.sentinel else self._master()
        secret = self._settings.password
        arguments = self._arguments()
        arguments |= {
            "db": self._settings.database,
            "username": self._settings.username or None,
            "password": secret.read() if secret is not None else None,
        }
        if not node.port:
            connection = self._redis.UnixDomainSocketConnection(node.host, **arguments)
        elif self._settings.encrypted:
            connection = self._redis.SSLConnection(
                host=node.host, port=node.port, **arguments, **self._certificates()
            )
        else:
            connection = self._redis.Connection(host=node.host, port=node.port, **arguments)
        connection.connect()
        # Version 2 to 8 have it under this name; there is no other way to it.
        sock = connection._sock  # noqa: SLF001
        return RedisWire(sock, f"Redis at {node}", connection.disconnect)

    def _arguments(self) -> dict[str, Any]:
        return {
            "socket_timeout": OPEN_S,
            "socket_connect_timeout": OPEN_S,
            "protocol": 2,
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
        }

    def _certificates(self) -> dict[str, Any]:
        return {
            "ssl_ca_certs": self._settings.ca_file or None,
            "ssl_certfile": self._settings.certificate_file or None,
            "ssl_keyfile": self._settings.key_file or None,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }

    def _master(self) -> Node:
        """Which server the Sentinels say is the master now."""
        from redis.sentinel import Sentinel  # noqa: PLC0415

        secret = self._settings.sentinel_password
        arguments = self._arguments()
        arguments["password"] = secret.read() if secret is not None else None
        if self._settings.encrypted:
            arguments |= {"ssl": True, **self._certificates()}
        sentinel = Sentinel(list(self._settings.nodes), sentinel_kwargs=arguments)
        try:
            host, port = sentinel.discover_master(self._settings.sentinel)
        finally:
            for each in sentinel.sentinels:
                each.close()
        return Node(str(host), int(port))


class _Opening:
    """A connection that a thread opens."""

    def __init__(self, connections: RedisConnections, node: Node | None) -> None:
        self.done = threading.Event()
        self.wire: RedisWire | None = None
        self.problem = ""
        self._connections = connections
        self._node = node
        self._abandoned = False
        thread = threading.Thread(target=self._run, name="penstock-redis-open", daemon=True)
        thread.start()

    def abandon(self) -> None:
        """Nobody will use it; it is closed, now or when it is there."""
        self._abandoned = True
        if self.done.is_set() and self.wire is not None:
            self.wire.close()

    def _run(self) -> None:
        from redis.exceptions import RedisError  # noqa: PLC0415

        try:
            self.wire = self._connections.dial(self._node)
        except (RedisError, OSError, ConfigError, ValueError) as problem:
            self.problem = " ".join(str(problem).split()) or type(problem).__name__
        finally:
            self.done.set()
        if self._abandoned and self.wire is not None:
            self.wire.close()
