"""Remote writes into shared memory: the side that writes.

    link = connect_shared(description)
    link.post([Span(part, offset)], notice)
    link.observe(budget_bytes=…)                 # copies, then gives the notice

The memory is mapped once its target, at its next look, has given the descriptor; what is posted
before waits for that. The one rule: nobody but this process can write through this link. The
descriptor is closed as soon as the memory is mapped, and a child of this process does not
inherit the mapping; the fence of the target relies on it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import UnavailableError
from penstock.tiers.arena import populate_pages
from penstock.transport.posted import Delivery, PostedWrites, require_within
from penstock.transport.shared_greeting import (
    GRANT,
    NOTICE,
    call,
    decode_description,
    is_hung_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.transport.remote import PinMemory, Span, WriteEnd
    from penstock.transport.shared_greeting import Description

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

    def post(self, spans: Sequence[Span], notice: bytes) -> int:
        """Begins a write."""
        if self._closed:
            raise UnavailableError(f"link to {self._peer!r} was closed")
        return self._posted.post(spans, notice)

    def window(self, offset: int, length: int) -> NDArray[np.uint8] | None:
        """These bytes of the area, once the target has given it; see `WriterLink`."""
        if not self._closed and self.failure is None:
            self._look()
        if self._closed or self.failure is not None:
            why = self.failure or "it was closed"
            raise UnavailableError(f"no way to the area of {self._peer!r}: {why}")
        require_within(offset, length, self._size)
        return None if self._memory is None else self._memory[offset : offset + length]

    def observe(self, *, budget_bytes: int) -> tuple[list[WriteEnd], int]:
        """Copies some bytes, and tells which writes have ended."""
        if not self._closed and self.failure is None:
            self._look()
        if self.failure is not None:
            return self._posted.fail(self.failure), 0
        if self._memory is None:
            return [], 0
        return self._posted.advance(self._memory, budget_bytes, self._deliver)

    @property
    def busy(self) -> bool:
        """Whether a posted write has not ended."""
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
        """Unmaps the memory and hangs up; see `WriterLink`."""
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

    Args:
        description: of the area.
        grant_s: patience with the target.
        pin: makes the memory fit for a device; see `PinMemory`.

    Raises:
        ValueError: it is no description of such an area.
        UnavailableError: the target is gone.
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
