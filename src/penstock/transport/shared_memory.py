"""Remote writes into shared memory: `SharedTarget` is written to, `connect_shared` writes.

    description    magic (8 bytes), version (1), msgpack map: address, token, size
    writer  ──→    the token (16 bytes)
    target  ──→    one byte, with the descriptor of the memory: an arena (a memfd)
    writer  ──→    notices, each led by one byte

They meet at a Unix socket in a folder of mode 0700; each looks whether the other is of the same
user. Notices go over the socket rather than through a ring in the memory itself: a system call on
both sides orders them behind their bytes on every machine; a message is there whole or not at
all, also from a writer that was stopped in the middle of it; and the socket has a bound, wakes
up who waits, and ends with its writer. It costs some microseconds for each part.

The one rule (the fence): memory that was given to a process is its to write until that process
is *seen dead*, by a pidfd from the kernel that the target held before it gave the memory. Neither a
closed socket nor silence says that. Therefore nobody but the connected process can write through a
link: the descriptor is closed as soon as the memory is mapped, and a child of the process does not
inherit the mapping.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from hmac import compare_digest
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from penstock.errors import UnavailableError
from penstock.tiers.arena import Arena, populate_pages
from penstock.transport.remote import (
    NOTICE_BYTES_MAX,
    AreaBooks,
    ArenaPool,
    Delivery,
    Fenced,
    Notice,
    NotYet,
    PostedWrites,
    require_within,
)
from penstock.transport.unix_sockets import private_folder, socket_path, socket_peer
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.transport.remote import Area, PinMemory, Span, WriteEnd

MAGIC = b"PENSTOCK"
VERSION = 1
TOKEN_BYTES = 16
GRANT = b"\x01"
"""What a descriptor is sent along with."""
NOTICE = b"\x02"
"""What a notice begins with, so that an empty one is not mistaken for the end."""
SIZE_MAX = 1 << 48

# As plain numbers: joining flags of an enum takes longer than the call.
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet.
CALLERS_MAX = 64
"""How many connections without a token may be open; older ones are closed."""
NOTICES_AT_ONCE = 256
"""How many notices of one area are taken before the others have their turn."""

_TRUNCATED = int(socket.MSG_TRUNC)


class Description(msgspec.Struct, frozen=True, tag="shared memory", forbid_unknown_fields=True):
    """What a writer has to know of an area."""

    peer: Annotated[str, msgspec.Meta(max_length=200)]
    """Whose area it is."""
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=107)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    size: Annotated[int, msgspec.Meta(ge=1, le=SIZE_MAX)]


_DESCRIPTIONS = msgspec.msgpack.Decoder(Description)


def encode_description(description: Description) -> bytes:
    """As it goes over a control channel."""
    return MAGIC + bytes((VERSION,)) + msgspec.msgpack.encode(description)


def decode_description(encoded: bytes) -> Description:
    """What `encode_description` wrote; `ValueError` for anything else."""
    if not encoded.startswith(MAGIC) or len(encoded) <= len(MAGIC):
        raise ValueError("description is of no area: it does not begin as one")
    if encoded[len(MAGIC)] != VERSION:
        raise ValueError(
            f"description is of version {encoded[len(MAGIC)]}, this end knows {VERSION}"
        )
    try:
        return _DESCRIPTIONS.decode(encoded[len(MAGIC) + 1 :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"description cannot be read: {error}") from error


def listen(folder: Path | None = None) -> tuple[socket.socket, Path]:
    """A socket for writers to come to, and where it is: in a folder that only this user enters.

    Raises `UnavailableError`: it cannot be made there.
    """
    path = socket_path(private_folder() if folder is None else folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(bytes(path))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {path}: {error.strerror}") from error
    listener.listen()
    return listener, path


def call(description: Description) -> socket.socket:
    """A connection to the target of an area, on which the token was sent.

    Raises `UnavailableError`: nobody is there, or too many are calling.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(description.address)
        if socket_peer(connection).uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        connection.send(description.token)
    except OSError as error:
        connection.close()
        raise UnavailableError(
            f"no way to the area of {description.peer!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        # A path with a zero byte: what is described is no socket.
        connection.close()
        raise UnavailableError(f"no way to the area of {description.peer!r}: {error}") from error
    return connection


def pidfd_of_peer(connection: socket.socket) -> int:
    """A descriptor of the process at the other end of a connection.

    Raises `UnavailableError`: it is gone already.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EINVAL}:
            raise UnavailableError(f"the writer is gone: {error.strerror}") from error
    return _pidfd_by_number(connection)


def _pidfd_by_number(connection: socket.socket) -> int:
    """The same on an older kernel, by a process number that may have been reused."""
    pid = socket_peer(connection).pid
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(f"the writer, process {pid}, is gone: {error.strerror}") from error
    if is_hung_up(connection):
        os.close(pidfd)
        raise UnavailableError(f"the writer, process {pid}, is gone")
    return pidfd


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end of a connection was closed, with its process or without."""
    try:
        return not connection.recv(1, _PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class SharedArea:
    """Memory for one writer process."""

    ready = True
    failure = ""

    def __init__(self, peer: str, size: int, arena: Arena, address: str) -> None:
        self.peer = peer
        self.arena = arena
        self.memory: NDArray[np.uint8] = arena.bytes[:size]
        self.token = secrets.token_bytes(TOKEN_BYTES)
        described = Description(peer=peer, address=address, token=self.token, size=size)
        self.description = encode_description(described)
        self.connection: socket.socket | None = None
        self.pidfd: int | None = None
        """Of the process that has the memory, as soon as it has it."""

    @property
    def writer_is_dead(self) -> bool:
        """Whether no process has the memory but this one."""
        return self.pidfd is None or wait_readable(self.pidfd, deadline=0.0)

    def hang_up(self) -> None:
        """Closes the connection: no notice comes, and the writer learns that."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def forget_writer(self) -> None:
        """Closes what is known of a writer that is dead."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class SharedTarget(AreaBooks[SharedArea]):
    """The side that is written to; see `Target`.

    Args:
        huge_pages: whether to look for huge pages.
        pin: makes the memory fit for a device; see `PinMemory`.
        folder: where writers come to; the private folder of this process if none is given.
    """

    def __init__(
        self, *, huge_pages: bool = True, pin: PinMemory | None = None, folder: Path | None = None
    ) -> None:
        super().__init__()
        self.refused: Counter[str] = Counter()
        """Who called and what was said that does not belong, by reason."""
        self._arenas = ArenaPool(huge_pages=huge_pages, pin=pin)
        self._listener, self._path = listen(folder)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._callers: dict[int, socket.socket] = {}
        self._room = bytearray(len(NOTICE) + NOTICE_BYTES_MAX)
        """What notices are received into: to take as much anew for each costs more than they."""

    def open_area(self, peer: str, size: int) -> SharedArea:
        """Memory for one writer process; that of an area that was freed, if there is any."""
        arena = self._arenas.take(size)
        return self._add(SharedArea(peer, size, arena, str(self._path)))

    def notices(self) -> list[Notice]:
        """Lets writers connect, and takes the notices that arrived; never waits."""
        found: list[Notice] = []
        if not self._epoll.poll(0, 1):
            return found
        self._answer_callers()
        for area in self.open_areas:
            if area.connection is not None:
                found += [Notice(area, payload) for payload in self._take(area, area.connection)]
        return found

    @property
    def descriptor(self) -> int:
        """Readable while there are notices to take, or writers to let in."""
        return self._epoll.fileno()

    def retire(self, area: Area) -> None:
        known = self._mark_retired(area)
        if known is not None:
            known.hang_up()

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether the process that had the memory is seen dead."""
        if self._require_retired(area).writer_is_dead:
            return Fenced()
        return NotYet(f"the process of {area.peer!r} is alive")

    @property
    def watches_fences(self) -> bool:
        """A pidfd shows the end of the writer's process."""
        return True

    def fence_descriptor(self, area: Area) -> int | None:
        """Becomes readable when the fence of a retired area holds; nothing if it does."""
        return self._require_retired(area).pidfd

    def free(self, area: Area) -> None:
        known = self._forget(area, self.fence(area))
        known.forget_writer()
        self._arenas.give_back(known.arena)

    def close(self) -> None:
        """Gives everything back. The memory of a living writer stays until it is gone, too."""
        areas = (*self.open_areas, *self.retired_areas)
        for area in areas:
            area.hang_up()
            area.forget_writer()
        self._arenas.close(area.arena for area in areas)
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._epoll.close()

    def _answer_callers(self) -> None:
        for _ in range(CALLERS_MAX):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                break
            if socket_peer(caller).uid != os.getuid():
                self.refused["user"] += 1
                caller.close()
                continue
            caller.settimeout(0.0)
            self._epoll.register(caller, select.EPOLLIN)
            self._callers[caller.fileno()] = caller
            if len(self._callers) > CALLERS_MAX:
                self._dismiss(next(iter(self._callers)), "silent")
        for fd in tuple(self._callers):
            self._answer(fd, self._callers[fd])

    def _answer(self, fd: int, caller: socket.socket) -> None:
        try:
            token = caller.recv(TOKEN_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            token = b""
        area = self._area_of(token)
        if area is None:
            self._dismiss(fd, "token" if token else "gone")
            return
        try:
            self._grant(area, caller)
        except UnavailableError:
            self._dismiss(fd, "gone")
            return
        del self._callers[fd]
        area.connection = caller

    def _area_of(self, token: bytes) -> SharedArea | None:
        """The open area that a token is for, if it has no writer."""
        for area in self.open_areas:
            if compare_digest(area.token, token) and area.pidfd is None:
                return area
        return None

    def _grant(self, area: SharedArea, caller: socket.socket) -> None:
        """Gives the memory away, after we know who gets it."""
        area.pidfd = pidfd_of_peer(caller)
        try:
            socket.send_fds(caller, [GRANT], [area.arena.fd])
        except OSError as error:
            # It cannot have got the memory, and may call again.
            area.forget_writer()
            raise UnavailableError(f"the writer is gone: {error.strerror}") from error

    def _dismiss(self, fd: int, reason: str) -> None:
        self.refused[reason] += 1
        self._callers.pop(fd).close()

    def _take(self, area: SharedArea, connection: socket.socket) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < NOTICES_AT_ONCE:
            try:
                length, _, flags, _ = connection.recvmsg_into([self._room])
            except BlockingIOError:
                break
            except OSError:
                length, flags = 0, 0
            message = bytes(memoryview(self._room)[:length])
            if not message:
                area.hang_up()  # Its memory stays given: the process may live.
                break
            if flags & _TRUNCATED or not message.startswith(NOTICE):
                self.refused["garbage"] += 1
                continue
            found.append(message[len(NOTICE) :])
        return found


GRANT_S = 10.0
"""A target that has not given the memory by then is taken for gone."""


class SharedLink:
    """The way of this process to one area; see `WriterLink`."""

    def __init__(self, description: Description, *, grant_s: float, pin: PinMemory | None) -> None:
        self._peer = description.peer
        self._size = description.size
        self._posted = PostedWrites(description.peer, description.size)
        self._connection = call(description)
        self._memory: NDArray[np.uint8] | None = None
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._grant_s = grant_s
        self._grant_deadline = time.monotonic() + grant_s
        self._closed = False
        self.failure: str | None = None
        """Why nothing can be written any more, if so."""

    def post(
        self, spans: Sequence[Span], notice: bytes, *, packed: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Begins a write; what was packed is in the area already."""
        if self._closed:
            raise UnavailableError(f"link to {self._peer!r} was closed")
        for offset, length in packed:
            require_within(offset, length, self._size)
        return self._posted.post(spans, notice)

    def window(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        if not self._closed and self.failure is None:
            self._look()
        if self._closed or self.failure is not None:
            why = self.failure or "it was closed"
            raise UnavailableError(f"no way to the area of {self._peer!r}: {why}")
        require_within(offset, length, self._size)
        return None if self._memory is None else self._memory[offset : offset + length]

    def observe(self, *, budget_bytes: int) -> tuple[list[WriteEnd], int]:
        """Copies some bytes; returns which writes have ended."""
        if not self._closed and self.failure is None:
            self._look()
        if self.failure is not None:
            return self._posted.fail(self.failure), 0
        if self._memory is None:
            return [], 0
        return self._posted.advance(self._memory, budget_bytes, self._deliver)

    @property
    def busy(self) -> bool:
        return bool(self._posted)

    @property
    def connected(self) -> bool:
        """Whether the memory is there to write to."""
        return self._memory is not None

    @property
    def descriptor(self) -> int | None:
        """Readable when the target has given the memory, or is gone; nothing once closed."""
        fd = self._connection.fileno()
        return fd if fd >= 0 else None

    def close(self) -> None:
        self._closed = True
        self._posted.fail("closed")
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = None
        self._connection.close()

    def _look(self) -> None:
        """Takes the memory when it is given, and notices when the target hangs up."""
        if self._memory is None:
            self._take_memory()
        elif is_hung_up(self._connection):
            self.failure = f"{self._peer} hung up"

    def _take_memory(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._connection, len(GRANT), 1)
        except BlockingIOError:
            if time.monotonic() >= self._grant_deadline:
                self.failure = f"{self._peer} has not given its memory in {self._grant_s} s"
            return
        except OSError as error:
            self.failure = f"{self._peer} is gone: {error.strerror}"
            return
        if message != GRANT or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self.failure = f"{self._peer} refused"
            return
        try:
            memory = _map(fds[0], self._size)
            if self._pin is not None:
                self._unpin = self._pin(memory)
            self._memory = memory
        except (OSError, ValueError, UnavailableError) as error:
            self.failure = f"the memory of {self._peer} cannot be mapped: {error}"
        finally:
            os.close(fds[0])

    def _deliver(self, notice: bytes) -> Delivery:
        try:
            self._connection.send(NOTICE + notice)
        except BlockingIOError:
            return Delivery.FULL
        except OSError:
            return Delivery.GONE
        return Delivery.GIVEN


def connect_shared(
    description: bytes, *, grant_s: float = GRANT_S, pin: PinMemory | None = None
) -> SharedLink:
    """A way to the area that a target of another process described.

    Raises `ValueError`: it is not a description of such an area; `UnavailableError`: the target is
    gone.
    """
    return SharedLink(decode_description(description), grant_s=grant_s, pin=pin)


def _map(fd: int, size: int) -> NDArray[np.uint8]:
    """The first `size` bytes of an arena, for this process alone, with every page in place."""
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size:
        raise ValueError(f"it is not sealed, or has less than {size} bytes")
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    mapping.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # Both are a matter of speed and size alone.
        mapping.madvise(mmap.MADV_DONTDUMP)
        populate_pages(mapping, 0, len(mapping))
    return np.frombuffer(mapping, dtype=np.uint8)[:size]
