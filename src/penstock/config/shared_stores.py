"""Addresses, and the keys that only some kinds of tiers have.

The settings of a shared store are the keys of its tier, as they are: a client is made from them. A
configuration is refused when it is read if its address cannot be right; whether anybody answers
there, and whether a password is there, is seen when the tier is opened. Clients are in
`penstock.store`.

The one rule: no message shows a password. An address that may hold one is shown without it.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from penstock.errors import ConfigError
from penstock.extensions import OTHER_STORES
from penstock.vocabulary.arguments import as_text
from penstock.vocabulary.schema import (
    Gib,
    Number,
    String,
    Text,
    Whole,
    YesNo,
    read_fields,
    settings_of,
)

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


def port_range(ports: str, *, key: str = "serve.ports") -> range:
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
            key,
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


class Secret(NamedTuple):
    """Where a password or token is: in a file, or in a variable of this process's environment.

    It is read when it is needed, so one that was changed is noticed.
    """

    file: str
    variable: str

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
class HostOptions:
    """The keys of a tier of shared memory."""

    gib: Annotated[float, Gib(minimum=0, maximum=65_536)] = 0.0
    """Size of the arena with its checksums; the layout decides how many blocks fit; 0: use
    `blocks`."""
    huge_pages: Annotated[str, String(choices=("auto", "never"))] = "auto"
    """Whether to try huge pages."""
    numa_node: Annotated[int, Whole(minimum=-1, maximum=1_023)] = -1
    """NUMA node of the memory; -1: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """The keys of a tier of files."""

    path: Text
    """Absolute path of a folder of its own, writable by nobody else; engines that name the same
    folder share it."""
    gib: Annotated[float, Gib(minimum=1 / 1024, maximum=1 << 20)]
    """Room for the blocks of all ranks and engines; on a smaller file system, what it has."""
    threads: Annotated[int, Whole(minimum=4, maximum=8)] = 6
    """Of the store process, for reads and writes."""
    key_file: Text = ""
    """File with a key of 32 bytes: blocks are encrypted; empty: they are not."""
    other_versions: Annotated[str, String(choices=("refuse", "reclaim"))] = "refuse"
    """What to do with files of another format version."""


def _require_text(key: str, value: str) -> None:
    """Refuses what is too long to be one of the texts that a tier has."""
    try:
        as_text(key, value)
    except ValueError as problem:
        raise ConfigError(key, str(problem).removeprefix(f"{key} ")) from None


