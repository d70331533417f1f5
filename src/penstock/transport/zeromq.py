"""Control channels between processes, over ZeroMQ.

    listener = Listener("engine")                     channel = connect(address, name="rank 0", …)
    listener.address  ── handed to the ranks ──→      channel.send(…)
    channel = listener.accept(deadline=…)             channel.receive(deadline=…)

A listener answers a hello with the address of a socket made for this peer alone, so each peer
is a `Channel` by itself: it has its own descriptor and bounds, and its death is its own. A peer
is a name and an incarnation, 64 random bits drawn when it starts. A new life of a name is
another channel, and the one of its earlier life fails.

The one rule: nothing is shared by accident. Unless told otherwise, addresses are abstract names
of 128 random bits, or ports that the kernel chose.
"""

from __future__ import annotations

import secrets
import select
import time
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import zmq

from penstock.errors import UnavailableError
from penstock.transport.waiting import wait_readable
from penstock.transport.wire import (
    HELLO_BYTES_MAX,
    Hello,
    Refusal,
    Refused,
    Welcome,
    Window,
    WireError,
    decode_greeting,
    encode_greeting,
    require_name,
)
from penstock.transport.zmq_channel import ZmqChannel
from penstock.transport.zmq_dialling import Dialling
from penstock.transport.zmq_link import (
    ChannelSettings,
    Link,
    Pulse,
    Socket,
    context,
    milliseconds,
    private_address,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

IPC = "ipc://@"
"""Listen under an abstract name: for processes of one machine (and network namespace)."""
LOOPBACK = "tcp://127.0.0.1:*"
"""Listen on a port of the loopback interface that the kernel chooses."""

WAITING_MAX = 64
"""So many peers are let in at the same time; who comes later is told to come again."""
LIVES_MAX = 4096
"""So many incarnations are remembered, so that the hello of an earlier life is not answered."""


class Listener:
    """Lets peers in, each as a channel of its own."""

    def __init__(
        self,
        name: str,
        address: str = IPC,
        *,
        incarnation: int | None = None,
        settings: ChannelSettings | None = None,
    ) -> None:
        require_name(name)
        self.name = name
        self.incarnation = secrets.randbits(64) if incarnation is None else incarnation
        self.refused: Counter[Refused] = Counter()
        """What came and was not let in, by reason."""
        self._settings = settings or ChannelSettings()
        self._epoll = select.epoll()
        self._lobby: Socket = context().socket(zmq.ROUTER)
        self._lobby.setsockopt(zmq.MAXMSGSIZE, HELLO_BYTES_MAX)
        self._lobby.setsockopt(zmq.RCVHWM, WAITING_MAX)
        self._lobby.setsockopt(zmq.HANDSHAKE_IVL, milliseconds(self._settings.open_s))
        try:
            self._lobby.bind(private_address(IPC) if address == IPC else address)
        except zmq.ZMQError as error:
            self._lobby.close(linger=0)
            self._epoll.close()
            raise UnavailableError(f"cannot listen on {address}: {error.strerror}") from error
        self.address = self._lobby.getsockopt_string(zmq.LAST_ENDPOINT)
        """What a peer has to dial."""
        self._epoll.register(self._lobby.fileno(), select.EPOLLIN)
        self._awaited: list[ZmqChannel] = []
        self._opened: deque[ZmqChannel] = deque()
        self._lives: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._latest: WeakValueDictionary[str, ZmqChannel] = WeakValueDictionary()
        self._closed = False

    def accept(self, *, deadline: float | None = None) -> ZmqChannel | None:
        """The channel of the next peer, if one comes until `deadline` on the monotonic clock."""
        while not self.ready:
            if deadline is None or time.monotonic() >= deadline:
                return None
            wait_readable(self.descriptor, deadline)
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
        """When a peer that does not come is to be forgotten."""
        return min((channel.alarm for channel in self._awaited if channel.alarm), default=None)

    def close(self) -> None:
        """Lets nobody in any more. Channels that were accepted go on."""
        if self._closed:
            return
        self._closed = True
        for channel in (*self._awaited, *self._opened):
            channel.close()
        self._awaited.clear()
        self._opened.clear()
        self._lobby.close(linger=milliseconds(self._settings.linger_s))
        self._epoll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _pump(self) -> None:
        for _ in range(WAITING_MAX):  # Who calls without end does not keep the others waiting.
            try:
                parts = self._lobby.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._answer(parts)
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
            earlier.fail(f"{channel.name} began another life")
        self._latest[channel.name] = channel
        self._opened.append(channel)

    def _answer(self, parts: list[bytes]) -> None:
        try:
            hello = _read_hello(parts)
            self._require_new(hello)
        except WireError as error:
            self.refused[error.reason] += 1
            if error.reason is not Refused.GARBAGE:
                self._reply(parts[0], Refusal(cause=str(error)))
            return
        self._lives[hello.name, hello.incarnation] = None
        if len(self._lives) > LIVES_MAX:
            self._lives.popitem(last=False)
        self._reply(parts[0], self._await_peer(hello))

    def _require_new(self, hello: Hello) -> None:
        if (hello.name, hello.incarnation) in self._lives:
            raise WireError(
                Refused.REPLAYED,
                f"{hello.name} of incarnation {hello.incarnation:016x} was here before",
            )
        if len(self._awaited) >= WAITING_MAX:
            raise WireError(
                Refused.CROWDED, f"{len(self._awaited)} peers are being let in, at most that many"
            )

    def _await_peer(self, hello: Hello) -> Welcome:
        settings = self._settings
        link = Link(settings, peer_window_frames=hello.window.frames)
        pulse = Pulse(settings)
        welcome = Welcome(
            name=self.name,
            incarnation=self.incarnation,
            window=Window(settings.window_frames, settings.window_bytes),
            link=link.bind(private_address(self.address)),
            pulse=pulse.bind(private_address(self.address)),
        )
        channel = ZmqChannel(hello.name, incarnation=self.incarnation, settings=settings)
        channel.begin_awaiting(link, pulse, hello.incarnation, hello.window)
        self._awaited.append(channel)
        self._epoll.register(channel.descriptor, select.EPOLLIN)
        return welcome

    def _reply(self, route: bytes, greeting: Welcome | Refusal) -> None:
        # Who is gone by now gets no answer; ROUTER sockets drop it.
        self._lobby.send_multipart([route, encode_greeting(greeting)], zmq.DONTWAIT)


def _read_hello(parts: list[bytes]) -> Hello:
    if len(parts) != 2:
        raise WireError(Refused.GARBAGE, f"greeting has {len(parts) - 1} parts, must have 1")
    greeting = decode_greeting(parts[1])
    if not isinstance(greeting, Hello):
        raise WireError(Refused.GARBAGE, "greeting is no hello")
    return greeting


def dial(
    address: str,
    *,
    name: str,
    incarnation: int | None = None,
    settings: ChannelSettings | None = None,
) -> ZmqChannel:
    """Begins a channel to the listener at `address`; it is open once `is_open` says so.

    Args:
        address: What the listener calls its address.
        name: How this end is to be called there.
        incarnation: Of this end: drawn at random if it is not given. One life may dial under
            a name only once; for several channels, use several names.
        settings: Waiting times and bounds.
    """
    require_name(name)
    settings = settings or ChannelSettings()
    incarnation = secrets.randbits(64) if incarnation is None else incarnation
    window = Window(settings.window_frames, settings.window_bytes)
    hello = Hello(name=name, incarnation=incarnation, window=window)
    channel = ZmqChannel(address, incarnation=incarnation, settings=settings)
    channel.begin_dialling(Dialling(address, hello, settings))
    return channel


def connect(
    address: str,
    *,
    name: str,
    deadline: float,
    incarnation: int | None = None,
    settings: ChannelSettings | None = None,
) -> ZmqChannel:
    """An open channel to the listener at `address`; waits for its answer until `deadline`.

    Raises:
        UnavailableError: it did not answer in time, or refused; the cause is in the message.
    """
    channel = dial(address, name=name, incarnation=incarnation, settings=settings)
    if channel.wait_open(deadline=deadline):
        return channel
    cause = channel.failure or "no answer in time"
    channel.close()
    raise UnavailableError(f"no channel to {address}: {cause}")
