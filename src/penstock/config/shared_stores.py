"""How shared stores are reached: addresses, and the settings of each kind of client.

A configuration is refused when it is read if its address cannot be right; whether anybody answers
there, and whether a password is there, is seen when the tier is opened. Clients are in
`penstock.store`.

The one rule: no message shows a password. An address that may hold one is shown without it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError
from penstock.vocabulary.arguments import as_flag, as_float, as_int, as_seconds, as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


UNIX = "unix:"
"""Before the path of a Unix socket, in the place of a host."""
UNIX_PATH_MAX = 107
"""The kernel takes no more."""
PORT_MAX = 65_535
HOST_NAME_MAX = 253
"""Characters, as DNS has it."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_ADDRESS = re.compile(r"tcp://(?P<host>[^:/*\s]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")
ANYWHERE = frozenset({"0.0.0.0", "[::]"})
"""Hosts to listen at, which nobody can dial."""


def require_address(key: str, address: str) -> tuple[str, int]:
    """Host and port of an address that others dial.

    Raises `ConfigError`: it cannot be dialled.
    """
    found = _ADDRESS.fullmatch(address)
    host, port = (found["host"], int(found["port"])) if found else ("", 0)
    if host in {"", *ANYWHERE} or not 1 <= port <= PORT_MAX:
        raise ConfigError(
            key,
            f"is {address!r}, must be tcp://HOST:PORT, with a host that the others can dial and a "
            f"port from 1 to {PORT_MAX}",
        )
    return host, port


def require_host(key: str, host: str) -> None:
    """Refuses what is neither an IP address nor can be the name of a host.

    Raises `ConfigError`: names `key`.
    """
    try:
        ip_address(host)
    except ValueError:
        numeric = re.fullmatch(r"[0-9.]*", host) is not None or ":" in host
        if numeric or len(host) > HOST_NAME_MAX or _HOST_NAME.fullmatch(host) is None:
            raise ConfigError(
                key,
                f"is {host!r}, must be an address to listen on, such as '127.0.0.1', '0.0.0.0' or "
                "'::1', or the name of this host",
            ) from None


def require_name(key: str, name: str) -> None:
    """Refuses what cannot be the name of a host.

    Raises `ConfigError`: names `key`.
    """
    if len(name) > HOST_NAME_MAX or _HOST_NAME.fullmatch(name) is None:
        raise ConfigError(
            key,
            f"has {name!r}, must have names of hosts without scheme and port, separated by commas, "
            "such as 'llm.example.com'",
        )


def require_socket(key: str, host: str) -> None:
    """Refuses what is not `unix:` and the absolute path of a socket.

    Raises `ConfigError`: names `key`.
    """
    path = host.removeprefix(UNIX)
    # Before it is encoded: what is no text cannot be.
    is_path = re.match("/[^/]", path) is not None and path.isprintable()
    if not host.startswith(UNIX) or not is_path or len(path.encode()) > UNIX_PATH_MAX:
        raise ConfigError(
            key,
            f"is {host!r}, must be {UNIX} and the absolute path of a socket of at most "
            f"{UNIX_PATH_MAX} bytes",
        )


def port_range(ports: str) -> range:
    """The ports that a process may listen on; empty: any.

    Raises `ConfigError`: it is neither a port nor a range of them.
    """
    first, dash, last = ports.partition("-")
    texts = (first, last) if dash else (first, first)
    if not all(text.isascii() and text.isdecimal() and len(text) <= 5 for text in texts):
        low, high = -1, -1
    else:
        low, high = (int(text) for text in texts)
    if (low, high) == (0, 0):
        return range(0)
    if not 1 <= low <= high <= PORT_MAX:
        raise ConfigError(
            "serve.ports",
            f"is {ports!r}, must be '0' for any, a port, or a range of ports from 1 to "
            f"{PORT_MAX} such as '5200-5299'",
        )
    return range(low, high + 1)


