"""Clients of the store process: a session, a rank's offer of its arena, a process of one's own.

    session = StoreSession(path)
    for news in session.poll(now): …            # whenever `descriptor` is readable, or at `alarm`
    session.send(frame)

The one rule: a session counts as ended for good only when its process was seen dead. A process
that closed the connection may still read and write arenas; `Disconnected.dead` tells them apart,
and a connection to another process is not made before the last one is dead.

    offer = ArenaOffer(socket, host, form=form, part=part)
    offer.poll()                            # whenever `descriptor` is readable, and at `alarm`

It has a session of its own beside the engine's (`StoreLink`): ranks in other processes each offer
theirs. The store maps the arena while that session lasts.

What starts it again is `penstock.supervisor.client`; here is what it runs, and what its exit
status says about its folder.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import PeerError, UnavailableError
from penstock.logs import is_json, level_asked_for
from penstock.store.process.messages import (
    BUSY,
    FOLDER_FAILED,
    FRAME_BYTES_MAX,
    ArenaMapped,
    ArenaOffered,
    SessionRefused,
    answers,
    arena_name,
    requests,
)
from penstock.store.process.sessions import connect_store
from penstock.supervisor.client import EmbeddedProcess
from penstock.supervisor.descriptors import close_all
from penstock.supervisor.messages import ProcessSpec
from penstock.transport.base import ChannelFailed, Empty
from penstock.transport.unix_sockets import Packet, receive_packet, send_packet
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.store.process.messages import AnyStoreAnswer, StoreConfig
    from penstock.store.process.sessions import StoreConnection
    from penstock.supervisor.messages import ProcessExited
    from penstock.tiers.host import HostTier
    from penstock.vocabulary.form import Form


RETRY_S = 0.1
RETRY_MAX_S = 5.0
"""Before the next session with a process that ended the last one; doubled each time."""
NOBODY_S = 0.2
"""Before the next try where nobody listens: it costs microseconds, and the tiers of a process that
was just started wait for it."""
PACKETS_MAX = 256
"""Packets that one poll reads, so that it ends."""


class Connected(NamedTuple):
    """A session has begun: say what it is for."""


class Disconnected(NamedTuple):
    """A session has ended, or its process has."""

    why: str
    dead: bool
    """Whether the process was seen dead."""


class NobodyListens(NamedTuple):
    """There is no store process."""


class CannotConnect(NamedTuple):
    """There is something at the socket's path, and no way to a process behind it."""

    why: str


SessionNews = Connected | Disconnected | NobodyListens | CannotConnect | list["AnyStoreAnswer"]


