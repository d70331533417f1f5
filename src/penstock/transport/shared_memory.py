"""Remote writes into shared memory: `SharedTarget` is written to, `connect_shared` writes.

    description    magic (8 bytes), version (1), msgpack map: address, token, size
    writer  ──→    the token (16 bytes)
    target  ──→    one byte, with the descriptor of the memory: an arena (a memfd), or GPU memory
    writer  ──→    notices, each led by one byte; or first that it cannot map GPU memory
    target  ──→    then an arena

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

With a `DeviceMemory`, areas lie on the GPU of the target, and the kernels of the writer write to
them. Such memory is made for one area and for nothing after it: the driver frees it when the last
process has unmapped it. So no write, however late, can hurt anything else, and its fence is there
to count it: it holds when the writer has closed its link, which unmaps first, or is dead.
"""

from __future__ import annotations

import errno
import fcntl
import logging
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
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from penstock.errors import ConfigError, UnavailableError
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

    from penstock.transport.remote import (
        Area,
        DeviceMemory,
        ExportedMemory,
        MappedMemory,
        Memory,
        PinMemory,
        Span,
        WriteEnd,
    )

MAGIC = b"PENSTOCK"
VERSION = 1
TOKEN_BYTES = 16
GRANT = b"\x01"
"""What the descriptor of an arena is sent along with."""
NOTICE = b"\x02"
"""What a notice begins with, so that an empty one is not mistaken for the end."""
GRANT_DEVICE = b"\x03"
"""What the descriptor of GPU memory is sent along with."""
DECLINE = b"\x04"
"""What the reason begins with why a writer cannot map GPU memory; it gets an arena then."""
REASON_BYTES_MAX = 500
SIZE_MAX = 1 << 48

# As plain numbers: joining flags of an enum takes longer than the call.
_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it yet.
CALLERS_MAX = 64
"""How many connections without a token may be open; older ones are closed."""
NOTICES_AT_ONCE = 256
"""How many messages of one writer are taken before the others have their turn."""

_TRUNCATED = int(socket.MSG_TRUNC)
_log = logging.getLogger(__name__)


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

    def __init__(self, peer: str, size: int, arena: Arena | ExportedMemory, address: str) -> None:
        self.peer = peer
        self.failure = ""
        self.arena = arena
        self.memory: Memory = arena.bytes[:size]
        self.token = secrets.token_bytes(TOKEN_BYTES)
        described = Description(peer=peer, address=address, token=self.token, size=size)
        self.description = encode_description(described)
        self.connection: socket.socket | None = None
        self.pidfd: int | None = None
        """Of the process that has the memory, as soon as it has it."""
        self.used = False
        """Whether a notice has come: from then on we may be reading the memory."""
        self._leaving: select.epoll | None = None
        """Readable when the writer has left GPU memory that was retired, or is dead."""

    @property
    def on_device(self) -> bool:
        """Whether it is memory of a GPU."""
        return not isinstance(self.arena, Arena)

    @property
    def is_left(self) -> bool:
        """Whether no process has the memory but this one."""
        if self.pidfd is None or wait_readable(self.pidfd, deadline=0.0):
            return True
        if not self.on_device:
            return False
        return bool(self._leaving.poll(0)) if self._leaving else self.connection is None

    @property
    def leaving_descriptor(self) -> int | None:
        """Readable when the writer of a retired area has left it; nothing if it has."""
        return self.pidfd if self._leaving is None else self._leaving.fileno()

    def hang_up(self) -> None:
        """Closes the connection: no notice comes, and the writer learns that."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def await_leaving(self) -> None:
        """The same for GPU memory; but it shows when the writer closes its end."""
        if self.connection is None or self.pidfd is None:
            return
        self._leaving = select.epoll()
        self._leaving.register(self.pidfd, select.EPOLLIN)
        # Not for its notices: nobody takes them. A hang-up is shown unasked.
        self._leaving.register(self.connection, 0)
        with suppress(OSError):  # It has gone already.
            self.connection.shutdown(socket.SHUT_WR)

    def move_to_host(self, arena: Arena) -> None:
        """Has memory of the host in the place of that of a GPU, which nobody reads or has."""
        size = len(self.memory)
        self.arena.close()
        self.arena, self.memory = arena, arena.bytes[:size]

    def forget_writer(self) -> None:
        """Closes what is known of a writer that has left, or of one that is dead."""
        self.hang_up()
        if self._leaving is not None:
            self._leaving.close()
            self._leaving = None
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class SharedTarget(AreaBooks[SharedArea]):
    """The side that is written to; see `Target`.

    Args:
        huge_pages: whether to look for huge pages.
        pin: makes the memory fit for a device; see `PinMemory`.
        device: where areas lie that their writers can map there; the others lie on the host.
        folder: where writers come to; the private folder of this process if none is given.
    """

    def __init__(
        self,
        *,
        huge_pages: bool = True,
        pin: PinMemory | None = None,
        device: DeviceMemory | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self._device = device
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
        """Memory for one writer process: new memory of the GPU; or an arena, also a freed one."""
        arena = self._device_memory(peer, size) or self._arenas.take(size)
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
        if known is None:
            return
        if known.on_device and known.connection is not None:
            self._epoll.unregister(known.connection)
            known.await_leaving()
        else:
            known.hang_up()

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether the process that had the memory is seen dead, or has left that of a GPU."""
        if self._require_retired(area).is_left:
            return Fenced()
        return NotYet(f"the process of {area.peer!r} is alive")

    @property
    def watches_fences(self) -> bool:
        """A pidfd shows the end of the writer's process."""
        return True

    def fence_descriptor(self, area: Area) -> int | None:
        """Becomes readable when the fence of a retired area holds; nothing if it does."""
        return self._require_retired(area).leaving_descriptor

    def free(self, area: Area) -> None:
        known = self._forget(area, self.fence(area))
        known.forget_writer()
        if isinstance(known.arena, Arena):
            self._arenas.give_back(known.arena)
        else:
            known.arena.close()

    def close(self) -> None:
        """Gives everything back. The memory of a living writer stays until it is gone, too."""
        areas = (*self.open_areas, *self.retired_areas)
        for area in areas:
            area.forget_writer()
            if not isinstance(area.arena, Arena):
                area.arena.close()
        self._arenas.close(area.arena for area in areas if isinstance(area.arena, Arena))
        for caller in self._callers.values():
            caller.close()
        self._callers.clear()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._epoll.close()

    def _device_memory(self, peer: str, size: int) -> ExportedMemory | None:
        """Memory of the GPU for an area, if there is any."""
        if self._device is None or size < 1:
            return None
        try:
            return self._device.create(size)
        except UnavailableError as error:
            _log.warning("landing area is in host memory: peer=%s cause=%s", peer, error)
            return None

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
            grant = GRANT_DEVICE if area.on_device else GRANT
            socket.send_fds(caller, [grant], [area.arena.fd])
        except OSError as error:
            # It cannot have got the memory, and may call again.
            area.forget_writer()
            raise UnavailableError(f"the writer is gone: {error.strerror}") from error

    def _dismiss(self, fd: int, reason: str) -> None:
        self.refused[reason] += 1
        self._callers.pop(fd).close()

    def _take(self, area: SharedArea, connection: socket.socket) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(NOTICES_AT_ONCE):
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
            if message.startswith(DECLINE) and area.on_device and not area.used:
                self._move_to_host(area, connection, message[len(DECLINE) :])
                continue
            if flags & _TRUNCATED or not message.startswith(NOTICE):
                self.refused["garbage"] += 1
                continue
            area.used = True
            found.append(message[len(NOTICE) :])
        return found

    def _move_to_host(self, area: SharedArea, connection: socket.socket, why: bytes) -> None:
        """Gives an arena to a writer that cannot map the memory of the GPU."""
        reason = why[:REASON_BYTES_MAX].decode(errors="replace")
        _log.warning("landing area is in host memory: peer=%s cause=%s", area.peer, reason)
        try:
            arena = self._arenas.take(len(area.memory))
        except (UnavailableError, ConfigError, OSError, MemoryError) as error:
            area.failure = f"{reason}; and no memory of the host: {error}"
            return
        area.move_to_host(arena)
        with suppress(OSError):  # The writer is gone, and will be missed.
            socket.send_fds(connection, [GRANT], [arena.fd])


