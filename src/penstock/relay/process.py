"""The relay of this process: its network interface; started, watched, asked for sessions.

Left to itself, UCX listens at one address of every interface of the machine, and takes memory
registrations from whoever connects there. `UCX_NET_DEVICES` names the interfaces that it may use:

| the engine or its rank listens at       | UCX may use                                            |
|-----------------------------------------|--------------------------------------------------------|
| `ipc://` or loopback, as do its peers   | `lo`                                                   |
| an address of this machine              | its interface, and cards for RDMA                      |
| neither: a rank that dials its peers    | the interface of the route to them, and cards for RDMA |
| every address (`0.0.0.0`, `::`)         | all of them                                            |

Cards for RDMA have no port that listens, and which of them is near a GPU, only UCX knows.

    relay = hold_relay(addresses)              a supervisor and a relay; waits until it is there
    session = relay.open_session(opened, fd)   one landing area or one link
    relay.poll()                               whenever `descriptor` is readable
    relay.release()                            the last who holds it ends it

A relay that has ended is started again. Its sessions have failed then; what used them opens others.

The rules:

- An address that belongs to no interface is an error, never a reason to listen on all.
- A session counts as closed only when its relay said so after it had destroyed the agent, or when
  the relay's process is seen dead. A relay that does not close a session in time is killed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import ConfigError, UnavailableError, install_hint
from penstock.relay.agents import ENVIRONMENT, is_installed
from penstock.relay.messages import CLOSED, FRAME_BYTES_MAX, NEW_SESSION
from penstock.supervisor.client import EmbeddedProcess
from penstock.supervisor.messages import ProcessSpec
from penstock.transport.base import Empty
from penstock.transport.machine_keys import host_of, is_local
from penstock.transport.remote import HandoffAddresses
from penstock.transport.shared_memory import is_hung_up, listen, pidfd_of_peer
from penstock.transport.unix_sockets import (
    Packet,
    channel_pair,
    receive_packet,
    send_packet,
    socket_peer,
)
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.relay.messages import OpenSession


Environment = tuple[tuple[str, str], ...]
"""Variables and their values."""

DEVICES = "UCX_NET_DEVICES"
LOOPBACK = "lo"
EVERYWHERE = {"0.0.0.0", "::", "*"}
_RDMA = Path("/sys/class/infiniband")
_PORT = 9
"""Of a datagram socket that sends nothing: it only asks which way a packet would take."""

_RTM_GETADDR, _RTM_NEWADDR, _NLMSG_DONE = 22, 20, 3
_NLM_F_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_MESSAGE = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBi")
_ATTRIBUTE = struct.Struct("=HH")
_RECEIVE_BYTES = 1 << 16


def ucx_environment(addresses: HandoffAddresses) -> Environment:
    """What keeps UCX to the interface of these addresses; an operator's own choice is left alone.

    Raises `UnavailableError`: they belong to no interface of this machine.
    """
    own = [each for each in addresses.own if each]
    if DEVICES in os.environ or (own[:1] and host_of(own[0]) in EVERYWHERE):
        return ()
    host = _local_host(own, addresses.peers)
    if not host:
        return ((DEVICES, LOOPBACK),)
    found = dict(addresses_of_this_machine())
    device = found.get(host)
    if device is None:
        raise UnavailableError(
            f"no relay for NIXL: {host} is no address of this machine, which has "
            f"{', '.join(sorted(found))}"
        )
    if device == LOOPBACK:
        return ((DEVICES, LOOPBACK), *_family(host))
    return ((DEVICES, ",".join([device, *_rdma_ports()])), *_family(host))


def _local_host(own: Sequence[str], peers: Sequence[str]) -> str:
    """The address of this machine that stands for the engine; empty: it is reached locally."""
    distant = [address for address in (*own, *peers) if not is_local(address)]
    if not distant:
        return ""
    known = dict(addresses_of_this_machine())
    for address in own:
        for host in () if is_local(address) else _resolved(host_of(address)):
            if host in known:
                return host
    # A rank that listens nowhere, on another machine than its scheduler.
    for address in reversed(distant):
        for host in _resolved(host_of(address)):
            if (source := _source_towards(host)) is not None:
                return source
    return host_of(distant[0])


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return []
    return [str(each[4][0]).partition("%")[0] for each in found]


def _source_towards(host: str) -> str | None:
    """The address from which this machine would send to a host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, _PORT))
        except OSError:
            return None
        return str(asking.getsockname()[0]).partition("%")[0]


def _family(host: str) -> Environment:
    """Which of an interface's addresses UCX listens at: by itself that of IPv4."""
    return (("UCX_TCP_AF_PRIO", "inet6,inet"),) if ip_address(host).version == 6 else ()