class StoreSession:
    """The client's end of a session. It belongs to one thread, and nothing here waits."""

    def __init__(
        self,
        path: Path,
        *,
        connect: Callable[[Path], StoreConnection | None] = connect_store,
    ) -> None:
        self.path = path
        self._open_connection = connect
        self.alarm: float | None = 0.0
        """When to poll, though `descriptor` is silent: to connect again."""
        self.why = "it was not reached yet"
        """Why there is no session."""
        self._pause_s = RETRY_S
        self._connection: StoreConnection | None = None
        self._last: StoreConnection | None = None
        """The connection that was lost to a process that lives; its channel is closed."""
        self._frames: deque[tuple[bytes, int | None]] = deque()
        self._waits_for_room = False
        self._epoll = select.epoll()

    @property
    def descriptor(self) -> int:
        """Readable when there may be news."""
        return self._epoll.fileno()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def watch(self, fd: int) -> None:
        """Makes `descriptor` readable as well when `fd` is."""
        self._epoll.register(fd, select.EPOLLIN)

    def is_ready(self, now: float) -> bool:
        """Whether `poll` may find something."""
        if self._epoll.closed:
            return False
        return (self.alarm is not None and now >= self.alarm) or bool(self._epoll.poll(0))

    def send(self, frame: bytes, fd: int | None = None) -> None:
        """Sends a frame as soon as there is room; goes nowhere without a session."""
        if self._connection is not None:
            self._frames.append((frame, fd))
            self._send_frames(self._connection)

    def keep_trying_soon(self) -> None:
        """The session works: the next pause is a short one."""
        self._pause_s = RETRY_S

    def poll(self, now: float) -> list[SessionNews]:
        """What has happened since the last call."""
        news: list[SessionNews] = []
        if not self.is_ready(now):
            return news  # Most steps of an engine find nothing.
        if self._connection is None and self.alarm is not None and now >= self.alarm:
            self._connect(now, news)
        if self._connection is not None:
            self._exchange(self._connection, now, news)
        elif self._last is not None and wait_readable(self._last.pidfd, deadline=0.0):
            self._lose_last(news)
        return news

    def end(self, why: str, now: float) -> list[SessionNews]:
        """Ends the session, if there is one, to begin another at once."""
        news: list[SessionNews] = []
        if self._connection is not None:
            self._lose(why, now, news)
            self.alarm = now
        return news

    def _connect(self, now: float, news: list[SessionNews]) -> None:
        try:
            found = self._open_connection(self.path)
        except UnavailableError as error:
            self.why = str(error)
            self._pause(now)
            if self._last is None:
                news.append(CannotConnect(self.why))
            return
        if found is None:
            self.alarm = now + NOBODY_S
            self.why = f"nobody listens at {self.path}"
            if self._last is None:
                news.append(NobodyListens())
            return
        last = self._last
        if last is not None and (last.pid != found.pid or wait_readable(last.pidfd, deadline=0.0)):
            # The last process must be dead first: it may still use the arenas.
            self.why = f"the process {last.pid} that served {self.path} has not ended yet"
            _close(found)
            self._pause(now)
            return
        if last is not None:
            self._epoll.unregister(last.pidfd)
            os.close(last.pidfd)
            self._last = None
        self._connection = found
        self._pause(now)
        self.alarm = None
        self.why = ""
        self._epoll.register(found.channel.fileno(), select.EPOLLIN)
        self._epoll.register(found.pidfd, select.EPOLLIN)
        news.append(Connected())

    def _pause(self, now: float) -> None:
        self.alarm = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)

    def drop(self, why: str, now: float) -> list[SessionNews]:
        """Ends a session with a process that cannot be understood."""
        news: list[SessionNews] = []
        if self._connection is not None:
            self._lose(f"it cannot be understood: {why}", now, news)
        return news

    def _exchange(self, connection: StoreConnection, now: float, news: list[SessionNews]) -> None:
        for _ in range(PACKETS_MAX):
            packet = receive_packet(connection.channel, FRAME_BYTES_MAX)
            if isinstance(packet, ChannelFailed):  # What was sent before the end is still there.
                packet = receive_packet(connection.channel, FRAME_BYTES_MAX)
            if isinstance(packet, Empty):
                break
            if not isinstance(packet, Packet):
                self._lose("it has ended the session", now, news)
                return
            close_all(packet.descriptors)
            try:
                batch = answers.decode(packet.frame)
            except PeerError as error:
                self._lose(f"it cannot be understood: {packet.problem or error}", now, news)
                return
            news.append(batch)
            if batch and isinstance(batch[-1], SessionRefused):
                self._lose(batch[-1].why, now, news)
                return
        if wait_readable(connection.pidfd, deadline=0.0):
            self._lose("", now, news)
        else:
            self._send_frames(connection)

    def _send_frames(self, connection: StoreConnection) -> None:
        try:
            while self._frames and send_packet(connection.channel, *self._frames[0]):
                self._frames.popleft()
        except OSError:
            self._frames.clear()  # The next poll finds out why.
        if bool(self._frames) != self._waits_for_room:
            self._waits_for_room = bool(self._frames)
            events = select.EPOLLIN | select.EPOLLOUT if self._frames else select.EPOLLIN
            self._epoll.modify(connection.channel.fileno(), events)

    def _lose(self, why: str, now: float, news: list[SessionNews]) -> None:
        """Ends the session; its process is watched until it is dead or takes the next one."""
        connection = self._connection
        assert connection is not None
        self._connection = None
        self._frames.clear()
        self._waits_for_room = False
        self._epoll.unregister(connection.channel.fileno())
        connection.channel.close()
        self._last = connection
        self.alarm = now + self._pause_s
        if wait_readable(connection.pidfd, deadline=0.0):
            self._lose_last(news)
        else:
            self.why = f"the store process {connection.pid}: {why}"
            news.append(Disconnected(self.why, dead=False))

    def _lose_last(self, news: list[SessionNews]) -> None:
        last = self._last
        assert last is not None
        self._last = None
        self._epoll.unregister(last.pidfd)
        os.close(last.pidfd)
        self.why = f"the store process {last.pid} has ended"
        news.append(Disconnected(self.why, dead=True))

    def close(self) -> None:
        """Ends the session; nothing else is called after this."""
        self._epoll.close()
        if self._connection is not None:
            _close(self._connection)
        if self._last is not None:
            os.close(self._last.pidfd)
        self._connection = self._last = None
        self.alarm = None


