"""The keys by which machines know each other, and the file that holds them.

    penstock keys new machine.keys HOST           on each machine: makes a key pair
    penstock keys add machine.keys HOST PUBLIC    lists another machine

A machine's file has its own key pair and the public keys of all machines, itself included, by the
host at which they are dialled. A listener lets in who holds one of these keys; who dials a host
connects only to what holds the key listed for that host. Over the loopback interface both ends are
on this machine, and hold its key.

The one rule: a file with a private key is readable by this user only.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tomllib
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

import msgspec
import zmq
from zmq.utils import z85

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

FILE_BYTES_MAX = 1 << 20
KEY_BYTES = 32
_KEY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_FIELDS = ("public", "private", "peers")
_TEXT = """\
# The key of this machine, made by `penstock keys new`. Keep it to this machine and user.
private = "{private}"
public = "{public}"

# This machine and those that it talks to: the host by which each is dialled, and its public key.
[peers]
{peers}"""


class MachineKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key pair of a machine and the public keys of others, as 64 hexadecimal digits each."""

    public: str
    private: str
    peers: dict[str, str] = {}
    """By host, as addresses name it: an IP address or a name."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(public={self.public!r}, {len(self.peers)} peers)"

    @classmethod
    def new(cls) -> Self:
        """A new key pair.

        Raises:
            UnavailableError: this build of libzmq has no CURVE.
        """
        require_curve()
        public, private = zmq.curve_keypair()
        return cls(public=z85.decode(public).hex(), private=z85.decode(private).hex())

    @classmethod
    def read(cls, path: Path) -> Self:
        """What a file holds.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not private, or no file of keys; the message says what is wrong.
        """
        try:
            table = tomllib.loads(read_private(path, bytes_max=FILE_BYTES_MAX).decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{path} is no file of `penstock keys new`: {error}") from error
        for name in table:
            if name not in _FIELDS:
                raise ValueError(f"{path}: {name} is not known, must be {', '.join(_FIELDS)}")
        peers = table.get("peers", {})
        if not isinstance(peers, dict):
            raise ValueError(f"{path}: peers is {peers!r}, must be a table of hosts and keys")  # noqa: TRY004
        keys = cls(
            public=_key(f"{path}: public", table.get("public", "")),
            private=_key(f"{path}: private", table.get("private", ""), shown=False),
            peers={
                _host(f"{path}: peers", host): _key(f"{path}: peers.{host}", key)
                for host, key in peers.items()
            },
        )
        require_curve()
        if zmq.curve_public(keys.private_z85) != keys.public_z85:
            raise ValueError(f"{path}: public is {keys.public}, which is not that of private")
        return keys

    def write(self, path: Path, *, replace: bool = False) -> None:
        """Writes the file, with mode 0600, whole or not at all.

        Raises:
            FileExistsError: there is one, and it is not to be replaced.
            OSError: it cannot be written.
        """
        lines = [f'"{host}" = "{key}"\n' for host, key in sorted(self.peers.items())]
        text = _TEXT.format(private=self.private, public=self.public, peers="".join(lines))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(fd)
            if replace:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()

    def with_peer(self, host: str, public: str) -> MachineKeys:
        """The same with another machine listed.

        Raises:
            ValueError: it is no host, or no public key.
        """
        peers = {**self.peers, _host("HOST", host): _key("PUBLIC", public)}
        return msgspec.structs.replace(self, peers=peers)

    @property
    def public_z85(self) -> bytes:
        """The public key as ZeroMQ writes it."""
        return z85.encode(bytes.fromhex(self.public))

    @property
    def private_z85(self) -> bytes:
        """The private key as ZeroMQ writes it."""
        return z85.encode(bytes.fromhex(self.private))

    def admits(self, public: bytes) -> bool:
        """Whether a peer with this key, as its 32 bytes, may connect."""
        key = public.hex()
        return key == self.public or key in self.peers.values()

    def key_of(self, address: str) -> bytes:
        """The public key of the machine at an address, as ZeroMQ writes it.

        Raises:
            UnavailableError: it is another machine, and not listed.
        """
        host = host_of(address)
        found = self.peers.get(host)
        if found is None and not is_local(address):
            raise UnavailableError(
                f"there is no key for host {host!r} of {address}: list it with `penstock keys add "
                f"FILE {host} PUBLIC`"
            )
        return self.public_z85 if found is None else z85.encode(bytes.fromhex(found))


Secret = bytes | MachineKeys
"""What two ends must have to let each other in: bytes in common, empty for none, or keys."""


def read_private(path: Path, *, bytes_max: int) -> bytes:
    """A file that nobody else may read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not this user's alone, or longer than that.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise ValueError(
                f"{path} is of user {found.st_uid} with mode {stat.filemode(found.st_mode)}, must "
                f"be of user {os.getuid()} with mode -rw-------"
            )
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"{path} has {found.st_size} bytes, must have at most {bytes_max}")
    return content


def is_local(address: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return not address.startswith("tcp://") or is_loopback(host_of(address))


def is_loopback(host: str) -> bool:
    """Whether an address or a host name is of the loopback interface."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_name(host: str) -> bool:
    """Whether a host is named, not by its IP address, and is another machine for its peers."""
    with suppress(ValueError):
        ip_address(host)
        return False
    return bool(_HOST.fullmatch(host)) and not is_loopback(host)


def require_keys(address: str, secret: Secret) -> None:
    """Refuses an address that other machines can reach, without the keys of machines.

    Raises:
        ValueError: without them, whoever reaches the network could join or listen.
    """
    if not isinstance(secret, MachineKeys) and not is_local(address):
        raise ValueError(
            f"address is {address!r}, which other machines can reach: it needs the keys of the "
            "machines, made by `penstock keys new`"
        )


def host_of(address: str) -> str:
    """The host of `tcp://HOST:PORT`, as keys are listed by it."""
    host, _, _ = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]").lower()


def require_curve() -> None:
    if not zmq.has("curve"):
        raise UnavailableError(
            f"libzmq {zmq.zmq_version()} was built without CURVE, must have it: that of PyPI has"
        )


def _key(name: str, given: object, *, shown: bool = True) -> str:
    if not isinstance(given, str) or not _KEY.fullmatch(given.strip().lower()):
        said = f"is {given!r:.80}, " if shown else ""
        raise ValueError(f"{name} {said}must be {2 * KEY_BYTES} hexadecimal digits")
    return given.strip().lower()


def _host(name: str, given: str) -> str:
    host = given.strip("[]").lower()
    with suppress(ValueError):
        ip_address(host)
        return host
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"{name} has {given!r:.80}, must be a host as addresses name it: an IP address or a "
            "name, without a port"
        )
    return host
