"""Control channels between processes, over ZeroMQ, and who may connect to a listener.

ZeroMQ asks, for each connection, a socket of the same context whether the peer's key is good (its
authentication protocol, RFC 27). Here the listener's own thread answers when it looks after its
listener: no thread waits for it. A context of its own keeps the question from the sockets of
channels, whose keys come from the listener's welcome.

    listener = Listener("engine")                     channel = connect(address, name="rank 0", …)
    listener.address  ── handed to the ranks ──→      channel.send(…)
    channel = listener.accept(deadline=…)             channel.receive(deadline=…)

A listener answers a hello with the address of a socket made for this peer alone, so each peer
is a `Channel` by itself: it has its own descriptor and bounds, and its death is its own. A peer
is a name and an incarnation, 64 random bits drawn when it starts. A name is given to one peer at a
time: while that one lives, another that dials under its name is refused; a new life of a peer that
is gone is another channel.

The one rule: nobody gets in by accident. Over ipc, a listener is a socket in a folder of mode 0700
and takes processes of this user only. A listener with a secret breaks off, before it reads a hello,
with all that do not have the same one, over ipc and over tcp. Where other machines can reach an
address, both ends must have keys (`MachineKeys`), and a listener lets in only keys that it lists.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import zmq

from penstock.errors import UnavailableError
from penstock.transport.machine_keys import MachineKeys, require_keys
from penstock.transport.waiting import wait_readable
from penstock.transport.zmq_channel import ZmqChannel
from penstock.transport.zmq_link import (
    CURVE_BYTES,
    HELLO_BYTES_MAX,
    ChannelHello,
    ChannelRefusal,
    ChannelSettings,
    ChannelWelcome,
    Dialling,
    RefusalReason,
    Socket,
    Window,
    WireError,
    ZmqLink,
    ZmqPulse,
    admit_only,
    bind_within,
    decode_greeting,
    encode_greeting,
    keys_from,
    milliseconds,
    new_keys,
    new_socket,
    private_address,
    require_name,
    take_message,
)

if TYPE_CHECKING:
    from typing import Self

    from penstock.transport.machine_keys import Secret


logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_REQUEST_PARTS = 7
"""Version, request, domain, address, identity, mechanism, and the key."""
LOGGED_MAX = 64
"""Strangers that are named in the log; later ones are counted only."""


class KeyCheck:
    """Answers for the sockets of `context`, which must be made after it."""

    def __init__(self, keys: MachineKeys) -> None:
        self._keys = keys
        self.context: zmq.Context[Socket] = zmq.Context()
        self._socket: Socket = self.context.socket(zmq.REP)
        self._socket.bind(_ENDPOINT)
        self._logged: set[tuple[bytes, bytes]] = set()

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def answer(self) -> int:
        """Answers all questions that are waiting; how many peers were refused."""
        refused = 0
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return refused
            version, request, _, address, _, mechanism, *key = parts
            good = (
                len(parts) == _REQUEST_PARTS and mechanism == b"CURVE" and self._keys.admits(key[0])
            )
            if not good:
                refused += 1
                self._log(address, key[0] if key else b"")
            status = b"200" if good else b"400"
            self._socket.send_multipart([version, request, status, b"", b"", b""])

    def close(self) -> None:
        """Ends the context; its other sockets must be closed before."""
        self._socket.close(linger=0)
        self.context.term()

    def _log(self, address: bytes, key: bytes) -> None:
        if (address, key) in self._logged or len(self._logged) >= LOGGED_MAX:
            return
        self._logged.add((address, key))
        logger.warning(
            "refused a connection from %s: its key %s is not among the peers of this machine",
            *(address.decode(errors="replace"), key.hex()),
        )


_IPC_SCHEME = "ipc://"
IPC = f"{_IPC_SCHEME}*"
"""Listen in the private folder of this process: for processes of one user on one machine."""
LOOPBACK = "tcp://127.0.0.1:*"
"""Listen on a port of the loopback interface that the kernel chooses."""

WAITING_MAX = 64
"""How many peers are let in at the same time; later ones must try again."""
LIVES_MAX = 4096
"""How many incarnations are remembered, so that the hello of an earlier life is ignored."""


class _Parked(NamedTuple):
    """A hello under a name whose peer seems to be alive: it may be about to be seen dead."""

    route: bytes
    hello: ChannelHello
    until: float


class Listener:
    """Lets peers in, each as a channel of its own.

    Args:
        name: How peers are to call this end.
        address: Where to listen.
        secret: What peers must have, too, or the keys of machines; without either, whoever reaches
            the address is let in.
        incarnation: Of this end: drawn at random if it is not given.
        settings: Waiting times and bounds.

    Raises:
        UnavailableError: the address is taken, or cannot be listened on.
        ValueError: other machines can reach the address, and there are no keys.
    """

    def __init__(
        self,
        name: str,
        address: str = IPC,
        *,
        secret: Secret = b"",
        incarnation: int | None = None,
        settings: ChannelSettings | None = None,
    ) -> None:
        require_name(name)
        require_keys(address, secret)
        self.name = name
        self.incarnation = secrets.randbits(64) if incarnation is None else incarnation
        self.refused: Counter[RefusalReason] = Counter()
        """What came and was not let in, by reason."""
        self._settings = settings or ChannelSettings()
        keys = keys_from(secret) if secret else None
        self._check = KeyCheck(secret) if isinstance(secret, MachineKeys) else None
        self._epoll = select.epoll()
        longest = HELLO_BYTES_MAX + (CURVE_BYTES if secret else 0)
        within = self._check.context if self._check else None
        self._lobby: Socket = new_socket(zmq.ROUTER, bytes_max=longest, within=within)
        self._lobby.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(self._settings.open_s))
        if keys is not None:
            admit_only(self._lobby, keys)
        try:
            at = private_address(IPC) if address == IPC else address
            self.address = bind_within(self._lobby, at, self._settings.ports)
        except UnavailableError:
            self._close_lobby()
            raise
        """What a peer has to dial."""
        self._epoll.register(self._lobby.fileno(), select.EPOLLIN)
        if self._check is not None:
            self._epoll.register(self._check.descriptor, select.EPOLLIN)
        self._awaited: list[ZmqChannel] = []
        self._opened: deque[ZmqChannel] = deque()
        self._lives: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._latest: WeakValueDictionary[str, ZmqChannel] = WeakValueDictionary()
        self._parked: dict[str, _Parked] = {}
        self._unread = False
        """Whether more may be waiting than one turn takes; the descriptor does not show it."""
        self._closed = False

    def accept(self, *, deadline: float | None = None) -> ZmqChannel | None:
        """The channel of the next peer, if one comes until `deadline` on the monotonic clock."""
        while not self.ready:
            if deadline is None or time.monotonic() >= deadline:
                return None
            alarm = self.alarm
            wait_readable(self.descriptor, deadline if alarm is None else min(alarm, deadline))
        return self._opened.popleft()

    @property
    def ready(self) -> bool:
        """Whether `accept` has a channel to give now."""
        if self._closed:
            raise UnavailableError(f"listener {self.name!r} was closed")
        if not self._opened:
            self._pump()
        return bool(self._opened)

    @property
    def descriptor(self) -> int:
        """A descriptor for `wait_any`, as a channel has one."""
        return self._epoll.fileno()

    @property
    def alarm(self) -> float | None:
        """When to look again although nothing came: a peer does not come, or has to be answered."""
        if self._unread:
            return time.monotonic()
        alarms = [alarm for channel in self._awaited if (alarm := channel.alarm)]
        return min((*alarms, *(parked.until for parked in self._parked.values())), default=None)

    def close(self) -> None:
        """Stops accepting peers. Channels that were accepted go on."""
        if self._closed:
            return
        self._closed = True
        for channel in (*self._awaited, *self._opened):
            channel.close()
        self._awaited.clear()
        self._opened.clear()
        self._parked.clear()
        self._close_lobby()

    def _close_lobby(self) -> None:
        if self._check is None:
            self._lobby.close(linger=milliseconds(self._settings.linger_s))
        else:  # Its context ends with it, and must not wait for what peers do not take.
            self._lobby.close(linger=0)
            self._check.close()
        self._epoll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pump(self) -> None:
        if self._check is not None:
            refused = self._check.answer()
            if refused:
                self.refused[RefusalReason.UNKNOWN_KEY] += refused
        self._unread = True
        for _ in range(WAITING_MAX):  # Who calls without end does not keep the others waiting.
            parts = take_message(self._lobby)
            if parts is None:
                self._unread = False
                break
            self._answer(parts)
        self._answer_parked()
        for channel in tuple(self._awaited):
            if channel.ready or channel.is_open:
                self._awaited.remove(channel)
                self._epoll.unregister(channel.descriptor)
                self._admit(channel)

    def _admit(self, channel: ZmqChannel) -> None:
        """Gives a channel to the caller if its peer came; it may have failed since."""
        if not channel.was_open:
            channel.close()
            return
        earlier = self._latest.get(channel.name)
        if earlier is not None:
            if earlier.is_alive():
                # Both were answered before either came, and that one was the first.
                self.refused[RefusalReason.TAKEN] += 1
                channel.close()
                return
            earlier.fail(f"{channel.name} began another life")
        self._latest[channel.name] = channel
        self._opened.append(channel)

    def _answer(self, parts: list[bytes]) -> None:
        try:
            hello = _read_hello(parts)
            self._require_new(hello)
        except WireError as error:
            self._refuse(parts[0], error)
            return
        if self._is_taken(hello.name):
            self._park(_Parked(parts[0], hello, time.monotonic() + self._settings.settle_s))
        else:
            self._welcome(parts[0], hello)

    def _welcome(self, route: bytes, hello: ChannelHello) -> None:
        try:
            welcome = self._await_peer(hello)
        except UnavailableError as error:
            logger.warning("peer refused: name=%s at=%s cause=%s", hello.name, self.name, error)
            self._refuse(route, WireError(RefusalReason.NO_PORT, str(error)))
            return
        self._lives[hello.name, hello.incarnation] = None
        if len(self._lives) > LIVES_MAX:
            self._lives.popitem(last=False)
        self._reply(route, welcome)

    def _is_taken(self, name: str) -> bool:
        earlier = self._latest.get(name)
        return earlier is not None and earlier.is_alive()

    def _park(self, parked: _Parked) -> None:
        """Has a hello wait a moment: its earlier life may have ended, and be seen dead only then.

        The end of one connection and the first message of another arrive in any order.
        """
        replaced = self._parked.pop(parked.hello.name, None)
        if replaced is not None:
            self._refuse_taken(replaced)
        self._parked[parked.hello.name] = parked

    def _answer_parked(self) -> None:
        now = time.monotonic()
        for name, parked in list(self._parked.items()):
            if not self._is_taken(name):
                del self._parked[name]
                self._welcome(parked.route, parked.hello)
            elif now >= parked.until:
                del self._parked[name]
                self._refuse_taken(parked)

    def _refuse_taken(self, parked: _Parked) -> None:
        problem = f"the name {parked.hello.name!r} is that of a peer that is here and alive"
        self._refuse(parked.route, WireError(RefusalReason.TAKEN, problem))

    def _refuse(self, route: bytes, error: WireError) -> None:
        self.refused[error.reason] += 1
        if error.reason is not RefusalReason.GARBAGE:
            taken = error.reason is RefusalReason.TAKEN
            self._reply(route, ChannelRefusal(cause=str(error), taken=taken))

    def _require_new(self, hello: ChannelHello) -> None:
        if (hello.name, hello.incarnation) in self._lives:
            raise WireError(
                RefusalReason.REPLAYED,
                f"{hello.name} of incarnation {hello.incarnation:016x} was here before",
            )
        waiting = len(self._awaited) + len(self._parked)
        if waiting >= WAITING_MAX:
            raise WireError(
                RefusalReason.CROWDED, f"{waiting} peers are being let in, at most that many"
            )

    def _await_peer(self, hello: ChannelHello) -> ChannelWelcome:
        settings = self._settings
        link = ZmqLink(settings, peer_window_frames=hello.window.frames)
        pulse = ZmqPulse(settings)
        keys = new_keys()
        try:
            link_address = link.bind(private_address(self.address), keys)
            pulse_address = pulse.bind(private_address(self.address), keys)
        except UnavailableError:
            link.discard()
            pulse.discard()
            raise
        welcome = ChannelWelcome(
            name=self.name,
            incarnation=self.incarnation,
            window=Window(settings.window_frames, settings.window_bytes),
            link=link_address,
            pulse=pulse_address,
            key=keys.public.decode(),
        )
        channel = ZmqChannel(hello.name, incarnation=self.incarnation, settings=settings)
        channel.begin_awaiting(link, pulse, hello.incarnation, hello.window)
        self._awaited.append(channel)
        self._epoll.register(channel.descriptor, select.EPOLLIN)
        return welcome

    def _reply(self, route: bytes, greeting: ChannelWelcome | ChannelRefusal) -> None:
        # Who is gone by now gets no answer; ROUTER sockets drop it.
        self._lobby.send_multipart([route, encode_greeting(greeting)], zmq.DONTWAIT)


def _read_hello(parts: list[bytes]) -> ChannelHello:
    if len(parts) != 2:
        raise WireError(RefusalReason.GARBAGE, f"greeting has {len(parts) - 1} parts, must have 1")
    greeting = decode_greeting(parts[1])
    if not isinstance(greeting, ChannelHello):
        raise WireError(RefusalReason.GARBAGE, "greeting is no hello")
    return greeting


def require_listener(address: str) -> None:
    """Raises `UnavailableError` if the kernel knows that nobody listens at an ipc address.

    ZeroMQ would go on trying until the channel's time to open is over.
    """
    if not address.startswith(_IPC_SCHEME):
        return
    path = address.removeprefix(_IPC_SCHEME)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise UnavailableError(f"nobody listens at {address}: {error.strerror}") from error
        except OSError:
            return  # Somebody is there and has no time, or `dial` says what is wrong.


def dial(
    address: str,
    *,
    name: str,
    secret: Secret = b"",
    incarnation: int | None = None,
    settings: ChannelSettings | None = None,
) -> ZmqChannel:
    """Begins a channel to the listener at `address`; it is open once `is_open` says so.

    Args:
        address: What the listener calls its address.
        name: How this end is to be called there.
        secret: That of the listener, if it has one, or the keys of machines.
        incarnation: Of this end: drawn at random if it is not given. One life may dial under
            a name only once; for several channels, use several names.
        settings: Waiting times and bounds.

    Raises:
        UnavailableError: the keys have none for the host of the address.
        ValueError: the address is of another machine, and there are no keys.
    """
    require_name(name)
    require_keys(address, secret)
    settings = settings or ChannelSettings()
    incarnation = secrets.randbits(64) if incarnation is None else incarnation
    window = Window(settings.window_frames, settings.window_bytes)
    hello = ChannelHello(name=name, incarnation=incarnation, window=window)
    channel = ZmqChannel(address, incarnation=incarnation, settings=settings)
    channel.begin_dialling(Dialling(address, hello, settings, secret=secret))
    return channel


def connect(
    address: str,
    *,
    name: str,
    deadline: float,
    secret: Secret = b"",
    incarnation: int | None = None,
    settings: ChannelSettings | None = None,
) -> ZmqChannel:
    """An open channel to the listener at `address`; waits for its answer until `deadline`.

    While the name is that of a peer that the listener believes to be alive, it is asked again: an
    earlier life of this end may be gone without having been missed yet.

    Raises:
        UnavailableError: it did not answer in time, or refused; the cause is in the message.
    """
    while True:
        channel = dial(
            address, name=name, secret=secret, incarnation=incarnation, settings=settings
        )
        if channel.wait_open(deadline=deadline):
            return channel
        cause = channel.failure or f"no answer in time{channel.hint}"
        again = channel.name_taken and time.monotonic() < deadline
        channel.close()
        if not again:  # The listener takes its time to say that, so this asks a few times a second.
            raise UnavailableError(f"no channel to {address}: {cause}")
