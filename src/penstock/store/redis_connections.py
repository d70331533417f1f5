"""Connections to Redis: which servers, how they are opened, and which are free.

redis-py opens them: it looks up names, speaks TLS, logs in, and asks Sentinels. That takes as long
as it takes (nobody can bound the look-up of a name), so a thread does it, and a caller waits for
the thread no longer than it has time. A connection that comes too late is there for the next call.

The one rule: a password is in the memory of redis-py while a connection is opened, and nowhere
else: not in a URL, a message, a `repr` or a log.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, UnavailableError
from penstock.store.blobs import BlobStoreError
from penstock.store.redis_wire import RedisWire
from penstock.vocabulary.arguments import as_flag, as_int, as_seconds, as_text

if TYPE_CHECKING:
    from types import ModuleType

    from penstock.store.blobs import Secret

OPEN_S = 3.0
"""For the connection, for each message of TLS, and for each reply of the log-in. A server that does
not answer in it is tried anew, so that one that was started again is found."""
PORT = 6_379
SENTINEL_PORT = 26_379
DATABASE_MAX = 9_999
TTL_S_MAX = 10 * 365 * 86_400
THREADS_MAX = 64
_URL = re.compile(
    r"(?P<scheme>rediss?)://(?:(?P<user>[^@/:\s]*)(?P<secret>:[^@\s]*)?@)?"
    r"(?P<nodes>[^/@\s]+)(?:/(?P<database>[0-9]{1,4}))?/?"
)
_UNIX = re.compile(r"unix://(?P<path>/[^\s?#@]+)")
_NODE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


class Node(NamedTuple):
    """A server: a host with a port, or the path of a Unix socket with port 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Which Redis or Valkey, and how it is spoken to.

    | `url`                              | with           | is                                   |
    |------------------------------------|----------------|--------------------------------------|
    | `redis://host:6379/0`              |                | one server, database 0               |
    | `rediss://user@host:6379`          |                | the same over TLS, as an ACL user    |
    | `unix:///run/redis/redis.sock`     |                | a server of this machine             |
    | `redis://a:26379,b:26379`          | `sentinel`     | the master that the Sentinels name   |
    | `redis://a:6379,b:6379`            | `cluster`      | a cluster, found through any of them |

    Raises:
        ConfigError: a setting is wrong; `field` names it.
    """

    url: str
    password: Secret | None = None
    sentinel: str = ""
    """The service that Sentinels know the master by."""
    sentinel_password: Secret | None = None
    cluster: bool = False
    ca_file: str = ""
    """Who signed the server's certificate, where it is none of the system's authorities."""
    certificate_file: str = ""
    """The client's own, with `key_file`, where the server asks for one."""
    key_file: str = ""
    ttl_s: float | None = None
    """Values go after this time, used or not; `None`: when the server needs their memory."""
    threads: int = 4

    def __post_init__(self) -> None:
        try:
            for field in ("url", "sentinel", "ca_file", "certificate_file", "key_file"):
                as_text(field, getattr(self, field))
            as_flag("cluster", self.cluster)
            as_int("threads", self.threads, 1, THREADS_MAX)
            ttl_s = 1.0 if self.ttl_s is None else as_seconds("ttl_s", self.ttl_s)
        except ValueError as problem:
            field, _, rest = str(problem).partition(" ")
            raise ConfigError(field, rest) from None
        if not 0.001 <= ttl_s <= TTL_S_MAX:
            raise ConfigError(
                "ttl_s", f"is {ttl_s}, must be from 0.001 to {TTL_S_MAX} seconds, or None"
            )
        self._require_sense()

    def _require_sense(self) -> None:
        _parsed(self)
        if self.cluster and self.sentinel:
            raise ConfigError(
                "sentinel", f"is {self.sentinel!r} beside cluster, must be one of the two"
            )
        if self.cluster and self.database:
            raise ConfigError("url", f"has database {self.database}, must have 0 for a cluster")
        if bool(self.certificate_file) != bool(self.key_file):
            raise ConfigError(
                "certificate_file",
                f"is {self.certificate_file!r} and key_file is {self.key_file!r}, must be both or "
                "none",
            )
        if len(self.nodes) > 1 and not self.cluster and not self.sentinel:
            raise ConfigError(
                "url", f"has {len(self.nodes)} servers, must have one without sentinel or cluster"
            )

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The servers that are named; with `sentinel`, the Sentinels."""
        return _parsed(self)[0]

    @property
    def username(self) -> str:
        return _parsed(self)[1]

    @property
    def database(self) -> int:
        return _parsed(self)[2]

    @property
    def encrypted(self) -> bool:
        return self.url.startswith("rediss:")


def _parsed(settings: RedisSettings) -> tuple[tuple[Node, ...], str, int]:
    """The servers, the user and the database that a URL names."""
    path = _UNIX.fullmatch(settings.url)
    if path and not settings.cluster and not settings.sentinel:
        return (Node(path["path"], 0),), "", 0
    found = _URL.fullmatch(settings.url)
    if found is None or found["secret"]:
        # The URL is not shown: it may have a password, at whatever place.
        problem = "has a password" if found else "is none"
        raise ConfigError(
            "url",
            f"{problem}, must be redis://HOST:PORT/DATABASE, rediss://USER@HOST:PORT or "
            "unix:///PATH, where the password is in a file or an environment variable",
        )
    nodes = []
    for text in found["nodes"].split(","):
        node = _NODE.fullmatch(text)
        port = int((node and node["port"]) or (SENTINEL_PORT if settings.sentinel else PORT))
        if node is None or not 0 < port <= 65_535:
            raise ConfigError("url", f"has server {text[:80]!r}, must be HOST or HOST:PORT")
        nodes.append(Node(node["host"].strip("[]"), port))
    return tuple(nodes), found["user"] or "", int(found["database"] or 0)


class RedisConnections:
    """Opens connections, and keeps those that nobody uses."""

    def __init__(self, settings: RedisSettings) -> None:
        try:
            import redis  # noqa: PLC0415 - Only who has such a tier needs the package.
        except ImportError as problem:
            raise UnavailableError(
                f'Redis needs the package redis: pip install "penstock[redis]" ({problem})'
            ) from None
        self._redis: ModuleType = redis
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[Node | None, list[RedisWire]] = {}
        self._late: dict[Node | None, deque[_Opening]] = {}
        self._closed = False

    def take(self, node: Node | None, deadline: float) -> RedisWire:
        """A connection to a server; `None` is the one of the URL, or that the Sentinels name.

        Raises:
            BlobStoreError: there is none before the deadline.
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
