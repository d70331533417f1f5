"""Values in Mooncake Store: memory of many machines, found through one master.

    values    batch_put_from   get_into_ranges   batch_is_exist   batch_remove
    records   put (hard-pinned), upsert, get

Calls of Mooncake end when they end: measured with version 0.3.13, 30 s while the master stands
still, 30 s while a machine that has the value does, 93 s to connect to a master that is away. So
threads of this client make them, and a caller waits for its thread no longer than it has time. A
thread that is still in Mooncake then goes on by itself and is used again when it comes back; there
are two more than copy, as for Redis, and while all of them are away calls fail by their deadline.

The one rule: Mooncake sees only memory of this client. A late transfer would write to an arena that
is in use for something else by then, and nobody can call it back. It costs one copy each way, made
by NumPy without the interpreter's lock (docs/decisions/0018-clients-of-shared-stores.md).

Needs the `mooncake` extra and Debian's `libibverbs1`.
"""

from __future__ import annotations

import mmap
import os
import queue
import secrets
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.config.shared_stores import MASTER
from penstock.errors import UnavailableError, install_hint
from penstock.store.clients.blobs import (
    ASKERS,
    BlobOutcome,
    BlobRange,
    BlobRead,
    BlobStore,
    BlobStoreError,
    answer_call,
    check_names,
    check_reads,
    check_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.config.shared_stores import MooncakeSettings
    from penstock.store.clients.blobs import BlobWrite

MISSING = frozenset({-703, -704, -707})
"""Not complete yet, not there, or its lease ended while it was read."""
OUTSIDE = -600
"""A range that the value does not have."""
NO_SPACE = -200
EXISTS = -705
DAMAGED = frozenset({OUTSIDE, -701, -702})
"""Of one value: such a range, or no copy of it that could be read."""
UNREACHABLE_MAX = -900
"""From here down: the master could not be asked."""
NONCE_BYTES = 16
"""Before each record, to know one's own: who puts what is there already is told that it worked."""
PROBE_S = 1.0
"""To see whether there is a master at all: Mooncake tries for 93 s."""
AGAIN_S = 0.01
"""Until a record is asked for again that another client is writing; nothing tells of its end."""
CLOSE_S = 5.0
BUFFER_BYTES = 16 << 20
"""Of Mooncake's own, for records."""
MIB, GIB = 1 << 20, 1 << 30
ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TRANSFER_TIMEOUT": "10",
    "MC_LOG_LEVEL": "WARNING",
}
"""For threads that are away to come back earlier than after 30 s, and fewer lines on stderr. What
the environment says already stays."""


class _Piece(NamedTuple):
    """Bytes of a value that go through the memory of a thread at once."""

    read: int
    """Which of the reads of a call."""
    name: str
    offset: int
    target: memoryview