AskMs: TypeAlias = Annotated[float, Number(minimum=1, maximum=10_000)]
TimeoutS: TypeAlias = Annotated[float, Number(minimum=0.01, maximum=600)]
Threads: TypeAlias = Annotated[int, Whole(minimum=1, maximum=64)]
Compression: TypeAlias = Annotated[str, String(choices=("off", "zstd"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """The keys of every kind of shared store.

    Raises:
        ConfigError: one is wrong; `field` names it.
    """

    gib: Annotated[float, Gib(minimum=1 / 1024, maximum=1 << 20)] = 256.0
    """How much of the store this engine keeps track of; the store sets its own size."""
    ask_ms: AskMs = 50.0
    """Time to answer which blocks are there; a request waits at most twice as long."""
    timeout_s: TimeoutS = 2.0
    """How long one read or write may take."""
    threads: Threads = 4
    """Of the store process, for reads and writes."""

    def __post_init__(self) -> None:
        read_fields(self)
        for key in settings_of(type(self)):
            value, secret = getattr(self, key), key.removesuffix("_env")
            if isinstance(value, str):
                _require_text(key, value)
            if secret != key and value and getattr(self, f"{secret}_file"):
                raise ConfigError(
                    f"{secret}_file", f"is given beside {key}, must be one of the two or none"
                )
        self._require_sense()

    def _require_sense(self) -> None:
        """Refuses what each key allows and the store does not."""

    def _secret(self, name: str) -> Secret | None:
        """Where a secret is, if it is anywhere."""
        file, variable = getattr(self, f"{name}_file"), getattr(self, f"{name}_env")
        return Secret(file, variable) if file or variable else None

    def _key_of(self, secret: str) -> str:
        """Which of its two keys says where a secret is."""
        return f"{secret}_env" if getattr(self, f"{secret}_env") else f"{secret}_file"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings(SharedOptions):
    """Which Redis or Valkey, and how it is spoken to.

    | `url`                              | with           | is                                   |
    |------------------------------------|----------------|--------------------------------------|
    | `redis://host:6379/0`              |                | one server, database 0               |
    | `rediss://user@host:6379`          |                | the same over TLS, as an ACL user    |
    | `unix:///run/redis/redis.sock`     |                | a server of this machine             |
    | `redis://a:26379,b:26379`          | `sentinel`     | the master that the Sentinels name   |
    | `redis://a:6379,b:6379`            | `cluster`      | a cluster, found through any of them |
    """

    url: Text
    """`redis://HOST:PORT/DATABASE`, `rediss://…` with TLS, or `unix:///PATH`; without a
    password."""
    password_file: Text = ""
    """File with the password."""
    password_env: Text = ""
    """Or the environment variable that has it."""
    sentinel: Text = ""
    """The name of the service; `url` then lists the Sentinels."""
    sentinel_password_file: Text = ""
    """File with the password of the Sentinels, if they want one."""
    sentinel_password_env: Text = ""
    """Or the environment variable that has it."""
    cluster: YesNo = False
    """Whether `url` lists nodes of a cluster."""
    ca_file: Text = ""
    """Who signed the server's certificate, if not one of the system's authorities."""
    certificate_file: Text = ""
    """The client's certificate."""
    key_file: Text = ""
    """The key of that certificate."""
    ttl_s: Annotated[float, Number(minimum=0, maximum=31_536_000)] = 0.0
    """Values are removed after this time, used or not; 0: when the server needs their memory."""
    compression: Compression = "off"
    """Whether blocks are written compressed, without loss."""

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
                self._key_of("sentinel_password"),
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
    def password(self) -> Secret | None:
        return self._secret("password")

    @property
    def sentinel_password(self) -> Secret | None:
        return self._secret("sentinel_password")

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
class MooncakeSettings(SharedOptions):
    """Which master, and what this client gives and takes."""

    master: Text
    """`HOST:PORT` of the master, or `etcd://…`."""
    host: Text = ""
    """This machine's name for the others; empty: its address towards the master."""
    protocol: Annotated[str, String(choices=("tcp", "rdma"))] = "tcp"
    """How values travel."""
    devices: Text = ""
    """RDMA devices, separated by commas; empty: all."""
    segment_gib: Annotated[float, Gib(minimum=0, maximum=65_536)] = 0.0
    """Memory that this machine gives to the store; 0: others do."""
    replicas: Annotated[int, Whole(minimum=1, maximum=16)] = 1
    """Copies of each value."""
    staging_mib: Annotated[int, Whole(minimum=1, maximum=1024)] = 32
    """Memory for each thread, and the most that a value may have."""

    def _require_sense(self) -> None:
        found = MASTER.fullmatch(self.master)
        if found is None:
            raise ConfigError("master", f"is {self.master!r}, must be HOST:PORT or etcd://…")
        if found["port"] and not 0 < int(found["port"]) <= PORT_MAX:
            raise ConfigError("master", f"has port {found['port']}, must be from 1 to {PORT_MAX}")
        if self.devices and self.protocol == "tcp":
            raise ConfigError(
                "devices",
                f"is {self.devices!r}, which has no effect with protocol 'tcp', must be empty",
            )


_SCHEMES_WITH: Mapping[str, tuple[str, ...]] = {
    "endpoint": ("s3",),
    "region": ("s3",),
    "key_id": ("s3",),
    "secret": ("s3", "gs", "az"),
    "ca_file": ("s3", "gs", "az"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings(SharedOptions):
    """Which store, and how it is spoken to.

    Without `key_id` and `secret`, credentials are those that the provider's own tools would use:
    variables such as `AWS_ACCESS_KEY_ID`, a role of the machine, or a file of its command line.
    """

    url: Text
    """`s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://ACCOUNT/CONTAINER/PATH` or
    `file:///FOLDER`; without keys."""
    endpoint: Text = ""
    """`https://HOST:PORT` of a store that speaks S3 and is not Amazon's."""
    region: Text = ""
    """Of an S3 bucket."""
    key_id_file: Text = ""
    """File with the name of an S3 access key."""
    key_id_env: Text = ""
    """Or the environment variable that has it."""
    secret_file: Text = ""
    """File with the secret access key, Azure's account key, or the JSON of a GCS service
    account."""
    secret_env: Text = ""
    """Or the environment variable that has it."""
    ca_file: Text = ""
    """Who signed the server's certificate, if not one of the system's authorities."""
    refresh_s: Annotated[float, Number(minimum=0.1, maximum=3600)] = 2.0
    """How often values of others are looked for, while they are asked for."""
    compression: Compression = "off"
    """Whether blocks are written compressed, without loss."""
    ask_ms: AskMs = 200.0
    timeout_s: TimeoutS = 30.0
    threads: Threads = 8

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
        for name, schemes in _SCHEMES_WITH.items():
            if getattr(self, name) and self.scheme not in schemes:
                raise ConfigError(
                    self._key_of(name) if name in ("key_id", "secret") else name,
                    f"is given, which has no effect with {self.scheme}://; leave it out",
                )
        if self.endpoint and not re.fullmatch(r"https?://[^\s?#@]+", self.endpoint):
            raise ConfigError(
                "endpoint",
                f"is {masked_url(self.endpoint)!r}, must be http://HOST[:PORT] or "
                "https://HOST[:PORT]",
            )
        if self.scheme == "s3" and bool(self.key_id) != bool(self.secret):
            given, missing = ("key_id", "secret") if self.key_id else ("secret", "key_id")
            raise ConfigError(
                self._key_of(given),
                f"is given without {missing}_file or {missing}_env, must be both or none",
            )

    @property
    def key_id(self) -> Secret | None:
        return self._secret("key_id")

    @property
    def secret(self) -> Secret | None:
        return self._secret("secret")

    @property
    def scheme(self) -> str:
        return self.url.partition(":")[0]

    @property
    def path(self) -> str:
        """What follows the scheme."""
        return self.url.partition("://")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherStoreSettings(SharedOptions):
    """Which store of another distribution, and what it is told."""

    store: Text
    """`NAME` or `NAME:ADDRESS`: an installed store (entry point `penstock.stores`), and what its
    client is told, without a password."""
    compression: Compression = "off"
    """Whether blocks are written compressed, without loss."""

    def _require_sense(self) -> None:
        installed = OTHER_STORES.names()
        if self.name not in installed:
            raise ConfigError(
                "store",
                f"names {self.name!r}, must be NAME or NAME:ADDRESS of an installed store: "
                f"{', '.join(installed) or 'there is none'}",
            )

    @property
    def name(self) -> str:
        return self.store.partition(":")[0]

    @property
    def address(self) -> str:
        return self.store.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings(SharedOptions):
    """Where this engine lends its host memory, and whose it reads."""

    listen: Text
    """`HOST:PORT` where other engines reach this one, or `unix:/PATH`."""
    peers: Text
    """Those of the others, separated by commas; a name stands for all its addresses, so that of a
    headless Kubernetes service for all pods. This engine may be among them. Or
    `redis://HOST:PORT/DATABASE` (`rediss://…` with TLS): each engine tells this server where it is,
    and finds the others there."""
    password_file: Text = ""
    """File with the password of that Redis."""
    password_env: Text = ""
    """Or the environment variable that has it."""
    ca_file: Text = ""
    """Who signed its certificate, if not one of the system's authorities."""
    keys_file: Text = ""
    """Keys of the machines, needed off the loopback interface."""
    transport: Annotated[str, String(choices=("zeromq", "nixl"))] = "zeromq"
    """What carries blocks from other machines: ZeroMQ, encrypted, or NIXL, which is **not**."""
    ports: Text = "0"
    """For connections of peers, two each: a range such as `"5300-5399"`; `"0"`: any."""
    timeout_s: TimeoutS = 1.0

    def _require_sense(self) -> None:
        port_range(self.ports, key="ports")
        for key, text in (("listen", self.listen), *(("peers", each) for each in self.addresses)):
            self._require_address(key, text)
        if self.redis is None:
            for key in ("password_file", "password_env", "ca_file"):
                if getattr(self, key):
                    raise ConfigError(
                        key, "is given, which has no effect unless peers begins with redis://"
                    )
        if self.redis is None and not self.addresses:
            raise ConfigError(
                "peers",
                "is '', must name other engines (HOST:PORT or unix:/PATH), or a Redis where they "
                "are found",
            )

    def _require_address(self, key: str, text: str) -> None:
        host = peer_host(key, text)
        if not _is_loopback(host) and not self.keys_file:
            raise ConfigError(
                "keys_file",
                f"is '' while {key} has {text!r}, which other machines can reach: must be the file "
                "of the keys of the machines, made by `penstock keys new`",
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the others, as they are given; none where they are found in a Redis."""
        if self.peers.startswith(("redis://", "rediss://")):
            return ()
        return tuple(filter(None, (each.strip() for each in self.peers.split(","))))

    @property
    def redis(self) -> RedisSettings | None:
        """Where the others are found, unless they are listed.

        Raises `ConfigError`: `peers` begins as its address, and cannot be one.
        """
        if not self.peers.startswith(("redis://", "rediss://")):
            return None
        try:
            return RedisSettings(
                url=self.peers,
                password_file=self.password_file,
                password_env=self.password_env,
                ca_file=self.ca_file,
            )
        except ConfigError as error:
            field = "peers" if error.field == "url" else error.field
            raise ConfigError(field, error.problem) from None


def peer_host(key: str, text: str) -> str:
    """The host of an address of peers; that of this machine for a Unix socket.

    Raises `ConfigError`: it is none; the message names `key`.
    """
    if text.startswith(UNIX):
        require_socket(key, text)
        return "localhost"
    found = _NODE.fullmatch(text)
    if found is None or not found["port"] or not 0 < int(found["port"]) <= PORT_MAX:
        shown = masked_url(text) if "@" in text else text
        raise ConfigError(key, f"has {shown!r}, must be HOST:PORT or unix:/PATH")
    return found["host"]


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # A name, whatever it begins with.


CLIENT_SETTINGS: Mapping[str, Callable[..., SharedOptions]] = {
    "redis": RedisSettings,
    "mooncake": MooncakeSettings,
    "objects": ObjectSettings,
    "shared": OtherStoreSettings,
    "peers": PeerSettings,
}
"""The settings of each kind of shared store, made from the keys of its tier."""
