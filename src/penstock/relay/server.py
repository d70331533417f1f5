"""The relay process: it moves bytes by NIXL between its engine's memory and a peer's.

It is a process of its own because an agent moves nothing while nobody calls it, and because every
process that had a UCX agent crashes in its last moments. One thread waits for its engine and for
UCX; an idle relay sleeps.

Each session is one landing area or one link, and has an agent of its own. The one rule: `CLOSED` is
sent after the agent of a session was destroyed, so that who reads it knows that nobody can write to
that memory any more.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.relay.agents import AgentError, NixlAgent
from penstock.relay.messages import (
    CLOSED,
    FAILED,
    FRAME_BYTES_MAX,
    NOTICE,
    READY,
    WRITE_ENDED,
    SessionReady,
    WriteReport,
    open_sessions,
    write_orders,
)
from penstock.transport.base import Empty
from penstock.transport.remote import POSTED_MAX
from penstock.transport.unix_sockets import Packet, receive_packet, send_packet

if TYPE_CHECKING:
    from penstock.relay.agents import Nixl
    from penstock.relay.messages import OpenSession, WriteOrder

logger = logging.getLogger(__name__)

WRITES_MAX = 32
"""Writes of a session that NIXL has at a time; each is asked for its end whenever UCX wakes us."""
SESSIONS_MAX = 1024
IDLE_S = 1.0
"""A look without a cause, while nothing is under way."""
BUSY_S = 0.005
"""The same while writes are under way, in case UCX holds something back."""
RDMA_S = 0.001
"""The same where arrivals may wake nobody, as long as something arrived in the last `HOT_S`."""
HOT_S = 0.5


class Session:
    """One agent, and the socket to the engine for it."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.agent: NixlAgent | None = None
        self.ended = False
        """Whether there is nothing left to do but to be forgotten."""
        self.active_at = 0.0
        self._opened: OpenSession | None = None
        self._outgoing: deque[bytes] = deque()
        self._orders: deque[WriteOrder] = deque()
        self._writes: dict[int, Any] = {}
        self._failed = False
        self._closing = False

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return bool(self._writes or self._orders)

    @property
    def descriptors(self) -> list[int]:
        return [] if self.agent is None else self.agent.descriptors

    def take(self, nixl: Nixl, now: float) -> None:
        """Takes what the engine sent."""
        while not self._closing:
            packet = receive_packet(self.channel, FRAME_BYTES_MAX)
            if isinstance(packet, Empty):
                return
            if not isinstance(packet, Packet) or packet.problem or not packet.frame:
                self._close()  # The engine has shut its end, or is gone.
                return
            try:
                self._on_packet(packet, nixl)
            except (msgspec.DecodeError, AgentError, OSError, ValueError) as error:
                self._fail(str(error))
            finally:
                for fd in packet.descriptors:
                    os.close(fd)
            self.active_at = now

    def _on_packet(self, packet: Packet, nixl: Nixl) -> None:
        if self._opened is not None:
            self._orders.append(write_orders.decode(packet.frame))
            return
        if not packet.descriptors:
            raise ValueError("a session was opened without memory")
        self._opened = opened = open_sessions.decode(packet.frame)
        self.agent = NixlAgent(nixl, packet.descriptors[0], opened.size)
        if opened.role == "source":
            self.agent.connect(opened.metadata)
        ready = SessionReady(self.agent.metadata, self.agent.address)
        self._outgoing.append(READY + msgspec.msgpack.encode(ready))

    def advance(self, now: float) -> None:
        """Lets NIXL move, and tells the engine what has come and what has ended."""
        if self.agent is not None and not self._failed:
            try:
                came = self.agent.advance()
                if came or self.is_busy:
                    self.active_at = now
                self._outgoing += [NOTICE + notice for notice in came]
                self._look_at_writes(self.agent)
                self._begin_writes(self.agent)
            except AgentError as error:
                self._fail(str(error))
        if len(self._outgoing) > 2 * POSTED_MAX:
            self._fail(f"{len(self._outgoing)} notices wait for the engine")
        self._send()

    def _look_at_writes(self, agent: NixlAgent) -> None:
        for number, handle in list(self._writes.items()):
            if agent.is_done(handle):
                del self._writes[number]
                self._report(number)

    def _begin_writes(self, agent: NixlAgent) -> None:
        assert self._opened is not None
        while self._orders and len(self._writes) < WRITES_MAX:
            order = self._orders[0]
            handle = agent.begin_write(order.ranges, self._opened.address, order.notice)
            self._orders.popleft()
            if handle is None:
                self._report(order.number)
            else:
                self._writes[order.number] = handle

    def _report(self, number: int) -> None:
        self._outgoing.append(WRITE_ENDED + msgspec.msgpack.encode(WriteReport(number, "")))

    def _fail(self, cause: str) -> None:
        """Writes may have ended half: the engine fails all of them, and closes the session."""
        if not self._failed:
            self._failed = True
            self._outgoing.append(FAILED + cause.encode()[:1024])

    def _send(self) -> None:
        try:
            while self._outgoing and send_packet(self.channel, self._outgoing[0]):
                self._outgoing.popleft()
        except OSError:
            self.destroy()
            self._outgoing.clear()
            self._closing = True
        if self._closing and not self._outgoing:
            self.ended = True
            self.channel.close()

    def _close(self) -> None:
        """Destroys the agent, and says so; what was not sent before is of no use any more."""
        self._closing = True
        self.destroy()
        self._outgoing = deque([CLOSED])

    @property
    def waits_for_room(self) -> bool:
        """Whether the engine has to take something before more can be sent."""
        return bool(self._outgoing)

    def destroy(self) -> None:
        """Ends the agent."""
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.close([*self._writes.values()])
        self._writes.clear()
        self._orders.clear()