class MooncakeBlobs(BlobStore):
    """A client of Mooncake Store. It connects when it is needed.

    Raises:
        UnavailableError: the package or a library that it needs is not installed.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake import store  # noqa: PLC0415 - Only who has such a tier needs it.
        except ImportError as problem:
            raise UnavailableError(
                f"Mooncake Store needs its package: {install_hint('mooncake')} (without CUDA: "
                f"mooncake-transfer-engine-non-cuda), and the system's libibverbs1: {problem}"
            ) from None
        super().__init__(settings.threads)
        self._package: Any = store
        self._settings = settings
        self._staging_bytes = settings.staging_mib * MIB
        self._memory = mmap.mmap(-1, (settings.threads + ASKERS) * self._staging_bytes)
        whole = np.frombuffer(self._memory, np.uint8)
        self._address = int(whole.ctypes.data)
        self._lock = threading.Lock()
        self._store: Any = None
        self._idle: queue.LifoQueue[_Caller] = queue.LifoQueue()
        self._callers = [
            _Caller(self._idle, whole[start : start + self._staging_bytes])
            for start in range(0, whole.nbytes, self._staging_bytes)
        ]

    def exists(self, names: Sequence[str], *, timeout_s: float) -> list[bool]:
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        if not names:
            return []
        found: list[int] = self._call(
            lambda: self._connected().batch_is_exist(list(names)), deadline
        )
        self._require(found)
        return [each == 1 for each in found]

    def read(self, reads: Sequence[BlobRead], *, timeout_s: float) -> list[BlobOutcome]:
        deadline = time.monotonic() + check_reads(reads, timeout_s=timeout_s)
        outcomes: list[BlobOutcome | None] = [None] * len(reads)
        if any(read.whole for read in reads):
            reads = self._cut_to_size(reads, deadline)
        for pieces in self._shares(reads):
            self._read(pieces, outcomes, deadline)
        unsure = [index for index, read in enumerate(reads) if not read.shows_size]
        if unsure:
            self._look_at(reads, unsure, outcomes, deadline)
        return [outcome or BlobOutcome.READ for outcome in outcomes]

    def write(self, writes: Sequence[BlobWrite], *, timeout_s: float) -> list[str]:
        names = [write.name for write in writes]
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        problems = [""] * len(writes)
        share: list[tuple[int, int]] = []
        used = 0
        for index, write in enumerate(writes):
            size = sum(buffer.nbytes for buffer in write.buffers)
            if not size:
                problems[index] = "is empty, which Mooncake Store does not keep"
            elif size > self._staging_bytes:
                problems[index] = (
                    f"has {size} bytes, this client takes {self._staging_bytes} (staging_mib)"
                )
            else:
                if used + size > self._staging_bytes:
                    self._write(writes, share, problems, deadline)
                    share, used = [], 0
                share.append((index, size))
                used += size
        if share:
            self._write(writes, share, problems, deadline)
        return problems

    def forget(self, names: Sequence[str], *, timeout_s: float) -> None:
        deadline = time.monotonic() + check_names(names, timeout_s=timeout_s)
        if not names:
            return
        # By force: whoever was told that a value exists has a lease on it for some seconds.
        codes: list[int] = self._call(
            lambda: self._connected().batch_remove(list(names), True),  # noqa: FBT003
            deadline,
        )
        self._require([code for code in codes if code not in MISSING])

    def get(self, name: str, *, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + check_names([name], timeout_s=timeout_s)
        stored: bytes | None = self._call(lambda: self._stored(name), deadline)
        return None if stored is None else stored[NONCE_BYTES:]

    def create(self, name: str, record: bytes, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + check_record(name, record, timeout_s=timeout_s)
        did: bool = self._call(lambda: self._create(name, record, deadline), deadline)
        return did

    def replace(self, name: str, record: bytes, *, timeout_s: float) -> None:
        deadline = time.monotonic() + check_record(name, record, timeout_s=timeout_s)
        stored = secrets.token_bytes(NONCE_BYTES) + record
        code: int = self._call(
            lambda: self._connected().upsert(name, stored, self._replication(pinned=True)),
            deadline,
        )
        self._require([code])

    def close(self) -> None:
        deadline = time.monotonic() + CLOSE_S
        for caller in self._callers:
            caller.end()
        for caller in self._callers:
            caller.join(deadline)
        # With a call still in it, Mooncake is left to the end of the process.
        if self._store is not None and not any(caller.is_alive() for caller in self._callers):
            self._store.close()
            self._store = None

    def _shares(self, reads: Sequence[BlobRead]) -> Iterator[list[_Piece]]:
        """What is to be read, in portions that the memory of a thread holds."""
        share: list[_Piece] = []
        left = self._staging_bytes
        for index, read in enumerate(reads):
            for offset, target in read.ranges:
                start = 0
                while start < target.nbytes:
                    size = min(target.nbytes - start, left)
                    part = target[start : start + size]
                    share.append(_Piece(index, read.name, offset + start, part))
                    start += size
                    left -= size
                    if not left:
                        yield share
                        share, left = [], self._staging_bytes
        if share:
            yield share

    def _read(
        self, pieces: Sequence[_Piece], outcomes: list[BlobOutcome | None], deadline: float
    ) -> None:
        by_read: dict[int, list[_Piece]] = {}
        for piece in pieces:
            by_read.setdefault(piece.read, []).append(piece)
        sizes = [[piece.target.nbytes for piece in each] for each in by_read.values()]
        sources = [[piece.offset for piece in each] for each in by_read.values()]
        places, end = [], 0
        for each in sizes:
            places.append([end + sum(each[:index]) for index in range(len(each))])
            end += sum(each)
        names = [each[0].name for each in by_read.values()]
        with self._turn(deadline) as turn:
            address = turn.address
            (counts,) = turn.wait(
                lambda: self._connected().get_into_ranges(
                    [address], [names], [places], [sources], [sizes]
                ),
                deadline,
            )
            for share, starts, found in zip(by_read.values(), places, counts, strict=True):
                for piece, start, count in zip(share, starts, found, strict=True):
                    if count == piece.target.nbytes:
                        target = np.frombuffer(piece.target, np.uint8)
                        np.copyto(target, turn.memory[start : start + count])
                    elif count in MISSING:
                        outcomes[piece.read] = BlobOutcome.MISSING
                    elif count in DAMAGED or count >= 0:
                        outcomes[piece.read] = outcomes[piece.read] or BlobOutcome.SHORT
                    else:
                        self._require([count])

    def _look_at(
        self,
        reads: Sequence[BlobRead],
        chosen: Sequence[int],
        outcomes: list[BlobOutcome | None],
        deadline: float,
    ) -> None:
        """What came of reads that asked for no bytes, or for none at some place."""
        sizes = self._sizes([reads[index].name for index in chosen], deadline)
        for index, size in zip(chosen, sizes, strict=True):
            if size in MISSING:
                outcomes[index] = BlobOutcome.MISSING
            elif size < reads[index].end:
                outcomes[index] = outcomes[index] or BlobOutcome.SHORT

    def _cut_to_size(self, reads: Sequence[BlobRead], deadline: float) -> list[BlobRead]:
        """The same reads, with ranges of whole values that end where the values do."""
        chosen = [index for index, read in enumerate(reads) if read.whole]
        sizes = self._sizes([reads[index].name for index in chosen], deadline)
        cut = list(reads)
        for index, size in zip(chosen, sizes, strict=True):
            [(offset, target)] = reads[index].ranges
            if size not in MISSING:
                cut[index] = BlobRead(reads[index].name, [BlobRange(offset, target[:size])])
        return cut

    def _sizes(self, names: Sequence[str], deadline: float) -> list[int]:
        """Of values; one of `MISSING` for those that are not there."""
        sizes: list[int] = self._call(
            lambda: [self._connected().get_size(name) for name in names], deadline
        )
        self._require([size for size in sizes if size not in MISSING])
        return sizes

    def _write(
        self,
        writes: Sequence[BlobWrite],
        share: Sequence[tuple[int, int]],
        problems: list[str],
        deadline: float,
    ) -> None:
        with self._turn(deadline) as turn:
            starts, end = [], 0
            for index, _ in share:
                starts.append(turn.address + end)
                for buffer in writes[index].buffers:
                    if buffer.nbytes:
                        source = np.frombuffer(buffer, np.uint8)
                        np.copyto(turn.memory[end : end + buffer.nbytes], source)
                        end += buffer.nbytes
            codes: list[int] = turn.wait(
                lambda: self._connected().batch_put_from(
                    [writes[index].name for index, _ in share],
                    starts,
                    [size for _, size in share],
                    self._replication(),
                ),
                deadline,
            )
        for (index, _), code in zip(share, codes, strict=True):
            if code <= UNREACHABLE_MAX:
                self._require([code])
            if code < 0 and code != EXISTS:
                room = ": its memory is full" if code == NO_SPACE else ""
                problems[index] = f"Mooncake Store answers {code}{room}"

    def _stored(self, name: str) -> bytes | None:
        """A record with its nonce. `get` alone does not tell "none" from "cannot be asked"."""
        store = self._connected()
        size = store.get_size(name)
        if size in MISSING:
            return None
        self._require([size])
        if size < NONCE_BYTES:
            return b""  # Somebody else's: no record has so few bytes.
        stored: bytes = store.get(name)
        if len(stored) < NONCE_BYTES:
            raise BlobStoreError(f"Mooncake Store gave {len(stored)} bytes of record {name!r}")
        return stored

    def _create(self, name: str, record: bytes, deadline: float) -> bool:
        store = self._connected()
        if store.is_exist(name) == 1:
            return False
        nonce = secrets.token_bytes(NONCE_BYTES)
        code = store.put(name, nonce + record, self._replication(pinned=True))
        if code != EXISTS:
            self._require([code])
        pause = threading.Event()
        while (stored := self._stored(name)) is None:
            pause.wait(AGAIN_S)
            if time.monotonic() > deadline:
                raise BlobStoreError(f"Mooncake Store: record {name!r} is not complete in time")
        return stored[:NONCE_BYTES] == nonce

    def _replication(self, *, pinned: bool = False) -> object:
        config = self._package.ReplicateConfig()
        config.replica_num = self._settings.replicas
        config.with_hard_pin = pinned
        return config

    def _require(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code < 0:
                raise BlobStoreError(f"Mooncake Store at {self._settings.master} answers {code}")

    def _call(self, work: Callable[[], Any], deadline: float) -> Any:  # noqa: ANN401 - Of any kind.
        with self._turn(deadline) as turn:
            return turn.wait(work, deadline)

    def _turn(self, deadline: float) -> _Turn:
        try:
            return _Turn(self._idle.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            raise BlobStoreError(
                f"Mooncake Store at {self._settings.master}: all {len(self._callers)} threads wait "
                "for an answer to earlier calls"
            ) from None

    def _connected(self) -> Any:  # noqa: ANN401 - The package has no types.
        """The connection, in a thread that may wait for it."""
        with self._lock:
            if self._store is not None:
                return self._store
            settings = self._settings
            host = self._probe() or settings.host
            store = self._package.MooncakeDistributedStore()
            code = store.setup(
                settings.host or host,
                "P2PHANDSHAKE",
                int(settings.segment_gib * GIB),
                BUFFER_BYTES,
                settings.protocol,
                settings.devices,
                settings.master,
            )
            if not code:
                code = store.register_buffer(self._address, len(self._memory))
            if code:
                raise BlobStoreError(f"Mooncake Store at {settings.master}: cannot connect: {code}")
            self._store = store
            return store

    def _probe(self) -> str:
        """This machine's address towards the master, which must be there."""
        found = MASTER.fullmatch(self._settings.master)
        if found is None or not found["host"]:
            return socket.gethostname()
        try:
            address = (found["host"], int(found["port"]))
            with socket.create_connection(address, timeout=PROBE_S) as probe:
                return str(probe.getsockname()[0])
        except (OSError, OverflowError) as problem:
            raise BlobStoreError(
                f"Mooncake Store at {self._settings.master} cannot be reached: {problem}"
            ) from None


