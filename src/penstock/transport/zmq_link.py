"""The two ZeroMQ connections of a channel, and what its ends say to each other, as bytes.

    hello, welcome, refusal    magic (8 bytes), version (1), msgpack map
    everything after           kind (1), incarnation of its sender (8), sequence (8), payload

The first two lines go between a dialling end and a listener, once; the last between the two
ends of the channel that came of it. Numbers are little-endian.

The one rule: nothing that arrives is believed. What is not exactly one of these is refused by
`WireError`, whose `reason` is a word to count by.

    link (PAIR)        the messages ──────────────────┐
    pulse (DEALER)     heartbeats, and nothing else ──┼── epoll: one descriptor for all
    their monitors     what became of each ───────────┘

Connections are made once, so what is lost stays lost, and what arrives comes from the one that
was made. When a peer dies, the kernel reports it at once, and its link is lost; of one that is
stopped, or unreachable, the pulse is lost.

Two rules. Messages are read after the monitor: ZeroMQ hands over the last messages of a
connection before it reports the connection's end, so none of them is overlooked. And no socket
has a receive limit (`RCVHWM`): when a queue is full, libzmq (4.3.5) stops reading that connection,
and if it then ends, the next heartbeat, its own or a PING of the other side, aborts the whole
process (`Assertion failed: !_io_error`). What keeps queues short is that nobody gets in who was not
invited: connections over ipc are of this user only, those over tcp and every pulse need a key that
only an invited peer has (CURVE), and a peer that sends more than its window is dropped.

`Dialling` is the first half of a dialled channel: a hello to a listener, and its answer. The answer
decides where the channel goes, so only the kind of address that was dialled is accepted in it, and
for tcp only the host that was dialled.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import resource
import select
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from hashlib import blake2b
from pathlib import Path
from socket import if_nameindex
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from penstock.errors import PeerError, PenstockError, UnavailableError
from penstock.transport.base import FRAME_BYTES_MAX
from penstock.transport.machine_keys import MachineKeys, host_of, is_name, require_curve
from penstock.transport.unix_sockets import private_folder, socket_path
from penstock.vocabulary.frames import FrameCodec, FrameVersionError

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from penstock.transport.machine_keys import Secret


MAGIC = b"PENSTOCK"
VERSION = 2
HELLO_BYTES_MAX = 1024
NAME_LENGTH_MAX = 100
WINDOW_FRAMES_MAX = 1 << 20
WINDOW_BYTES_MAX = 1 << 32

_HEADER = struct.Struct("<BQQ")
HEADER_BYTES = _HEADER.size
_CREDIT = struct.Struct("<QQ")

Incarnation = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no number of more than 64 bits.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Key = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]{40}$")]  # 32 bytes in Z85.


class RefusalReason(Enum):
    """Why something that arrived was thrown away."""

    GARBAGE = "garbage"
    """It is not one of our messages."""
    VERSION = "version"
    """It is, in another version of the protocol."""
    STALE = "stale"
    """It is from another life than the one this channel goes to."""
    REPLAYED = "replayed"
    """It arrived before."""
    TAKEN = "taken"
    """Its name is that of a peer that is here and alive."""
    CROWDED = "crowded"
    """More peers are being let in at once than a listener is willing to remember."""
    NO_PORT = "no_port"
    """All ports that a listener may use are in use."""
    UNKNOWN_KEY = "unknown_key"
    """A peer whose key is not listed; its connection was broken off."""


class WireError(PenstockError):
    """Something arrived that is not what may arrive here."""

    def __init__(self, reason: RefusalReason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class Kind(IntEnum):
    """What a frame between two ends is for."""

    OPEN = 1
    """The first one, of the end that dialled."""
    FRAME = 2
    """The payload is a frame of the caller."""
    CREDIT = 3
    """The payload says how much of what was sent has been taken so far."""
    CLOSE = 4
    """The last one: nothing more will come."""


_KINDS = {kind.value: kind for kind in Kind}


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much an end lets the other send before it has taken any of it."""

    frames: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_FRAMES_MAX)]
    frame_bytes: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_BYTES_MAX)]