def _close(connection: StoreConnection) -> None:
    connection.channel.close()
    os.close(connection.pidfd)


class ArenaOffer:
    """Offers the hub of a rank to the store process, for as long as it is open.

    It belongs to one thread, and nothing here waits: call `poll` whenever `descriptor` is
    readable, and at `alarm`.
    """

    def __init__(
        self,
        socket: str,
        host: HostTier,
        *,
        form: Form,
        part: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = arena_name(host.arena.fd)
        """What the owner calls it."""
        self.mapped = False
        """Whether the store process has mapped it, as far as `poll` has seen."""
        self._fd = host.arena.fd
        offered = ArenaOffered(self.name, host.slot_count, form.to_bytes(), part)
        self._frame = requests.encode([offered])
        self._session = StoreSession(Path(socket))
        self._clock = clock
        self._closed = False

    @property
    def descriptor(self) -> int:
        return self._session.descriptor

    @property
    def alarm(self) -> float | None:
        return self._session.alarm

    def poll(self) -> None:
        """Connects where that is due, and takes what the store process says."""
        for news in self._session.poll(self._clock()):
            match news:
                case Connected():
                    self._session.send(self._frame, self._fd)
                case Disconnected():
                    self.mapped = False
                case NobodyListens() | CannotConnect():
                    pass
                case _:
                    if any(isinstance(each, ArenaMapped) for each in news):
                        self.mapped = True
                        self._session.keep_trying_soon()

    def close(self) -> None:
        """Withdraws the arena; the process unmaps it once no job uses it."""
        if not self._closed:
            self._closed = True
            self._session.close()


MODULE = "penstock.store"
PROCESS = "store"
STARTING = "the store process is starting"
"""Why there is no store yet."""
STOP_S = 10.0
"""From SIGTERM to SIGKILL: longer than the tiers have to end what is in hand."""


class EmbeddedStore(EmbeddedProcess):
    """The store process of one engine. It belongs to one thread."""

    def __init__(self, config: StoreConfig, module: str) -> None:
        self._folder = Path(config.socket).parent
        config = msgspec.structs.replace(config, log_level=level_asked_for(), log_json=is_json())
        super().__init__(
            ProcessSpec(name=PROCESS, module=module, arguments=(config.to_json(),), stop_s=STOP_S)
        )

    def _why_ended(self, exited: ProcessExited) -> str:
        if exited.code == BUSY:
            return self.why  # Nothing is wrong: that of another engine serves.
        if exited.code is not None and exited.code > FOLDER_FAILED:
            problem = os.strerror(exited.code - FOLDER_FAILED)
            return f"folder {self._folder} cannot be used: {problem}"
        return super()._why_ended(exited)