SECRET_BYTES_MAX = 4_096
HIDDEN = "***"
"""In a message, for what may be a password."""
SHOWN_MAX = 200
SCHEMES = frozenset({"redis", "rediss", "unix", "s3", "gs", "az", "file"})
PORT = 6_379
SENTINEL_PORT = 26_379
TTL_S_MAX = 10 * 365 * 86_400
THREADS_MAX = 64
STAGING_MIB_MAX = 4_096
SEGMENT_GIB_MAX = 65_536
REFRESH_S_MAX = 3_600.0
_URL = re.compile(
    r"(?P<scheme>rediss?)://(?:(?P<user>[^@/:\s]*)(?P<secret>:[^@\s]*)?@)?"
    r"(?P<nodes>[^/@\s]+)(?:/(?P<database>[0-9]{1,4}))?/?"
)
_UNIX = re.compile(r"unix://(?P<path>/[^\s?#@]+)")
_NODE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]{1,253})(?::(?P<port>[0-9]{1,5}))?")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,15}")
_PLACE = re.compile(r"[A-Za-z0-9_.:,\[\]-]+(/[0-9]{0,4})?")
"""What comes after a user and a password: servers, and a database."""
_OBJECTS = re.compile(r"(?P<scheme>s3|gs|az|file)://(?P<place>[^\s?#@]+)", re.ASCII)
MASTER = re.compile(r"(?P<host>[A-Za-z0-9_.-]{1,253}):(?P<port>[0-9]{1,5})|etcd://[^\s@]{1,1000}")