class ChannelHello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """What an end that dials says first."""

    name: Name
    incarnation: Incarnation
    window: Window


class ChannelWelcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """What a listener answers: where the channel is, and who is at its other end."""

    name: Name
    incarnation: Incarnation
    window: Window
    link: Address
    """Where the channel's messages go."""
    pulse: Address
    """Where its heartbeats go."""
    key: Key
    """The public key of both, without which they let nobody in."""


class ChannelRefusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """What a listener answers when it does not let somebody in."""

    cause: Annotated[str, msgspec.Meta(max_length=300)]
    taken: bool = False
    """Whether it is the name alone, which may be free later."""


Greeting = ChannelHello | ChannelWelcome | ChannelRefusal
_greetings: FrameCodec[Greeting] = FrameCodec(
    msgspec.msgpack.Decoder(Greeting),
    version=VERSION,
    bytes_max=HELLO_BYTES_MAX,
    mark=MAGIC,
    name="greeting",
)


class Frame(NamedTuple):
    """A frame between two ends, taken apart."""

    kind: Kind
    incarnation: int
    sequence: int
    payload: bytes


def require_name(name: str) -> None:
    """Refuses a name that the other end would refuse."""
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise ValueError(
            f"name is {name[:NAME_LENGTH_MAX]!r}, of {len(name)} characters, must have from 1 to "
            f"{NAME_LENGTH_MAX}"
        )


def encode_greeting(greeting: Greeting) -> bytes:
    """The bytes of a hello, a welcome or a refusal."""
    return _greetings.encode(greeting)


def decode_greeting(message: bytes) -> Greeting:
    """What `encode_greeting` wrote, or a `WireError`."""
    try:
        return _greetings.decode(message)
    except FrameVersionError as error:
        raise WireError(RefusalReason.VERSION, str(error)) from error
    except PeerError as error:
        raise WireError(RefusalReason.GARBAGE, str(error)) from error


def encode_frame(kind: Kind, incarnation: int, sequence: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, incarnation, sequence) + payload


def decode_frame(message: bytes) -> Frame:
    """What `encode_frame` wrote, or a `WireError`."""
    if len(message) < HEADER_BYTES:
        raise WireError(
            RefusalReason.GARBAGE, f"frame has {len(message)} bytes, a header has {HEADER_BYTES}"
        )
    number, incarnation, sequence = _HEADER.unpack_from(message)
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(RefusalReason.GARBAGE, f"frame is of kind {number}, which there is not")
    length = len(message) - HEADER_BYTES
    expected = {Kind.FRAME: length, Kind.CREDIT: _CREDIT.size}.get(kind, 0)
    if length != expected:
        raise WireError(
            RefusalReason.GARBAGE,
            f"frame of kind {kind.name} has {length} bytes, {expected} belong there",
        )
    return Frame(kind, incarnation, sequence, message[HEADER_BYTES:])


def encode_credit(frames: int, frame_bytes: int) -> bytes:
    """How many frames, of how many bytes together, were taken since the channel was made."""
    return _CREDIT.pack(frames, frame_bytes)


def decode_credit(payload: bytes) -> tuple[int, int]:
    """What `encode_credit` wrote."""
    frames, frame_bytes = _CREDIT.unpack(payload)
    return frames, frame_bytes


Socket: TypeAlias = zmq.Socket[bytes]

SOCKETS_MAX = 4096
"""A channel takes six: link and pulse, and for each the two ends of its monitor."""
CONTROL_FRAMES = 64
"""Room beside the window for what is not the caller's: opening, credit and closing."""
DESCRIPTORS = 4096
"""Files that a process may have open before the kernel's table of them has to grow."""
SECRET_BYTES_MIN = 16
RETRY_S, RETRY_MAX_S = 0.1, 2.0
"""A listener that is not there, or breaks off, is tried again after the first, then after twice as
long each time, up to the second."""
HERE_RETRY_S, HERE_RETRY_MAX_S = 0.01, 0.2
"""The same on one machine, where an attempt costs microseconds, and who listens often comes a
moment later."""
CONNECT_S = 4.0
"""The timeout of one attempt over tcp. The kernel's own is two minutes, with ever longer pauses:
after a cut it would find the other end much later than it could."""
CURVE_BYTES = 33
"""What encryption adds to a message on the wire."""