def _rdma_ports() -> list[str]:
    if not _RDMA.is_dir():
        return []
    return sorted(f"{port.parts[-3]}:{port.name}" for port in _RDMA.glob("*/ports/*"))


def addresses_of_this_machine() -> Iterator[tuple[str, str]]:
    """Each address of an interface, with the interface's name; the kernel is asked for them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as asking:
        asking.settimeout(10.0)
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        length = _MESSAGE.size + len(request)
        asking.send(_MESSAGE.pack(length, _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        while True:
            received = asking.recv(_RECEIVE_BYTES)
            while received:
                length, kind, *_ = _MESSAGE.unpack_from(received)
                if kind == _NLMSG_DONE or length < _MESSAGE.size:
                    return
                if kind == _RTM_NEWADDR:
                    yield from _address_in(received[_MESSAGE.size : length])
                received = received[_aligned(length) :]


def _address_in(message: bytes) -> Iterator[tuple[str, str]]:
    _, _, _, _, index = _ADDRESS.unpack_from(message)
    rest, found = message[_ADDRESS.size :], {}
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_aligned(length) :]
    # Of a link between two ends, the other kind is the address of the other end.
    packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if packed:
        yield str(ip_address(packed)), socket.if_indextoname(index)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


logger = logging.getLogger(__name__)

MODULE = "penstock.relay"
START_S = 60.0
"""A relay takes two seconds to load NIXL; a busy machine takes longer."""
STOP_S = 5.0
CLOSE_S = 5.0
"""An agent is destroyed in some milliseconds; a relay that takes longer is killed."""
FRAMES_AT_ONCE = 256
"""Frames of one session that are taken before the others have their turn."""


def require_nixl(place: str = "transport") -> None:
    """Refuses to go on where NIXL is not installed.

    Raises:
        ConfigError: it is not; `place` is the setting that asks for it.
    """
    if not is_installed():
        raise ConfigError(
            place, f"is 'nixl', which needs NIXL on this machine: {install_hint('nixl')}"
        )


class RelaySession:
    """One landing area or one link, as this process sees it."""

    def __init__(self, channel: socket.socket, pidfd: int) -> None:
        self._channel = channel
        self._pidfd = pidfd
        """Of the relay's process, in this life of it."""
        self._said_closed = False
        self.lost = False
        """Whether nothing more will come."""
        self.close_deadline: float | None = None

    @property
    def descriptor(self) -> int:
        """Readable when there are frames to take."""
        return self._channel.fileno()

    def send(self, frame: bytes, fd: int | None = None) -> bool:
        """Sends a frame; false if there is no room now.

        Raises:
            OSError: the relay is gone.
        """
        return send_packet(self._channel, frame, fd)

    def frames(self) -> list[bytes]:
        """What the relay has sent, some of it at a time; never waits."""
        found: list[bytes] = []
        while not self.lost and len(found) < FRAMES_AT_ONCE:
            packet = receive_packet(self._channel, FRAME_BYTES_MAX)
            if isinstance(packet, Empty):
                break
            if not isinstance(packet, Packet) or not packet.frame:
                self.lost = True
            elif packet.frame == CLOSED:
                self._said_closed = self.lost = True
            else:
                found.append(packet.frame)
        return found

    def begin_close(self) -> None:
        """Asks the relay to destroy the agent; `is_closed` says when it has."""
        if self.close_deadline is None:
            self.close_deadline = time.monotonic() + CLOSE_S
            with suppress(OSError):  # It is gone already.
                self._channel.shutdown(socket.SHUT_WR)

    @property
    def is_closed(self) -> bool:
        """Whether nobody can reach the memory any more through this session."""
        if not self._said_closed:
            while self.frames():
                pass
        return self._said_closed or wait_readable(self._pidfd, deadline=0.0)

    def forget(self) -> None:
        """Closes what this process has of it."""
        if self._channel.fileno() >= 0:
            self._channel.close()
            os.close(self._pidfd)