GRANT_S = 10.0
"""A target that has not given the memory by then is taken for gone."""


class SharedLink:
    """The way of this process to one area; see `WriterLink`."""

    def __init__(
        self,
        description: Description,
        *,
        grant_s: float,
        pin: PinMemory | None,
        device: DeviceMemory | None,
    ) -> None:
        self._peer = description.peer
        self._size = description.size
        self._posted = PostedWrites(description.peer, description.size)
        self._connection = call(description)
        self._memory: Any = None
        """The bytes of the area: an array, or memory of a device."""
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._device = device
        self._mapped: MappedMemory | None = None
        self._grant_s = grant_s
        self._grant_deadline = time.monotonic() + grant_s
        self._declined = False
        """Whether it said that it cannot map memory of a GPU."""
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

    def window(self, offset: int, length: int) -> Memory | None:
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
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        # Last: it tells the target that memory of its GPU was left.
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
        known = message == GRANT or (message == GRANT_DEVICE and not self._declined)
        if not known or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self.failure = f"{self._peer} refused"
            return
        try:
            if message == GRANT:
                self._map_arena(fds[0])
            else:
                self._map_device(fds[0])
        finally:
            os.close(fds[0])

    def _map_arena(self, fd: int) -> None:
        try:
            memory = _map(fd, self._size)
            if self._pin is not None:
                self._unpin = self._pin(memory)
            self._memory = memory
        except (OSError, ValueError, UnavailableError) as error:
            self.failure = f"the memory of {self._peer} cannot be mapped: {error}"

    def _map_device(self, fd: int) -> None:
        """Maps memory of the target's GPU; where that cannot be, an arena is given instead."""
        if self._device is None:
            self._decline("the KV of the writer is not on a GPU")
            return
        try:
            self._mapped = self._device.map(fd, self._size)
        except UnavailableError as error:
            self._decline(str(error))
        else:
            self._memory = self._mapped.bytes[: self._size]

    def _decline(self, why: str) -> None:
        self._declined = True
        self._grant_deadline = time.monotonic() + self._grant_s
        try:
            self._connection.send(DECLINE + why.encode()[:REASON_BYTES_MAX])
        except OSError as error:
            self.failure = f"{self._peer} is gone: {error.strerror}"

    def _deliver(self, notice: bytes) -> Delivery:
        try:
            self._connection.send(NOTICE + notice)
        except BlockingIOError:
            return Delivery.FULL
        except OSError:
            return Delivery.GONE
        return Delivery.GIVEN


def connect_shared(
    description: bytes,
    *,
    grant_s: float = GRANT_S,
    pin: PinMemory | None = None,
    device: DeviceMemory | None = None,
) -> SharedLink:
    """A way to the area that a target of another process described.

    Raises `ValueError`: it is not a description of such an area; `UnavailableError`: the target is
    gone.
    """
    return SharedLink(decode_description(description), grant_s=grant_s, pin=pin, device=device)


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
