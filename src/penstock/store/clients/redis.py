"""Values in Redis or Valkey: one server, a master found by Sentinels, or a cluster.

redis-py opens them: it looks up names, speaks TLS, logs in, and asks Sentinels. That takes as long
as it takes (nobody can bound the look-up of a name), so a thread does it, and a caller waits for
the thread no longer than it has time. A connection that comes too late is there for the next call.

The one rule: a password is in the memory of redis-py while a connection is opened, and nowhere
else: not in a URL, a message, a `repr` or a log.

    values    SET name … NX [PX ttl]   GETRANGE   EXISTS   UNLINK
    records   SET name … [NX]          GETRANGE   EXISTS   ROLE   WAIT

A record that replaces another one counts as kept when one replica has acknowledged it (`WAIT 1`),
if the server has replicas (`ROLE`): a master that dies takes with it what no replica has.

Ranges of a value that lie near each other are read by one command, with what is between them: a
command costs about as much as `GAP_BYTES`. A range may be the whole value, as `GETRANGE` costs what
`GET` does.

Needs the `redis` extra. How to run it: docs/shared-stores.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from penstock.config.shared_stores import Node
from penstock.errors import UnavailableError, install_hint
from penstock.store.clients.blobs import (
    ASKERS,
    RECORD_BYTES_MAX,
    BlobOutcome,
    BlobStore,
    BlobStoreError,
    NotKeptError,
    call_in_thread,
    check_names,
    check_reads,
    check_record,
)
from penstock.store.clients.redis_wire import (
    ErrorReply,
    RedisWire,
    Taken,
    command,
    command_into,
    command_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from types import ModuleType

    from penstock.config.shared_stores import RedisSettings
    from penstock.store.clients.blobs import BlobRange, BlobRead, BlobWrite
    from penstock.store.clients.redis_wire import RedisCommand, Reply


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
        self._late: dict[Node | None, deque[Future[RedisWire]]] = {}
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
        for opening in late:  # Nobody will use it; it is closed, now or when it is there.
            opening.add_done_callback(_close_opened)
        self.drop()

    def _open(self, node: Node | None, deadline: float) -> RedisWire:
        opening = self._late_one(node)
        if opening is None:
            opening = call_in_thread(lambda: self.dial(node), "penstock-redis-open")
        if not wait([opening], max(0.0, deadline - time.monotonic())).done:
            with self._lock:
                self._late.setdefault(node, deque()).append(opening)
            raise BlobStoreError(f"{self._called(node)} could not be reached in time")
        if (problem := opening.exception()) is not None:
            why = " ".join(str(problem).split()) or type(problem).__name__
            raise BlobStoreError(f"{self._called(node)} cannot be reached: {why}")
        return opening.result()

    def _late_one(self, node: Node | None) -> Future[RedisWire] | None:
        """A connection that an earlier caller did not wait for, unless it came to nothing.

        So threads do not pile up behind a server that does not answer.
        """
        while True:
            with self._lock:
                late = self._late.get(node)
                if not late:
                    return None
                opening = late.popleft()
            if not opening.done():
                return opening
            if opening.exception() is None:
                if opening.result().is_idle():
                    return opening
                opening.result().close()

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


def _close_opened(opening: Future[RedisWire]) -> None:
    if opening.exception() is None:
        opening.result().close()


if TYPE_CHECKING:
    Exchange = Callable[[Node | None, Sequence[RedisCommand], float], list[Reply]]

logger = logging.getLogger(__name__)

GAP_BYTES = 32 << 10
"""Between two ranges that one command reads: it is read too, and thrown away."""
VALUE_BYTES_MAX = 512 << 20
"""What Redis takes in one value unless it is told otherwise (`proto-max-bulk-len`)."""
SLOTS = 16_384
ELSEWHERE = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN"})
OF_THE_SERVER = frozenset({"READONLY", "LOADING", "MASTERDOWN", "NOAUTH"}) | ELSEWHERE
"""Errors after which another server may be the right one: connections are opened anew."""
OF_THE_VALUE = frozenset({"WRONGTYPE"})
"""Errors of one name: somebody has put something there that is no value."""


class RedisBlobs(BlobStore):
    """A client of Redis. Its connections are opened when they are needed."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings.threads)
        self._connections = RedisConnections(settings)
        self._cluster = _Cluster(settings, self._connections) if settings.cluster else None
        self._free = threading.BoundedSemaphore(settings.threads + ASKERS)
        self._warned = False
        ttl_s = settings.ttl_s
        self._options = [b"NX"] if not ttl_s else [b"NX", b"PX", b"%d" % max(1, ttl_s * 1000)]

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        commands = [command(b"EXISTS", name.encode()) for name in names]
        return [reply == 1 for reply in self._ask(names, commands, deadline)]

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        deadline = time.monotonic() + check_reads(reads, timeout_s=timeout_s)
        names: list[str] = []
        commands: list[RedisCommand] = []
        for read in reads:
            asked = _range_commands(read)
            names += [read.name] * len(asked)
            commands += asked
        replies = iter(zip(commands, self._ask(names, commands, deadline), strict=True))
        outcomes: list[BlobOutcome | None] = []
        for read in reads:
            counts = [next(replies) for _ in _runs(read.ranges)]
            enough = all(
                isinstance(reply, Taken)
                and (read.whole or reply.size_bytes == asked.reply_bytes)
                and 0 < reply.size_bytes <= asked.reply_bytes
                for asked, reply in counts
            )
            # Without a byte that was read nothing shows that the value is there.
            outcomes.append(BlobOutcome.READ if enough and read.shows_size else None)
        return self._explained(reads, outcomes, deadline)

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        names = [write.name for write in writes]
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        sizes = [sum(buffer.nbytes for buffer in write.buffers) for write in writes]
        chosen = [index for index, size in enumerate(sizes) if size <= VALUE_BYTES_MAX]
        commands = [
            command_of(writes[index].name.encode(), writes[index].buffers, *self._options)
            for index in chosen
        ]
        problems = [
            "" if size <= VALUE_BYTES_MAX else f"has {size} bytes, Redis takes {VALUE_BYTES_MAX}"
            for size in sizes
        ]
        replies = self._ask([names[index] for index in chosen], commands, deadline, strict=False)
        for index, reply in zip(chosen, replies, strict=True):
            if isinstance(reply, ErrorReply):
                problems[index] = reply.text
        return problems

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        self._ask(names, [command(b"UNLINK", name.encode()) for name in names], deadline)

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + check_names([name], timeout_s=timeout_s)
        # A range: what is longer than a record is none, and need not be read whole to know it.
        commands = [
            command(b"EXISTS", name.encode()),
            command(b"GETRANGE", name.encode(), b"0", b"%d" % (RECORD_BYTES_MAX - 1)),
        ]
        there, record = self._ask([name] * 2, commands, deadline)
        if there != 1:
            return None
        return record if isinstance(record, bytes) else b""

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + check_record(name, record, timeout_s=timeout_s)
        commands = [command_of(name.encode(), [memoryview(record)], b"NX")]
        (reply,) = self._ask([name], commands, deadline)
        return reply == "OK"

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        deadline = time.monotonic() + check_record(name, record, timeout_s=timeout_s)
        unkept: list[str] = []

        def exchange(
            node: Node | None, commands: Sequence[RedisCommand], deadline: float
        ) -> list[Reply]:
            wire = self._connections.take(node, deadline)
            replies = wire.exchange(commands, deadline)
            if replies == ["OK"]:  # It is written; a map of the cluster has another reply.
                unkept[:] = [self._why_unkept(wire, deadline)]
            self._connections.give_back(node, wire)
            return replies

        commands = [command_of(name.encode(), [memoryview(record)])]
        self._ask([name], commands, deadline, exchange=exchange)
        if any(unkept):
            raise NotKeptError(unkept[0])

    def _why_unkept(self, wire: RedisWire, deadline: float) -> str:
        """Why no replica has what this connection wrote last; empty if one has, or there is none.

        It speaks of writes of one connection only, so it is asked on the one that wrote.
        """
        left_s = (deadline - time.monotonic()) / 2  # The other half is for the answers.
        (role,) = wire.exchange([command(b"ROLE")], deadline)
        match role:
            case [b"master", int(), [_, *_] as replicas]:
                wait = command(b"WAIT", b"1", b"%d" % max(1, int(left_s * 1000)))
                (acknowledged,) = wire.exchange([wait], deadline)
                if acknowledged == 0:
                    count = len(replicas)
                    noun = "its replica" if count == 1 else f"any of its {count} replicas"
                    return f"{wire.peer} had no answer from {noun} within {left_s:.3g} s"
                reply = acknowledged
            case [b"master", *_]:
                return ""
            case _:
                reply = role
        if isinstance(reply, ErrorReply) and not self._warned:
            self._warned = True
            logger.warning(
                "%s does not tell whether replicas have what was written (%s): a reset counts as "
                "kept without them; allow ROLE and WAIT",
                *(wire.peer, reply.text),
            )
        return ""

    def close(self) -> None:
        self._connections.close()

    def _explained(
        self,
        reads: Sequence[BlobRead],
        outcomes: Sequence[BlobOutcome | None],
        deadline: float,
    ) -> list[BlobOutcome]:
        """What came of reads that got less than they asked for: `GETRANGE` does not say why."""
        open_reads = [read for read, outcome in zip(reads, outcomes, strict=True) if not outcome]
        if not open_reads:
            return [outcome for outcome in outcomes if outcome]
        names = [read.name for read in open_reads for _ in range(2)]
        commands = [
            each
            for read in open_reads
            for each in (
                command(b"EXISTS", read.name.encode()),
                command(b"STRLEN", read.name.encode()),
            )
        ]
        answers = iter(self._ask(names, commands, deadline))
        found: list[BlobOutcome] = []
        for read, outcome in zip(reads, outcomes, strict=True):
            if outcome is not None:
                found.append(outcome)
                continue
            there, size = next(answers), next(answers)
            if there != 1:
                found.append(BlobOutcome.MISSING)
            elif not isinstance(size, int) or (size < read.end and not read.whole):
                found.append(BlobOutcome.SHORT)
            else:
                # Nothing was asked for, or there is nothing; or it came after it was read.
                empty = not any(each.target.nbytes for each in read.ranges)
                empty = empty or (read.whole and size == 0)
                found.append(BlobOutcome.READ if empty else BlobOutcome.MISSING)
        return found

    def _ask(
        self,
        names: Sequence[str],
        commands: Sequence[RedisCommand],
        deadline: float,
        *,
        strict: bool = True,
        exchange: Exchange | None = None,
    ) -> list[Reply]:
        """Replies to commands, each about the value of one name.

        That what is there is no value (`WRONGTYPE`) is for the caller to find in the replies.
        Raises `BlobStoreError`: one could not be had, or is an error and `strict` says that none
        may be.
        """
        exchange = exchange or self._exchange
        if not commands:
            return []
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            most = self.threads + ASKERS
            raise BlobStoreError(f"Redis: more than {most} threads wait for it at once")
        try:
            if self._cluster is not None:
                replies = self._cluster.ask(names, commands, deadline, exchange)
            else:
                replies = exchange(None, commands, deadline)
        except BlobStoreError:
            self._connections.drop()
            raise
        finally:
            self._free.release()
        errors = [
            reply
            for reply in replies
            if isinstance(reply, ErrorReply) and reply.kind not in OF_THE_VALUE
        ]
        if any(error.kind in OF_THE_SERVER for error in errors):
            self._connections.drop()
        if errors and strict:
            raise BlobStoreError(f"Redis refuses: {errors[0].text}")
        return replies

    def _exchange(
        self, node: Node | None, commands: Sequence[RedisCommand], deadline: float
    ) -> list[Reply]:
        wire: RedisWire = self._connections.take(node, deadline)
        replies = wire.exchange(commands, deadline)
        self._connections.give_back(node, wire)
        return replies