_NEVER_MS = 3_600_000
"""No connection is made twice; a link is closed long before. (The value that means never has
ZeroMQ drop messages that had arrived when the connection was lost.)"""

_EVENTS = (
    zmq.Event.ACCEPTED
    | zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
)

_contexts: dict[int, zmq.Context[Socket]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSettings:
    """How long ends wait for each other, and how much they keep for each other."""

    heartbeat_s: float = 1.0
    """How often an end that receives nothing asks whether the other is there."""
    silence_s: float = 5.0
    """A peer that does not answer for this long is lost: found within `heartbeat_s + silence_s +
    settle_s` of its last sign of life."""
    open_s: float = 10.0
    """A channel that is not open by then has failed."""
    settle_s: float = 0.2
    """How long to wait for what is on its way when the pulse is lost but not the link."""
    linger_s: float = 1.0
    """What was sent before `close` is kept for delivery no longer than this."""
    window_frames: int = 1024
    """How many frames the other end may send before any of them is taken."""
    window_bytes: int = 4 * FRAME_BYTES_MAX
    """How many bytes these frames may have together."""
    ports: range = range(0)
    """Where a listener on tcp lets peers in, two ports for each; empty: the kernel chooses."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.heartbeat_s <= self.silence_s <= 3600:
            raise ValueError(
                f"heartbeat_s is {self.heartbeat_s} and silence_s {self.silence_s}, need "
                "0.01 <= heartbeat_s <= silence_s <= 3600"
            )
        for field, value in (
            ("open_s", self.open_s),
            ("settle_s", self.settle_s),
            ("linger_s", self.linger_s),
        ):
            if not 0 < value <= 3600:
                raise ValueError(f"{field} is {value}, must be more than 0 and at most 3600")
        if not 2 <= self.window_frames <= WINDOW_FRAMES_MAX:
            raise ValueError(
                f"window_frames is {self.window_frames}, must be from 2 to {WINDOW_FRAMES_MAX}"
            )
        if not 2 * FRAME_BYTES_MAX <= self.window_bytes <= WINDOW_BYTES_MAX:
            raise ValueError(
                f"window_bytes is {self.window_bytes}, must be from {2 * FRAME_BYTES_MAX}, twice "
                f"the longest frame, to {WINDOW_BYTES_MAX}"
            )


def context() -> zmq.Context[Socket]:
    """The ZeroMQ context of this process; after a fork, another one.

    At the end of the process it waits for last messages, for as long as their sockets linger.
    """
    found = _contexts.get(os.getpid())
    if found is None:
        _make_room_for_descriptors()
        found = _contexts[os.getpid()] = zmq.Context()
        found.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        atexit.register(found.destroy)
    return found


def _make_room_for_descriptors() -> None:
    """Has the kernel make the table of this process's open files as large as it may ever need.

    The table doubles when it is full, and in a process with threads the one that opens the file
    then sleeps until every core has been through the scheduler (`synchronize_rcu`). Where others
    spin on all cores, as vLLM's workers do, that took 15 s: in the midst of opening a pair.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = (DESCRIPTORS if limit == resource.RLIM_INFINITY else min(DESCRIPTORS, limit)) - 1
    # Who may open no file any more is told so by the socket that is made next.
    with suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, last))


class Keys(NamedTuple):
    """A pair of CURVE keys, as ZeroMQ writes them. Who knows the public one may connect."""

    public: bytes
    private: bytes


def new_keys() -> Keys:
    """Keys for the connections of one channel.

    Raises:
        UnavailableError: this build of libzmq has no CURVE.
    """
    require_curve()
    return Keys(*zmq.curve_keypair())


def keys_from(secret: Secret) -> Keys:
    """The keys of a listener: those of its machine, or of all that have the same secret."""
    if isinstance(secret, MachineKeys):
        return Keys(secret.public_z85, secret.private_z85)
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(
            f"secret has {len(secret)} bytes, must have at least {SECRET_BYTES_MIN}, or none"
        )
    require_curve()
    digest = blake2b(secret, digest_size=32, person=b"penstock lobby").digest()
    private = z85.encode(digest)
    return Keys(zmq.curve_public(private), private)