class _Caller:
    """A thread that makes calls which may take too long, and memory that they may use meanwhile."""

    def __init__(self, idle: queue.LifoQueue[_Caller], memory: NDArray[np.uint8]) -> None:
        self.memory = memory
        self.calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self.calls = queue.SimpleQueue()
        self.idle = idle
        self._thread = threading.Thread(target=self._run, name="penstock-mooncake", daemon=True)
        self._thread.start()
        idle.put(self)

    def end(self) -> None:
        self.calls.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            answer_call(*call)


class _Turn:
    """The use of a thread and its memory by one call of the client, or until the thread is back."""

    def __init__(self, caller: _Caller) -> None:
        self.memory = caller.memory
        self.address = int(caller.memory.ctypes.data)
        self._caller = caller
        self._left = False

    def __enter__(self) -> _Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._left:
            self._caller.idle.put(self._caller)

    def wait(self, work: Callable[[], Any], deadline: float) -> Any:  # noqa: ANN401 - Of any kind.
        """What the work returns.

        Raises `BlobStoreError`: it is not done by the deadline, and goes on by itself; or it
        failed.
        """
        done: Future[Any] = Future()
        begun = time.monotonic()
        self._caller.calls.put((done, work))
        self._left = not wait([done], max(0.0, deadline - begun)).done
        if self._left:
            done.add_done_callback(lambda _: self._caller.idle.put(self._caller))
            waited = time.monotonic() - begun
            raise BlobStoreError(f"Mooncake Store did not answer in {waited:.3g} s")
        if (problem := done.exception()) is not None:
            raise BlobStoreError(str(problem) or type(problem).__name__)
        return done.result()