def masked_url(url: str) -> str:
    """An address as a message may show it: whatever may be a password is left out."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        # A word alone may be a password; a host with its port is none.
        found = _NODE.fullmatch(url)
        return url if found and found["port"] else HIDDEN if url else ""
    if scheme not in SCHEMES:
        return f"{scheme}://{HIDDEN}" if _SCHEME.fullmatch(scheme) else HIDDEN
    named, at, place = rest.rpartition("@")
    place, asked, _ = place.partition("?")
    if at and not _PLACE.fullmatch(place):
        place = HIDDEN
    return f"{scheme}://{HIDDEN if named else ''}{at}{place}{asked and '?' + HIDDEN}"[:SHOWN_MAX]


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """Where a password or token is: in a file, or in a variable of this process's environment.

    It is read when it is needed, so one that was changed is noticed, and it is in no `repr`.
    """

    file: str = ""
    variable: str = ""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.variable):
            raise ValueError(
                f"file is {self.file!r} and variable is {self.variable!r}, must be one of the two"
            )

    def read(self) -> str:
        """The secret, without the line end that editors put behind it.

        Raises `ConfigError`: it is not there; the message says where, never what.
        """
        if self.variable:
            found = os.environ.get(self.variable, "")
            if not found:
                raise ConfigError(self.variable, "is not set in the environment, or is empty")
            return found
        try:
            with Path(self.file).open(encoding="utf-8") as file:
                found = file.read(SECRET_BYTES_MAX + 1).rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is not text"
            raise ConfigError(self.file, f"cannot be read: {reason}") from None
        if not 0 < len(found) <= SECRET_BYTES_MAX:
            raise ConfigError(
                self.file,
                f"has {len(found)} characters, must have from 1 to {SECRET_BYTES_MAX}",
            )
        return found


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
    """Of the Sentinels, where they want one; that of the master is `password`."""
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
        if self.sentinel_password and not self.sentinel:
            raise ConfigError(
                "sentinel_password",
                "is given, which has no effect without sentinel; leave it out",
            )
        if bool(self.certificate_file) != bool(self.key_file):
            raise ConfigError(
                "certificate_file",
                f"is {self.certificate_file!r} and key_file is {self.key_file!r}, must be both or "
                "none",
            )
        for field in ("ca_file", "certificate_file"):
            if getattr(self, field) and not self.encrypted:
                # Whoever gives it believes that nobody can listen.
                raise ConfigError(
                    field,
                    "is given, which has no effect without TLS; url must begin with rediss://",
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
        problem = ", which has a password" if found else ""
        raise ConfigError(
            "url",
            f"is {masked_url(settings.url)!r}{problem}, must be redis://HOST:PORT/DATABASE, "
            "rediss://USER@HOST:PORT or unix:///PATH, with the password in password_file or "
            "password_env",
        )
    nodes = []
    for text in found["nodes"].split(","):
        node = _NODE.fullmatch(text)
        port = int((node and node["port"]) or (SENTINEL_PORT if settings.sentinel else PORT))
        if node is None or not 0 < port <= PORT_MAX:
            raise ConfigError("url", f"has server {text[:80]!r}, must be HOST or HOST:PORT")
        nodes.append(Node(node["host"].strip("[]"), port))
    return tuple(nodes), found["user"] or "", int(found["database"] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """Which master, and what this client gives and takes.

    Raises:
        ConfigError: a setting is wrong; `field` names it.
    """

    master: str
    """`host:port`, or `etcd://…` where several masters take turns."""
    host: str = ""
    """This machine's name or address for the others; empty: that towards the master."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty: all."""
    segment_gib: float = 0.0
    """Memory that this client gives to the store; 0: others do."""
    replica_count: int = 1
    staging_mib: int = 32
    """Memory for each thread; it is also the most that a value may have."""
    threads: int = 4

    def __post_init__(self) -> None:
        try:
            for field in ("master", "host", "protocol", "devices"):
                as_text(field, getattr(self, field))
            as_int("replica_count", self.replica_count, 1, 16)
            as_int("staging_mib", self.staging_mib, 1, STAGING_MIB_MAX)
            as_int("threads", self.threads, 1, THREADS_MAX)
        except ValueError as problem:
            field, _, rest = str(problem).partition(" ")
            raise ConfigError(field, rest) from None
        gib = as_float(self.segment_gib)
        if gib is None or not 0 <= gib <= SEGMENT_GIB_MAX:
            raise ConfigError(
                "segment_gib", f"is {self.segment_gib!r}, must be from 0 to {SEGMENT_GIB_MAX}"
            )
        found = MASTER.fullmatch(self.master)
        if found is None:
            raise ConfigError("master", f"is {self.master!r}, must be HOST:PORT or etcd://…")
        if found["port"] and not 0 < int(found["port"]) <= PORT_MAX:
            raise ConfigError("master", f"has port {found['port']}, must be from 1 to {PORT_MAX}")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError("protocol", f"is {self.protocol!r}, must be 'tcp' or 'rdma'")
        if self.devices and self.protocol == "tcp":
            raise ConfigError(
                "devices",
                f"is {self.devices!r}, which has no effect with protocol 'tcp', must be empty",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """Which store, and how it is spoken to.

    Without `key_id` and `secret`, credentials are those that the provider's own tools would use:
    variables such as `AWS_ACCESS_KEY_ID`, a role of the machine, or a file of its command line.

    Raises:
        ConfigError: a setting is wrong; `field` names it.
    """

    url: str
    endpoint: str = ""
    """Of a store that speaks S3 and is not Amazon's, such as `https://minio:9000`."""
    region: str = ""
    key_id: Secret | None = None
    """S3: the access key's name."""
    secret: Secret | None = None
    """S3: the secret access key; Azure: the account's key; GCS: the service account's JSON."""
    ca_file: str = ""
    """Who signed the server's certificate, where it is none of the system's authorities."""
    refresh_s: float = 2.0
    """How often values of others are looked for."""
    threads: int = 8

    def __post_init__(self) -> None:
        try:
            for field in ("url", "endpoint", "region", "ca_file"):
                as_text(field, getattr(self, field))
            as_int("threads", self.threads, 1, THREADS_MAX)
            refresh_s = as_seconds("refresh_s", self.refresh_s)
        except ValueError as problem:
            field, _, rest = str(problem).partition(" ")
            raise ConfigError(field, rest) from None
        if refresh_s > REFRESH_S_MAX:
            raise ConfigError("refresh_s", f"is {refresh_s}, must be at most {REFRESH_S_MAX:g}")
        self._require_sense()

    def _require_sense(self) -> None:
        if not _OBJECTS.fullmatch(self.url):
            raise ConfigError(
                "url",
                f"is {masked_url(self.url)!r}, must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
                "az://ACCOUNT/CONTAINER/PATH or file:///FOLDER, with keys in secret_file or "
                "secret_env",
            )
        if self.scheme == "file" and not (
            self.url.startswith("file:///") and self.path.strip("/.")
        ):
            raise ConfigError(
                "url",
                f"is {self.url!r}, must be file:// and the absolute path of a folder of its own",
            )
        if self.scheme == "az" and not self.path.partition("/")[2].strip("/"):
            raise ConfigError("url", f"is {self.url!r}, must be az://ACCOUNT/CONTAINER/PATH")
        for field, schemes in _ONLY.items():
            if getattr(self, field) and self.scheme not in schemes:
                raise ConfigError(
                    field, f"is given, which has no effect with {self.scheme}://; leave it out"
                )
        if self.endpoint and not re.fullmatch(r"https?://[^\s?#@]+", self.endpoint):
            raise ConfigError(
                "endpoint",
                f"is {masked_url(self.endpoint)!r}, must be http://HOST[:PORT] or "
                "https://HOST[:PORT]",
            )
        if self.scheme == "s3" and bool(self.key_id) != bool(self.secret):
            given, missing = ("key_id", "secret") if self.key_id else ("secret", "key_id")
            raise ConfigError(given, f"is given without {missing}, must be both or none")

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    @property
    def path(self) -> str:
        """What follows the scheme."""
        return self.url.partition("://")[2]


_ONLY: Mapping[str, tuple[str, ...]] = {
    "endpoint": ("s3",),
    "region": ("s3",),
    "key_id": ("s3",),
    "secret": ("s3", "gs", "az"),
    "ca_file": ("s3", "gs", "az"),
}


def redis_settings(options: Mapping[str, Any]) -> RedisSettings:
    """The settings of a client, from the keys of its tier; so do the two below."""
    password = _secret(options, "password")
    sentinel_password = _secret(options, "sentinel_password")
    try:
        return RedisSettings(
            url=options["url"],
            password=password,
            sentinel=options["sentinel"],
            sentinel_password=sentinel_password,
            cluster=options["cluster"],
            ca_file=options["ca_file"],
            certificate_file=options["certificate_file"],
            key_file=options["key_file"],
            ttl_s=options["ttl_s"] or None,
            threads=options["threads"],
        )
    except ConfigError as error:
        raise _as_written(error, options) from None


def mooncake_settings(options: Mapping[str, Any]) -> MooncakeSettings:
    """Mooncake Store's."""
    return MooncakeSettings(
        master=options["master"],
        host=options["host"],
        protocol=options["protocol"],
        devices=options["devices"],
        segment_gib=options["segment_gib"],
        replica_count=options["replicas"],
        staging_mib=options["staging_mib"],
        threads=options["threads"],
    )


def object_settings(options: Mapping[str, Any]) -> ObjectSettings:
    """Those of objects and folders."""
    key_id, secret = _secret(options, "key_id"), _secret(options, "secret")
    try:
        return ObjectSettings(
            url=options["url"],
            endpoint=options["endpoint"],
            region=options["region"],
            key_id=key_id,
            secret=secret,
            ca_file=options["ca_file"],
            refresh_s=options["refresh_s"],
            threads=options["threads"],
        )
    except ConfigError as error:
        raise _as_written(error, options) from None


def _as_written(error: ConfigError, options: Mapping[str, Any]) -> ConfigError:
    """The error with the names that a file has for a secret: that of its file, or its variable."""
    field, problem = error.field, error.problem
    if f"{field}_file" in options:
        field = f"{field}_env" if options[f"{field}_env"] else f"{field}_file"
    for name in ("key_id", "secret"):
        problem = problem.replace(f"without {name},", f"without {name}_file or {name}_env,")
    return ConfigError(field, problem)


def _secret(options: Mapping[str, Any], name: str) -> Secret | None:
    """Where a secret is, if it is anywhere."""
    file, variable = options[f"{name}_file"], options[f"{name}_env"]
    if file and variable:
        raise ConfigError(
            f"{name}_file", f"is given beside {name}_env, must be one of the two or none"
        )
    return Secret(file=file, variable=variable) if file or variable else None


CLIENT_SETTINGS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "redis": redis_settings,
    "mooncake": mooncake_settings,
    "objects": object_settings,
}
"""The settings of each kind, from the keys of its tier. Raises `ConfigError` if one is wrong."""
