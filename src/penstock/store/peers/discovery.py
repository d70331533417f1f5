"""Whom to dial: addresses that are listed, names that are looked up, or entries in a Redis.

    peers = "10.0.0.1:5300,unix:/run/a"     as they are
    peers = "engines.internal:5300"         all addresses that the name has now
    peers = "redis://10.0.0.9:6379"         what engines have told this Redis

In a Redis, all engines are in one sorted set (`penstock:peers`):

    member    ADDRESS, or ADDRESS PUBLIC: where an engine is, and its public key
    score     when the entry ends, by the clock of the Redis, `ENTRY_S` from the last refresh

An entry says no more than an address: the keys of machines decide who is spoken with. So one with a
key that is not listed here is left alone (another cluster may use the same Redis), and one that
lies about its key fails the handshake of CURVE.

The one rule: an answer that does not come changes nothing. Who was found stays found.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.config.shared_stores import ANYWHERE, UNIX, masked_url, peer_host
from penstock.store.clients.blobs import BlobStoreError
from penstock.store.clients.redis import RedisConnections
from penstock.store.clients.redis_wire import ErrorReply, command
from penstock.transport.machine_keys import host_of, is_local, is_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config.shared_stores import PeerSettings
    from penstock.store.clients.redis_wire import RedisWire, Reply
    from penstock.transport.machine_keys import MachineKeys

logger = logging.getLogger(__name__)

PEERS_MAX = 256
ENTRY_S = 15.0
"""How long an entry counts that is not refreshed; it is refreshed at a third of this."""
REDIS_S = 2.0
"""How long a Redis may take to answer."""
SET = b"penstock:peers"
ENTRIES_MAX = 4 * PEERS_MAX
"""Entries that are looked at, the newest: other clusters may have some."""
ENTRY_BYTES_MAX = 512
"""A host of 253 characters, a port and a key are fewer."""


class LookedUp(NamedTuple):
    """What a look-up has found."""

    peers: dict[str, tuple[str, MachineKeys | None]]
    """By address, as ZeroMQ spells it: the host by which it was given, and the keys to dial it."""
    failed: dict[str, str]
    """Why there was no answer, by the host or the Redis that was to be looked up."""


class Discovery:
    """Finds the peers of one store process. One thread at a time looks up."""

    def __init__(self, settings: PeerSettings, keys: MachineKeys | None) -> None:
        self._keys = keys
        self._addresses = settings.addresses
        self._listen = settings.listen
        redis = settings.redis
        self._redis = None if redis is None else RedisConnections(redis)
        self.places = [masked_url(settings.peers)] if redis is not None else [*settings.addresses]
        """What is looked up: until it was, nobody knows who the peers are."""
        self._refused: set[str] = set()

    def look_up(self) -> LookedUp:
        """Who the peers are now, however long names take."""
        if self._redis is None:
            found, failed = _resolved(self._addresses)
            peers = {
                address: (host, _keys_for(self._keys, address, host))
                for address, host in found.items()
            }
            return LookedUp(dict(list(peers.items())[:PEERS_MAX]), failed)
        try:
            entries = self._exchange(self._redis, time.monotonic() + REDIS_S)
        except BlobStoreError as error:
            return LookedUp({}, {self.places[0]: str(error)})
        return LookedUp(self._dialled(entries), {})

    def close(self) -> None:
        if self._redis is not None:
            self._redis.close()

    def _exchange(self, connections: RedisConnections, deadline: float) -> list[bytes]:
        """Refreshes the entry of this process; returns those of the others, the newest first.

        Raises `BlobStoreError`: there was no answer in time, or none of these.
        """
        wire = connections.take(None, deadline)
        [now] = wire.exchange([command(b"TIME")], deadline)
        own, replies = self._own(wire), [now]
        match now:
            case [bytes(seconds), bytes()] if seconds.isdigit():
                ends = b"%d" % (int(seconds) + ENTRY_S)
                commands = [
                    command(b"ZADD", SET, ends, own),
                    command(b"ZREMRANGEBYSCORE", SET, b"-inf", b"(" + seconds),
                    command(b"EXPIRE", SET, b"%d" % ENTRY_S),
                    command(b"ZREVRANGE", SET, b"0", b"%d" % (ENTRIES_MAX - 1)),
                ]
                replies = wire.exchange(commands, deadline)
        match replies:
            case [int(), int(), int(), list(members)]:
                connections.give_back(None, wire)
                return [each for each in members if isinstance(each, bytes) and each != own]
            case _:
                wire.close()
                shown = "; ".join(map(_shown, replies))
                raise BlobStoreError(f"{wire.peer} cannot keep peers: {shown}")

    def _own(self, wire: RedisWire) -> bytes:
        """The entry of this process: where others reach it, and its public key."""
        host, _, port = self._listen.rpartition(":")
        if host in ANYWHERE:
            host = wire.local_host  # Whoever reaches this Redis, too, reaches us there.
        key = "" if self._keys is None else f" {self._keys.public}"
        return f"{host}:{port}{key}".encode()

    def _dialled(self, entries: Sequence[bytes]) -> dict[str, tuple[str, MachineKeys | None]]:
        """Whom to dial of those in a Redis."""
        peers: dict[str, tuple[str, MachineKeys | None]] = {}
        refused: set[str] = set()
        for entry in entries:
            text, _, key = entry[:ENTRY_BYTES_MAX].decode("ascii", "replace").partition(" ")
            try:
                address, keys = self._of_entry(text, key)
            except ValueError as problem:
                refused.add(f"entry={entry[:ENTRY_BYTES_MAX]!r} cause={problem}")
            else:
                peers.setdefault(address, (self.places[0], keys))
        for each in sorted(refused - self._refused):
            logger.warning("peer is not dialled: %.600s", each)
        self._refused = refused
        return dict(list(peers.items())[:PEERS_MAX])

    def _of_entry(self, text: str, key: str) -> tuple[str, MachineKeys | None]:
        """The address of an entry, and the keys to dial it with.

        Raises `ValueError`: it is not to be dialled.
        """
        host = peer_host("its address", text)
        address = address_of(text)
        if host in ANYWHERE or is_name(host):
            raise ValueError("it has no IP address")
        if self._keys is None:
            if not is_local(address):
                raise ValueError("it is on another machine, and there is no keys_file")
            return address, None
        try:
            admitted = self._keys.admits(bytes.fromhex(key))
        except ValueError:
            admitted = False
        if not admitted:
            raise ValueError("its key is not listed in keys_file (`penstock keys add`)")
        if text.startswith(UNIX):
            return address, self._keys
        return address, self._keys.with_peer(host_of(address), key)


def address_of(text: str) -> str:
    """An address as ZeroMQ spells it."""
    if text.startswith(UNIX):
        return f"ipc://{text.removeprefix(UNIX)}"
    host, _, port = text.rpartition(":")
    return f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{port}"


def _shown(reply: Reply) -> str:
    return reply.text if isinstance(reply, ErrorReply) else repr(reply)[:80]


def _keys_for(keys: MachineKeys | None, address: str, name: str) -> MachineKeys | None:
    """The keys to dial an address with: that of the name which stands for it."""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if keys is None or host in keys.peers or name not in keys.peers:
        return keys
    return keys.with_peer(host, keys.peers[name])


def _resolved(addresses: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """All addresses of the peers, with the host by which each was given; hosts without an answer.

    That a name has no address is an answer: it stands for nobody now.
    """
    found: dict[str, str] = {}
    failed: dict[str, str] = {}
    for text in addresses:
        host, _, port = text.rpartition(":")
        if text.startswith(UNIX) or not is_name(host):
            found[address_of(text)] = host
            continue
        try:
            places = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno not in {socket.EAI_NONAME, socket.EAI_NODATA}:
                failed[host] = str(error)
        else:
            found |= {f"tcp://{place[0]}:{port}": host for *_, place in places}
    return found, failed