def _runs(ranges: Sequence[BlobRange]) -> list[list[BlobRange]]:
    """Ranges that one command reads; those without bytes are left out."""
    runs: list[list[BlobRange]] = []
    end = -1 - GAP_BYTES
    for each in ranges:
        if not each.target.nbytes:
            continue
        if each.offset - end > GAP_BYTES:
            runs.append([])
        runs[-1].append(each)
        end = each.offset + each.target.nbytes
    return runs


def _range_commands(read: BlobRead) -> list[RedisCommand]:
    commands = []
    for run in _runs(read.ranges):
        start = end = run[0].offset
        places: list[memoryview | int] = []
        for offset, target in run:
            if offset > end:
                places.append(offset - end)
            places.append(target)
            end = offset + target.nbytes
        bounds = (b"%d" % start, b"%d" % (end - 1))
        commands.append(command_into(places, b"GETRANGE", read.name.encode(), *bounds))
    return commands


class _Cluster:
    """Which server of a cluster has which names."""

    def __init__(self, settings: RedisSettings, connections: RedisConnections) -> None:
        from redis.crc import key_slot  # noqa: PLC0415 - See `RedisConnections`.

        self._slot_of: Callable[[bytes], int] = key_slot
        self._connections = connections
        self._lock = threading.Lock()
        self._known = list(settings.nodes)
        self._owners: list[Node | None] | None = None

    def ask(
        self,
        names: Sequence[str],
        commands: Sequence[RedisCommand],
        deadline: float,
        exchange: Exchange,
    ) -> list[Reply]:
        """Replies, in order. Where values have moved, the map is fetched anew, once."""
        replies: list[Reply] = [None] * len(commands)
        missing = list(range(len(commands)))
        for _ in range(2):
            owners = self._map(deadline, exchange)
            shares: dict[Node, list[int]] = {}
            for index in missing:
                slot = self._slot_of(names[index].encode())
                owner = owners[slot]
                if owner is None:
                    raise BlobStoreError(f"Redis: no server of the cluster has slot {slot}")
                shares.setdefault(owner, []).append(index)
            for node, share in shares.items():
                try:
                    found = exchange(node, [commands[index] for index in share], deadline)
                except BlobStoreError:
                    self._forget_map()
                    raise
                for index, reply in zip(share, found, strict=True):
                    replies[index] = reply
            missing = [
                index
                for index in missing
                if isinstance(reply := replies[index], ErrorReply) and reply.kind in ELSEWHERE
            ]
            if not missing:
                break
            self._forget_map()
        return replies

    def _forget_map(self) -> None:
        with self._lock:
            self._owners = None

    def _map(
        self,
        deadline: float,
        exchange: Exchange,
    ) -> list[Node | None]:
        with self._lock:
            owners, known = self._owners, list(self._known)
        if owners is not None:
            return owners
        problem: BlobStoreError | None = None
        for node in known:
            try:
                (reply,) = exchange(node, [command(b"CLUSTER", b"SLOTS")], deadline)
                owners = _owners(reply, node)
            except BlobStoreError as one:
                problem = one
                with self._lock:  # Another is asked first the next time.
                    if node in self._known:
                        self._known.remove(node)
                        self._known.append(node)
                continue
            nodes = [each for each in dict.fromkeys(owners) if each is not None]
            with self._lock:
                self._owners = owners
                self._known = list(dict.fromkeys([*nodes, *self._known]))[:SLOTS]
            return owners
        raise problem or BlobStoreError("Redis: no server of the cluster is known")


def _owners(reply: Reply, asked: Node) -> list[Node | None]:
    """The owner of every slot, from the answer to `CLUSTER SLOTS`."""
    owners: list[Node | None] = [None] * SLOTS
    for entry in reply if isinstance(reply, list) else [reply]:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_] if first <= last < SLOTS:
                # An empty name stands for the server that was asked.
                name = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
                node = Node(name or asked.host, port)
                owners[first : last + 1] = [node] * (last - first + 1)
            case _:
                text = entry.text if isinstance(entry, ErrorReply) else repr(entry)[:80]
                raise BlobStoreError(f"Redis at {asked} does not tell where slots are: {text}")
    return owners
