"""Unix sockets, and deaths of processes, on the clock of a simulated world.

A `SimSocket` keeps the promises of a packet socket: packets in order and once, with descriptors;
what was sent before the end can still be read. It has a real descriptor, readable while there is
something to read, so that the product's own polling works.
"""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lab.sim.runtime.world import RuntimeWorld
    from penstock.transport.unix_sockets import SocketPeer

_EVENT_FLAGS = os.EFD_NONBLOCK | os.EFD_CLOEXEC


class SimSocket:
    """One end of a connection. `arrived` is called when there is something to read."""

    def __init__(self, world: RuntimeWorld, arrived: Callable[[], None], delay_s: float) -> None:
        self.peer: SimSocket | None = None
        self._world = world
        self._arrived = arrived
        self._delay_s = delay_s
        self._event = os.eventfd(0, _EVENT_FLAGS)
        self._inbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._ended = False
        self._closed = False
        self._last_at = 0.0
        self._travelling: list[int] = []
        """Descriptors on their way to the other end."""

    def fileno(self) -> int:
        """Readable while `recvmsg` has something; -1 once it is closed."""
        return -1 if self._closed else self._event

    def sendmsg(
        self,
        buffers: Sequence[bytes],
        ancillary: Sequence[tuple[int, int, array.array[int]]] = (),
        _flags: int = 0,
    ) -> int:
        """Sends a packet on its way."""
        if self._closed or self._ended:
            raise BrokenPipeError(errno.EPIPE, "the other end is closed")
        descriptors = tuple(os.dup(fd) for _, _, fds in ancillary for fd in fds)
        self._travelling += descriptors
        self._travel(self._deliver, b"".join(buffers), descriptors)
        return sum(map(len, buffers))

    def recvmsg(
        self, _size: int, _ancillary_bytes: int = 0, _flags: int = 0
    ) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        """The next packet."""
        if not self._inbox:
            if self._ended:
                raise ConnectionResetError(errno.ECONNRESET, "the other end is closed")
            raise BlockingIOError(errno.EAGAIN, "nothing is there")
        frame, descriptors = self._inbox.popleft()
        if not self._inbox and not self._ended:
            os.eventfd_read(self._event)
        rights = array.array("i", descriptors).tobytes()
        return frame, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [], 0, None

    def close(self) -> None:
        """Ends this end; the other one sees it when it has read what was sent."""
        if not self._closed:
            self._closed = True
            os.close(self._event)
            for _, descriptors in self._inbox:
                for fd in descriptors:
                    os.close(fd)
            self._inbox.clear()
            self._travel(self._end_peer)

    def dispose(self) -> None:
        """The world is over: gives all descriptors back."""
        self.close()
        while self._travelling:
            os.close(self._travelling.pop())

    def _travel(self, arrive: Callable[..., None], *what: object) -> None:
        pause = self._world.rng.random() * self._delay_s
        self._last_at = max(self._last_at, self._world.now + pause)
        self._world.after(self._last_at - self._world.now, arrive, *what)

    def _deliver(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        assert self.peer is not None
        del self._travelling[: len(descriptors)]
        self.peer.take(frame, descriptors)

    def take(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        """A packet arrives."""
        if self._closed:
            for fd in descriptors:
                os.close(fd)
            return
        if not self._inbox and not self._ended:
            os.eventfd_write(self._event, 1)
        self._inbox.append((frame, descriptors))
        self._arrived()

    def _end_peer(self) -> None:
        assert self.peer is not None
        self.peer.end()

    def end(self) -> None:
        """The other end is closed."""
        if not self._closed and not self._ended:
            if not self._inbox:
                os.eventfd_write(self._event, 1)
            self._ended = True
            self._arrived()


def sim_socket_pair(
    world: RuntimeWorld, near: Callable[[], None], far: Callable[[], None], delay_s: float
) -> tuple[SimSocket, SimSocket]:
    """Both ends of a new connection."""
    here, there = SimSocket(world, near, delay_s), SimSocket(world, far, delay_s)
    here.peer, there.peer = there, here
    return here, there


class SimListener:
    """Where a simulated process listens."""

    is_in_place = True
    """Its folder is never removed."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, _EVENT_FLAGS)
        self._waiting: deque[tuple[SimSocket, SocketPeer]] = deque()

    def put(self, channel: SimSocket, peer: SocketPeer) -> None:
        """Somebody connects."""
        self._waiting.append((channel, peer))
        os.eventfd_write(self.descriptor, 1)

    def accept(self) -> Iterator[tuple[SimSocket, SocketPeer]]:
        """Those who have connected since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        while self._waiting:
            yield self._waiting.popleft()

    def close(self) -> None:
        """Nobody is accepted any more."""
        while self._waiting:
            self._waiting.popleft()[0].close()
        os.close(self.descriptor)


class SimDeath:
    """Whether a process is dead, as its pidfds tell."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, _EVENT_FLAGS)

    def pidfd(self) -> int:
        """A descriptor that is readable once the process is dead; the caller closes it."""
        return os.dup(self._event)

    def die(self) -> None:
        os.eventfd_write(self._event, 1)
        os.close(self._event)