def admit_only(socket: Socket, keys: Keys) -> None:
    """Has a socket that will be bound break off with all that do not know the public key."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.private)


def knock_with(socket: Socket, public: bytes, own: Keys | None = None) -> None:
    """Has a socket that will connect do so only with an end that has the private key.

    Args:
        socket: The socket.
        public: The key of the other end.
        own: By which the other end knows this one, if it asks for it.
    """
    own = own or new_keys()
    socket.setsockopt(zmq.CURVE_SERVERKEY, public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.private)


def new_socket(
    kind: zmq.SocketType, *, bytes_max: int, within: zmq.Context[Socket] | None = None
) -> Socket:
    """A socket with the bounds that all of ours have; see the module for why it has no others."""
    socket = (within or context()).socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, bytes_max)
    socket.setsockopt(zmq.RCVHWM, 0)
    # Over ipc, only processes of this user are let in; for tcp it means nothing.
    socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    return socket


def private_address(near: str) -> str:
    """A new address to bind to, of the kind of `near`, that nobody else has.

    For ipc it is a path in the folder of `near`, or in the private folder of this process if
    `near` names none; for tcp a port that the kernel chooses.
    """
    if not near.startswith("ipc://"):
        host, _, _ = near.rpartition(":")
        return f"{host}:*"
    path = near.removeprefix("ipc://")
    folder = Path(path).parent if path.startswith("/") else private_folder()
    return f"ipc://{socket_path(folder)}"


def bind_within(socket: Socket, address: str, ports: range) -> str:
    """Binds a socket; returns its address. `*` for a port means one of `ports`, if there are any.

    Raises:
        UnavailableError: the address cannot be listened on, or all ports are in use.
    """
    host, colon, port = address.rpartition(":")
    chosen = ports if address.startswith("tcp://") and port == "*" else ()
    for each in [f"{host}{colon}{number}" for number in chosen] or [address]:
        try:
            socket.bind(each)
        except zmq.ZMQError as error:
            if not chosen or error.errno != zmq.EADDRINUSE:
                raise UnavailableError(f"cannot listen on {each}: {error.strerror}") from error
        else:
            return _as_named(address, socket.getsockopt_string(zmq.LAST_ENDPOINT))
    raise UnavailableError(
        f"cannot listen on {host}: all of the ports {ports.start}-{ports.stop - 1} are in use; "
        "each connection takes two"
    )


def _as_named(asked: str, bound: str) -> str:
    """The address of a socket, with the name of the machine if it was asked for by one.

    Peers look keys up by what they dial, and a name outlives its IP address (in Kubernetes, that of
    each pod). Loopback stays an IP address: `localhost` may lead elsewhere in the peer.
    """
    name = host_of(asked)
    networks = {network for _, network in if_nameindex()}
    if not asked.startswith("tcp://") or not is_name(name) or name in networks:
        return bound
    return f"tcp://{name}:{bound.rpartition(':')[2]}"


class MonitoredSocket:
    """A socket for one peer, with the monitor that says what became of the connection."""

    def __init__(self, kind: zmq.SocketType, settings: ChannelSettings, *, bytes_max: int) -> None:
        self._socket: Socket = new_socket(kind, bytes_max=bytes_max)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(settings.open_s))
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._monitor: Socket = self._socket.get_monitor_socket(_EVENTS)
        self._ports = settings.ports
        self.binds = False
        """Whether it is this end that waits for the connection."""
        self._connections: set[int] = set()
        self.connected = False
        """Whether there ever was a connection."""
        self.greeted = False
        """Whether the other end ever answered on it; the kernel connects to who is stopped, too."""
        self.lost = False
        """Whether the connection that there was is gone."""
        self.refused = False
        """Whether nobody was there to connect to."""

    def bind(self, address: str, keys: Keys) -> str:
        """Waits for a peer at an address; returns it as the peer has to call it.

        Raises:
            UnavailableError: it cannot be listened on, or has no free port.
        """
        if self._is_locked(address):
            admit_only(self._socket, keys)
        # It stays bound: ZeroMQ would end the connections of an address with it.
        bound = bind_within(self._socket, address, self._ports)
        self.binds = True
        return bound

    def connect(self, address: str, key: bytes) -> None:
        """Begins to connect to a peer that is bound, and that has the private half of `key`."""
        if self._is_locked(address):
            knock_with(self._socket, key)
        self._socket.connect(address)

    def _is_locked(self, address: str) -> bool:  # noqa: ARG002 - a link asks it
        """Whether connections at an address need a key."""
        return True

    def look(self) -> None:
        """Reads the events of the monitor."""
        while (parts := take_message(self._monitor)) is not None:
            event = parse_monitor_message(parts)
            kind, fd = event["event"], int(event["value"])
            if kind in {zmq.Event.ACCEPTED, zmq.Event.CONNECTED}:
                self._connections.add(fd)
                self.connected = True
                # Somebody else may have called at our door before; but we call once.
                self.lost &= not self.binds
            elif kind == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.greeted = True
            elif kind == zmq.Event.DISCONNECTED:
                self._connections.discard(fd)
                # Until our peer was here, those that leave are strangers.
                self.lost |= not self._connections and (self.greeted or not self.binds)
            elif kind == zmq.Event.CLOSED and not self.binds and not self.connected:
                self.refused = True

    def watch(self, epoll: select.epoll) -> None:
        """Has an epoll wake up for this socket and its monitor."""
        for socket in (self._socket, self._monitor):
            epoll.register(socket.fileno(), select.EPOLLIN)

    def close(self, epoll: select.epoll, *, linger_s: float = 0.0) -> None:
        """Gives the sockets back; what was sent is still delivered for a while if it lingers."""
        for socket in (self._socket, self._monitor):
            epoll.unregister(socket.fileno())
        self.discard(linger_s=linger_s)

    def discard(self, *, linger_s: float = 0.0) -> None:
        """Gives the sockets back where no epoll watches them."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=milliseconds(linger_s))