class RelayProcess:
    """A relay of this process. It belongs to one thread.

    Args:
        environment: keeps UCX to a network interface, see `ucx_environment`.

    Raises:
        ConfigError: NIXL is not installed.
        UnavailableError: the relay does not start.
    """

    def __init__(self, environment: Environment) -> None:
        require_nixl()
        self._listener, self._path = listen()
        self._connection: socket.socket | None = None
        self._pidfd = -1
        self._closing: list[RelaySession] = []
        self._holds = 1
        self._epoll = select.epoll()
        spec = ProcessSpec(
            name="relay",
            module=MODULE,
            arguments=(str(self._path),),
            environment=(*ENVIRONMENT, *environment),
            stop_s=STOP_S,
        )
        self._process = EmbeddedProcess(spec)
        for fd in (self._listener.fileno(), self._process.descriptor):
            self._epoll.register(fd, select.EPOLLIN)
        self._wait_started(time.monotonic() + START_S)

    @property
    def descriptor(self) -> int:
        """Readable when `poll` has something to do; `sessions` have descriptors of their own."""
        return self._epoll.fileno()

    @property
    def pid(self) -> int | None:
        """The relay's process id, while there is one."""
        if self._connection is None:
            return None
        return socket_peer(self._connection).pid

    def poll(self) -> None:
        """Notices a relay that has come or gone, and starts one where there is none."""
        now = time.monotonic()
        # It is called for every part; nothing of this happens while the relay just works.
        if self._connection is None or self._epoll.poll(0):
            self._process.poll()
            if self._connection is not None and is_hung_up(self._connection):
                self._drop_connection()
            self._accept()
            if self._connection is None:
                self._process.start(now)
        for session in list(self._closing):
            if session.is_closed:
                self._closing.remove(session)
                session.forget()
        self.kill_overdue(self._closing, now)

    def open_session(self, opened: OpenSession, fd: int) -> RelaySession:
        """Begins a session over the memory behind `fd`.

        Raises:
            UnavailableError: there is no relay now.
        """
        self.poll()
        if self._connection is None:
            why = self._process.why or "it is starting"
            raise UnavailableError(f"no relay for NIXL: {why}")
        ours, theirs = channel_pair()
        session = RelaySession(ours, os.dup(self._pidfd))
        try:
            with theirs:
                taken = send_packet(self._connection, NEW_SESSION, theirs.fileno())
            problem = "" if taken else "it takes nothing at the moment"
            session.send(msgspec.msgpack.encode(opened), fd)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            session.forget()
            raise UnavailableError(f"no relay for NIXL: {problem}")
        return session

    def close_later(self, session: RelaySession) -> None:
        """Closes a session that nobody waits for."""
        session.begin_close()
        self._closing.append(session)

    def kill_overdue(self, sessions: list[RelaySession], now: float) -> None:
        """Kills the relay if it has not closed one of its sessions in time."""
        late = [each.close_deadline for each in sessions if each.close_deadline is not None]
        if late and min(late) <= now and self._pidfd >= 0:
            logger.warning("relay killed: it has not closed a session in %s s", CLOSE_S)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def release(self) -> None:
        """Ends the relay, if nobody else holds it."""
        self._holds -= 1
        if not self._holds:
            for key in [key for key, relay in _held.items() if relay is self]:
                del _held[key]
            self.close()

    def hold(self) -> None:
        """Another one uses it, and will release it."""
        self._holds += 1

    def close(self) -> None:
        """Ends the relay and its supervisor."""
        self._drop_connection()
        self._process.close(time.monotonic() + 2 * STOP_S)
        for session in self._closing:
            session.forget()
        self._closing.clear()
        self._epoll.close()
        self._give_up_sockets()

    def _wait_started(self, deadline: float) -> None:
        while True:
            self.poll()
            if self.pid is not None:
                return
            if self._process.why or time.monotonic() >= deadline:
                why = self._process.why or f"it has not started in {START_S:g} s"
                self.close()
                raise UnavailableError(f"no relay for NIXL: {why}")
            wait_readable(self.descriptor, deadline)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection.settimeout(0)
        if socket_peer(connection).uid != os.getuid():
            connection.close()
            return
        try:
            pidfd = pidfd_of_peer(connection)
        except UnavailableError:
            connection.close()
            return
        self._drop_connection()
        self._connection, self._pidfd = connection, pidfd
        self._epoll.register(connection, select.EPOLLIN)
        self._process.note_success()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            os.close(self._pidfd)
            self._connection, self._pidfd = None, -1

    def _give_up_sockets(self) -> None:
        self._listener.close()
        self._path.unlink(missing_ok=True)


_held: dict[tuple[int, int, Environment], RelayProcess] = {}
"""The relays that targets and writers of a thread share, one for each network interface, by the
process and thread: a fork has none."""


def hold_relay(addresses: HandoffAddresses | None = None) -> RelayProcess:
    """The relay of this thread for some addresses, started if there is none.

    `release` gives it back.

    Args:
        addresses: whose network interface it uses; left out, it is reached on this machine only.

    Raises:
        ConfigError: NIXL is not installed.
        UnavailableError: the relay does not start, or the addresses are on no interface.
    """
    environment = ucx_environment(addresses or HandoffAddresses())
    key = os.getpid(), get_ident(), environment
    held = _held.get(key)
    if held is not None:
        held.hold()
        return held
    _held[key] = relay = RelayProcess(environment)
    return relay
