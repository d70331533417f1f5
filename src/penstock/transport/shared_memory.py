"""Remote writes into shared memory: the side that is written to.

    area     an arena (a memfd) for one writer process, given to it by descriptor
    notices  messages on the Unix socket over which the descriptor was given

Notices go over the socket rather than through a ring in the memory itself: a system call on
both sides orders them behind their bytes on every machine; a message is there whole or not at
all, also from a writer that was stopped in the middle of it; and the socket has a bound, wakes
up who waits, and ends with its writer. It costs some microseconds for each part.

The one rule (the fence): memory that was given to a process is its to write until that process
is *seen dead*, by a pidfd that we held before we gave it. Neither a closed socket nor silence
says that.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections import Counter
from hmac import compare_digest
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.tiers.arena import Arena
from penstock.transport.areas import Areas
from penstock.transport.remote import NOTICE_BYTES_MAX, Fenced, Notice, NotYet
from penstock.transport.shared_greeting import (
    GRANT,
    NOTICE,
    TOKEN_BYTES,
    Description,
    encode_description,
    listen,
    pidfd_of_peer,
    user_of_peer,
)
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from penstock.transport.remote import Area, PinMemory

CALLERS_MAX = 64
"""So many connections may be open that have not said what they want; older ones are closed."""
NOTICES_AT_ONCE = 256
"""So many notices of one area are taken before the others have their turn."""
SPARE_MAX = 8
"""So many freed arenas are kept for the next areas; the memory of others goes back."""

_TRUNCATED = int(socket.MSG_TRUNC)


class SharedArea:
    """Memory for one writer process."""

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


class SharedTarget:
    """The side that is written to; see `Target`.

    Args:
        huge_pages: whether to look for huge pages.
        pin: makes the memory fit for a device; see `PinMemory`.
        folder: where writers come to; the private folder of this process if none is given.
    """

    def __init__(
        self, *, huge_pages: bool = True, pin: PinMemory | None = None, folder: Path | None = None
    ) -> None:
        self.refused: Counter[str] = Counter()
        """Who called and what was said that does not belong, by reason."""
        self._huge_pages = huge_pages
        self._pin = pin
        self._unpin: dict[int, Callable[[], None]] = {}
        """How to undo it, by the descriptor of an arena."""
        self._listener, self._path = listen(folder)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._callers: dict[int, socket.socket] = {}
        self._areas: Areas[SharedArea] = Areas()
        self._spare: list[Arena] = []
        self._room = bytearray(len(NOTICE) + NOTICE_BYTES_MAX)
        """What notices are received into: to take as much anew for each costs more than they."""

    def open_area(self, peer: str, size: int) -> SharedArea:
        """Memory for one writer process; that of an area that was freed, if there is any."""
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        fitting = [arena for arena in self._spare if size <= arena.size <= 2 * size]
        arena = fitting[0] if fitting else self._make(size)
        if fitting:
            self._spare.remove(arena)
        return self._areas.add(SharedArea(peer, size, arena, str(self._path)))

    def notices(self) -> list[Notice]:
        """Lets writers connect, and takes the notices that arrived; never waits."""
        self._answer_callers()
        found: list[Notice] = []
        for area in self._areas.open:
            if area.connection is not None:
                found += [Notice(area, payload) for payload in self._take(area, area.connection)]
        return found

    @property
    def descriptor(self) -> int:
        """Readable while there are notices to take, or writers to let in."""
        return self._epoll.fileno()

    def retire(self, area: Area) -> None:
        """Ends our interest in an area; see `Target`."""
        known = self._areas.retire(area)
        if known is not None:
            known.hang_up()

    def fence(self, area: Area) -> Fenced | NotYet:
        """Whether the process that had the memory is seen dead."""
        if self._areas.require_retired(area).writer_is_dead:
            return Fenced()
        return NotYet(f"the process of {area.peer!r} is alive")

    @property
    def watches_fences(self) -> bool:
        """A pidfd shows the end of the writer's process."""
        return True

    def fence_descriptor(self, area: Area) -> int | None:
        """Becomes readable when the fence of a retired area holds; nothing if it does."""
        return self._areas.require_retired(area).pidfd

    def free(self, area: Area) -> None:
        """Gives the memory of an area back; see `Target`."""
        known = self._areas.free(area, self.fence(area))
        known.forget_writer()
        self._spare.append(known.arena)
        if len(self._spare) > SPARE_MAX:
            self._give_up(self._spare.pop(0))

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        return self._areas.open_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence, or to be freed."""
        return self._areas.retired_bytes

    def close(self) -> None:
        """Gives everything back. The memory of a living writer stays until it is gone, too."""
        for area in (*self._areas.open, *self._areas.retired):
            area.hang_up()
            area.forget_writer()
            self._give_up(area.arena)
        for caller in self._callers.values():
            caller.close()
        for arena in self._spare:
            self._give_up(arena)
        self._callers.clear()
        self._spare.clear()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        self._epoll.close()

    def _make(self, size: int) -> Arena:
        arena = Arena.create(size, name="landing", huge_pages=self._huge_pages)
        if self._pin is not None:
            self._unpin[arena.fd] = self._pin(arena.bytes)
        return arena

    def _give_up(self, arena: Arena) -> None:
        unpin = self._unpin.pop(arena.fd, None)
        if unpin is not None:
            unpin()
        arena.close()

    def _answer_callers(self) -> None:
        for _ in range(CALLERS_MAX):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                break
            if user_of_peer(caller) != os.getuid():
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
        for area in self._areas.open:
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