class ZmqLink(MonitoredSocket):
    """Carries the messages. A PAIR socket turns away who comes while its peer is there.

    Over ipc it needs no key, which would cost as much again for a small message and ten times as
    much for a large one: nobody of another user gets there, and what a stranger of this user says
    does not carry the peer's incarnation.
    """

    def __init__(self, settings: ChannelSettings, *, peer_window_frames: int) -> None:
        longest = FRAME_BYTES_MAX + HEADER_BYTES
        super().__init__(zmq.PAIR, settings, bytes_max=longest)
        self._socket.setsockopt(zmq.SNDHWM, peer_window_frames + CONTROL_FRAMES)

    def _is_locked(self, address: str) -> bool:
        if address.startswith("ipc://"):
            return False
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + HEADER_BYTES + CURVE_BYTES)
        return True

    def messages(self) -> Iterator[list[bytes]]:
        """Takes what has arrived, message by message, each in its parts."""
        while (parts := take_message(self._socket)) is not None:
            yield parts

    def send(self, message: bytes) -> bool:
        """Hands a message over; false when there is no room, or nobody to send to."""
        try:
            self._socket.send(message, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True


class ZmqPulse(MonitoredSocket):
    """Carries nothing but ZeroMQ's heartbeats, which its I/O thread sends and answers.

    They are not on the link, because ZeroMQ (4.3.5) aborts the process when a heartbeat is due
    on a connection that has ended while its messages could not be taken: as when a peer is
    killed soon after its channel was closed. Here no message is ever sent. Only the peer of the
    channel has the key to connect; if it sends a message all the same, `spoke` says so.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(zmq.DEALER, settings, bytes_max=HELLO_BYTES_MAX + CURVE_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, milliseconds(settings.heartbeat_s))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds(settings.silence_s))
        self.spoke = False
        """Whether the peer sent a message here, where none belongs."""

    def look(self) -> None:
        """Reads the events of the monitor, and whether a message came."""
        super().look()
        self.spoke |= take_message(self._socket) is not None


def take_message(socket: Socket) -> list[bytes] | None:
    """A message that has come to a socket, if one has."""
    # Most looks find nothing, and an exception of ZeroMQ costs four times as much as this question.
    if not int(socket.getsockopt(_POLL_STATE)) & _HAS_MESSAGE:
        return None
    try:
        return socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def milliseconds(seconds: float) -> int:
    """As ZeroMQ takes times; a time that is not nothing does not become nothing."""
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


# As plain numbers: members of an enum take longer than the call.
_POLL_STATE, _HAS_MESSAGE = int(zmq.EVENTS), int(zmq.POLLIN)
_BROKEN_OFF = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Dialling:
    """A socket to a listener, on which a hello was sent."""

    def __init__(
        self, address: str, hello: ChannelHello, settings: ChannelSettings, *, secret: Secret
    ) -> None:
        key = secret.key_of(address) if isinstance(secret, MachineKeys) else b""
        self.may_lack = "know each other's keys" if key else "have the same secret"
        """What is missing if the other end breaks off every connection."""
        self._address = address
        self._settings = settings
        self._socket: Socket = new_socket(zmq.DEALER, bytes_max=HELLO_BYTES_MAX + CURVE_BYTES)
        if secret:
            keys = keys_from(secret)
            knock_with(self._socket, key or keys.public, keys if key else None)
        self._monitor: Socket = self._socket.get_monitor_socket(_BROKEN_OFF)
        far = address.startswith("tcp://")
        retry_s, longest_s = (RETRY_S, RETRY_MAX_S) if far else (HERE_RETRY_S, HERE_RETRY_MAX_S)
        self._socket.setsockopt(zmq.RECONNECT_IVL, milliseconds(retry_s))
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, milliseconds(longest_s))
        if far:
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, milliseconds(CONNECT_S))
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(CONNECT_S))
        self._socket.connect(address)
        # Who breaks off at once may have done so already: `broken_off` says it.
        with suppress(zmq.Again):
            self._socket.send(encode_greeting(hello), zmq.DONTWAIT)

    def answer(self, refused: Counter[RefusalReason]) -> ChannelWelcome | ChannelRefusal | None:
        """What the listener answered, if it did; what is no answer is counted in `refused`."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                return self._read(parts)
            except WireError as error:
                refused[error.reason] += 1
                if error.reason is RefusalReason.VERSION:
                    return ChannelRefusal(cause=str(error))

    def _read(self, parts: list[bytes]) -> ChannelWelcome | ChannelRefusal:
        greeting = decode_greeting(parts[0])
        if len(parts) != 1 or isinstance(greeting, ChannelHello):
            raise WireError(
                RefusalReason.GARBAGE, "a hello, or several parts, where an answer belongs"
            )
        if isinstance(greeting, ChannelWelcome):
            for address in (greeting.link, greeting.pulse):
                if _scheme(address) != _scheme(self._address):
                    raise WireError(
                        RefusalReason.GARBAGE,
                        f"{self._address} answered with the address {address}",
                    )
        return greeting

    def connect(self, welcome: ChannelWelcome) -> tuple[ZmqLink, ZmqPulse]:
        """The connections to where the listener waits."""
        link = ZmqLink(self._settings, peer_window_frames=welcome.window.frames)
        key = welcome.key.encode()
        link.connect(_reachable(welcome.link, dialled=self._address), key)
        pulse = ZmqPulse(self._settings)
        pulse.connect(_reachable(welcome.pulse, dialled=self._address), key)
        return link, pulse

    @property
    def broken_off(self) -> bool:
        """Whether somebody is there who broke off before our hello."""
        return bool(self._monitor.poll(0))

    def watch(self, epoll: select.epoll) -> None:
        """Has an epoll wake up for the answer."""
        epoll.register(self._socket.fileno(), select.EPOLLIN)

    def close(self, epoll: select.epoll) -> None:
        epoll.unregister(self._socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _reachable(address: str, *, dialled: str) -> str:
    """An address as it can be called from here: a listener may know itself as 0.0.0.0."""
    if not address.startswith("tcp://"):
        return address
    host, _, _ = dialled.rpartition(":")
    return f"{host}:{address.rpartition(':')[2]}"