class Relay:
    """All sessions of one engine's process."""

    def __init__(self, nixl: Nixl, main: socket.socket, stop: int, *, rdma: bool) -> None:
        self._nixl = nixl
        self._main = main
        self._stop = stop
        self._rdma = rdma
        self._sessions: dict[int, Session] = {}
        self._epoll = select.epoll()
        for fd in (main.fileno(), stop):
            self._epoll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Serves until the engine has closed the main connection, or `stop` is readable."""
        serves = True
        while serves:
            ready = {fd for fd, _ in self._epoll.poll(self._timeout_s())}
            serves = self._stop not in ready and self._take_main()
            now = time.monotonic()
            for fd, session in list(self._sessions.items()):
                self._serve(fd, session, now, came=fd in ready)
        for session in self._sessions.values():
            session.destroy()

    def _serve(self, fd: int, session: Session, now: float, *, came: bool) -> None:
        if came:
            before = {*session.descriptors}
            session.take(self._nixl, now)
            for new in {*session.descriptors} - before:
                self._epoll.register(new, select.EPOLLIN)
        waited = session.waits_for_room
        session.advance(now)
        if session.ended:
            # Closed descriptors have left the epoll by themselves.
            del self._sessions[fd]
        elif session.waits_for_room != waited:
            events = select.EPOLLIN | (select.EPOLLOUT if session.waits_for_room else 0)
            self._epoll.modify(fd, events)

    def _timeout_s(self) -> float:
        if any(session.is_busy for session in self._sessions.values()):
            return BUSY_S
        if self._rdma and self._sessions:
            latest = max(session.active_at for session in self._sessions.values())
            return RDMA_S if time.monotonic() < latest + HOT_S else BUSY_S
        return IDLE_S

    def _take_main(self) -> bool:
        """Takes new sessions; false once the engine is gone."""
        while True:
            packet = receive_packet(self._main, 1)
            if isinstance(packet, Empty):
                return True
            if not isinstance(packet, Packet):
                return False
            for fd in packet.descriptors:
                channel = socket.socket(fileno=fd)
                channel.settimeout(0)
                if len(self._sessions) >= SESSIONS_MAX:
                    channel.close()
                    continue
                self._sessions[fd] = Session(channel)
                self._epoll.register(fd, select.EPOLLIN)
