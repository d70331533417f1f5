"""ZeroMQ channels between processes that end in every way a process can."""

from __future__ import annotations

import math
import socket
import time
from contextlib import closing, contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.channel_suite import (
    receive_end,
    receive_frame,
    send_soon,
    send_until_full,
    soon,
)
from penstock.errors import UnavailableError
from penstock.testing.writer_process import peer_process
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty, ReceivedFrame
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import IPC, LOOPBACK, ChannelSettings, Listener, connect, dial
from penstock.transport.zmq_link import RefusalReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.writer_process import PeerProcess
    from penstock.transport.base import Received
    from penstock.transport.zmq_channel import ZmqChannel

PATIENT = ChannelSettings(heartbeat_s=0.1, silence_s=600.0, open_s=60.0)
"""Asks often, and gives nobody up: a busy machine may keep anybody waiting."""
QUICK = ChannelSettings(heartbeat_s=0.1, silence_s=0.5, open_s=60.0)
"""For peers that are to be given up, and may be so before they are stopped."""

# It connects, sends "ready", and then does what its standard input says, line by line.
PEER = """
import sys, time
from lab.fixtures.channel_suite import receive_end, receive_frame, soon
from penstock.transport.zeromq import ChannelSettings, connect

settings = ChannelSettings(heartbeat_s=0.1, silence_s=600.0, open_s=60.0)
channel = connect(sys.argv[1], name="rank 0", deadline=soon(), settings=settings)
channel.send(b"ready")
for line in sys.stdin:
    match line.split():
        case ["echo", count]:
            for _ in range(int(count)):
                channel.send(receive_frame(channel))
        case ["take", count]:
            for _ in range(int(count)):
                receive_frame(channel)
            print("taken", flush=True)
        case ["end"]:
            print(receive_end(channel), flush=True)
        case ["close"]:
            channel.send(b"last words")
            channel.close()
            sys.exit(0)
        case ["flood"]:
            for number in range(1000):
                channel.send(bytes(60_000))
                if number == 0:
                    print("flooding", flush=True)
        case ["leave"]:
            sys.exit(0)
"""

# It is as if the peer were stopped after its first frame and before its pulse was there.
WITHOUT_PULSE = """
import socket
from penstock.transport import zmq_link

silent = []

def call_and_say_nothing(self, address, key):
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(rest)
    else:
        host, _, port = rest.rpartition(":")
        caller = socket.create_connection((host, int(port)))
    silent.append(caller)

zmq_link.ZmqPulse.connect = CONNECT_PULSE
"""


# A channel does the same over both; so does the suite in `tests/conformance`.
@pytest.fixture(params=[IPC, pytest.param(LOOPBACK, marks=pytest.mark.long)], ids=["ipc", "tcp"])
def near(request: pytest.FixtureRequest) -> str:
    """Where to listen."""
    address: str = request.param
    return address


@pytest.fixture(name="listener")
def make_listener(near: str) -> Iterator[Listener]:
    with Listener("engine", near, settings=PATIENT) as listener:
        yield listener


@pytest.fixture(name="peer")
def start_peer(listener: Listener) -> Iterator[PeerProcess]:
    with peer_process(PEER, listener.address) as peer:
        yield peer


@pytest.fixture(name="channel")
def accept_peer(listener: Listener, peer: PeerProcess) -> Iterator[ZmqChannel]:
    assert peer.pid
    channel = listener.accept(deadline=soon())
    assert channel is not None
    assert receive_frame(channel) == b"ready"
    yield channel
    channel.close()


@contextmanager
def quickly_given_up(
    near: str, program: str = PEER, settings: ChannelSettings = QUICK
) -> Iterator[tuple[PeerProcess, ZmqChannel]]:
    """A peer, and this end of its channel, which does not wait for it for long."""
    with (
        Listener("engine", near, settings=settings) as listener,
        peer_process(program, listener.address) as peer,
    ):
        channel = listener.accept(deadline=soon())
        assert channel is not None
        yield peer, channel
        channel.close()


def receive_last(channel: ZmqChannel) -> Received:
    """How a channel ended, whatever came before."""
    while isinstance(received := channel.receive(deadline=soon()), ReceivedFrame):
        pass
    return received


def test_frames_go_to_another_process_and_back(peer: PeerProcess, channel: ZmqChannel) -> None:
    peer.tell("echo 3000")
    frames = [str(number).encode() for number in range(3000)]

    returned = []
    for frame in frames:
        channel.send(frame)
        returned.append(receive_frame(channel))

    assert returned == frames


def test_a_peer_that_closes_and_exits_at_once_is_closed_after_its_last_frame(
    peer: PeerProcess, channel: ZmqChannel
) -> None:
    peer.tell("close")

    assert receive_frame(channel) == b"last words"
    assert receive_end(channel) == ChannelClosed()
    assert peer.wait() == 0


def test_a_peer_that_exits_without_closing_has_failed(
    peer: PeerProcess, channel: ZmqChannel
) -> None:
    peer.tell("leave")

    assert receive_end(channel) == ChannelFailed("the connection to rank 0 was lost")


def test_a_killed_peer_has_failed_at_once(peer: PeerProcess, channel: ZmqChannel) -> None:
    """The kernel tells; no heartbeat has to be missed, which would take minutes here."""
    peer.kill()

    assert receive_end(channel) == ChannelFailed("the connection to rank 0 was lost")
    with pytest.raises(UnavailableError, match="lost"):
        channel.send(b"x")


def test_a_stopped_peer_has_failed_when_it_was_silent_for_too_long(near: str) -> None:
    with quickly_given_up(near) as (peer, channel):
        peer.stop()

        assert receive_last(channel) == ChannelFailed("rank 0 has not answered for 0.5 s")


def test_a_peer_that_is_stopped_for_some_heartbeats_is_not_given_up(
    peer: PeerProcess, channel: ZmqChannel
) -> None:
    peer.stop()
    silent = channel.receive(deadline=time.monotonic() + 5 * PATIENT.heartbeat_s)

    peer.resume()
    peer.tell("echo 1")
    channel.send(b"still there?")

    assert silent == Empty()
    assert receive_frame(channel) == b"still there?"


def test_a_peer_that_was_stopped_and_goes_on_learns_that_it_was_given_up(near: str) -> None:
    """Both ends agree in the end: neither goes on as if nothing had happened."""
    with quickly_given_up(near) as (peer, channel):
        peer.stop()
        assert isinstance(receive_last(channel), ChannelFailed)

        peer.resume()
        peer.tell("end")

        # It may have been stopped before `connect` had returned, and learns it from that.
        told = peer.hear()
        assert (
            told == "ChannelFailed(cause='the connection to engine was lost')" or peer.wait() == 1
        )


def test_a_peer_that_takes_nothing_for_long_is_not_given_up(near: str) -> None:
    """It may be in a long step. Heartbeats get through although its window is full.

    A machine that pauses looks like a silent peer; so who seems to be one is given more time.
    """
    assert any(is_kept_although_full(near, silence_s) for silence_s in (0.5, 5.0, 20.0))


def is_kept_although_full(near: str, silence_s: float) -> bool:
    """Whether a channel goes on after its peer has taken nothing for three times so long."""
    settings = ChannelSettings(heartbeat_s=0.1, silence_s=silence_s, open_s=60.0)
    with quickly_given_up(near, settings=settings) as (peer, channel):
        try:
            taken = send_until_full(channel, bytes(1000))
            until = time.monotonic() + 3 * silence_s
            while isinstance(channel.receive(deadline=until), ReceivedFrame):
                pass
            if not channel.is_open:
                return False
            peer.tell(f"take {taken}")
            assert peer.hear() == "taken"
            send_soon(channel, b"x")
        except UnavailableError:
            return False
    return True


def test_wait_any_wakes_up_for_a_stopped_peer(near: str) -> None:
    """Although no descriptor tells when the peer has been waited for long enough."""
    with quickly_given_up(near) as (peer, channel):
        peer.stop()
        while True:
            found = wait_any([channel], deadline=soon())

            assert found.channels == (channel,)
            if not isinstance(channel.receive(), ReceivedFrame):
                break
        assert channel.failure == "rank 0 has not answered for 0.5 s"


@pytest.mark.parametrize(
    "connect_pulse",
    ["lambda self, address, key: None", "call_and_say_nothing"],
    ids=["no connection", "no handshake"],
)
def test_a_peer_that_is_stopped_before_its_first_heartbeat_is_missed_as_any_other(
    near: str, connect_pulse: str
) -> None:
    """Its frames came; but the connection that tells of its death never did."""
    program = WITHOUT_PULSE.replace("CONNECT_PULSE", connect_pulse) + PEER
    with quickly_given_up(near, program) as (peer, channel):
        peer.stop()

        assert receive_last(channel) == ChannelFailed("rank 0 has not answered for 0.5 s")


def test_a_process_survives_that_closes_a_channel_whose_peer_goes_on_sending_and_is_killed(
    peer: PeerProcess, channel: ZmqChannel
) -> None:
    """ZeroMQ would abort it if heartbeats were on a connection that lingers."""
    peer.tell("flood")
    assert peer.hear() == "flooding"
    peer.stop()
    send_until_full(channel, bytes(60_000))

    channel.close()
    peer.resume()
    with Listener("another", settings=PATIENT) as listener:
        assert listener.accept(deadline=time.monotonic() + 0.005) is None
        peer.kill()
        assert listener.accept(deadline=time.monotonic() + 4 * PATIENT.heartbeat_s) is None


def test_many_peers_are_apart(listener: Listener) -> None:
    """One that is killed, one that is full and one that closes do not touch the fourth."""
    with (
        peer_process(PEER, listener.address) as killed,
        peer_process(PEER.replace("rank 0", "rank 1"), listener.address),
        peer_process(PEER.replace("rank 0", "rank 2"), listener.address) as closing,
        peer_process(PEER.replace("rank 0", "rank 3"), listener.address) as fourth,
    ):
        found = [listener.accept(deadline=soon()) for _ in range(4)]
        channels = {channel.name: channel for channel in found if channel is not None}
        for channel in channels.values():
            assert receive_frame(channel) == b"ready"

        killed.kill()
        send_until_full(channels["rank 1"], bytes(1000))
        closing.tell("close")
        fourth.tell("echo 1")
        channels["rank 3"].send(b"still here")

        assert receive_frame(channels["rank 3"]) == b"still here"
        assert isinstance(receive_end(channels["rank 0"]), ChannelFailed)
        assert receive_frame(channels["rank 2"]) == b"last words"
        assert receive_end(channels["rank 2"]) == ChannelClosed()
        for channel in channels.values():
            channel.close()


def require_another_life(listener: Listener, again: PeerProcess, earlier: ZmqChannel) -> None:
    other = listener.accept(deadline=soon())
    assert other is not None
    assert receive_frame(other) == b"ready"
    assert isinstance(receive_last(earlier), ChannelFailed)
    assert other.peer_incarnation != earlier.peer_incarnation
    again.tell("echo 1")
    other.send(b"x")
    assert receive_frame(other) == b"x"
    other.close()


def test_a_new_life_of_a_peer_that_died_is_another_channel(
    listener: Listener, peer: PeerProcess, channel: ZmqChannel
) -> None:
    """Also if nobody has looked at the channel of the earlier one since."""
    peer.kill()

    with peer_process(PEER, listener.address) as again:
        require_another_life(listener, again, channel)


def test_a_new_life_of_a_peer_that_is_stopped_comes_in_once_that_one_is_missed(near: str) -> None:
    """A machine that pauses looks like a silent peer; so who seems to be one is given more time."""
    assert any(is_kept_after_another(near, silence_s) for silence_s in (0.5, 5.0, 20.0))


def is_kept_after_another(near: str, silence_s: float) -> bool:
    """Whether a channel goes on whose peer came when its earlier life was missed."""
    settings = ChannelSettings(heartbeat_s=0.1, silence_s=silence_s, open_s=60.0)
    with (
        Listener("engine", near, settings=settings) as listener,
        peer_process(PEER, listener.address) as peer,
    ):
        earlier = listener.accept(deadline=soon())
        assert earlier is not None
        peer.stop()
        with peer_process(PEER, listener.address) as again:
            other = listener.accept(deadline=soon())
            assert other is not None
            assert isinstance(receive_last(earlier), ChannelFailed)
            assert other.peer_incarnation != earlier.peer_incarnation
            again.tell("echo 1")
            try:
                other.send(b"x")
            except UnavailableError:
                return False
            received = [other.receive(deadline=soon()) for _ in range(2)]
            other.close()
        earlier.close()
    return received == [ReceivedFrame(b"ready"), ReceivedFrame(b"x")]


@pytest.mark.parametrize("secret", [b"", b"a secret of some bytes"], ids=["open", "secret"])
def test_a_name_is_not_given_to_another_while_its_peer_lives(near: str, secret: bytes) -> None:
    with Listener("engine", near, secret=secret, settings=PATIENT) as listener:
        first = dial(listener.address, name="rank 0", secret=secret, settings=PATIENT)
        while not first.is_open:
            listener.accept()
            first.wait_open(deadline=time.monotonic() + 0.01)
        channel = listener.accept(deadline=soon())
        assert channel is not None
        for _ in range(10):
            other = dial(listener.address, name="rank 0", secret=secret, settings=PATIENT)
            while other.receive() == Empty():
                assert listener.accept(deadline=time.monotonic() + 0.02) is None
            assert other.name_taken
            assert other.failure == (
                f"{listener.address} refused: the name 'rank 0' is that of a peer that is here and "
                "alive"
            )
            other.close()

        first.send(b"still here")

        assert receive_frame(channel) == b"still here"
        assert listener.refused == {RefusalReason.TAKEN: 10}
        channel.close()
        first.close()


def test_of_two_that_dial_under_one_name_at_once_the_first_to_come_stays(near: str) -> None:
    with Listener("engine", near, settings=PATIENT) as listener:
        both = [dial(listener.address, name="rank 0", settings=PATIENT) for _ in range(2)]
        accepted: list[ZmqChannel] = []
        deadline = soon()
        while not (accepted and listener.refused[RefusalReason.TAKEN]):
            assert time.monotonic() < deadline
            for each in both:
                each.wait_open(deadline=time.monotonic())
            found = listener.accept(deadline=time.monotonic() + 0.02)
            accepted += [] if found is None else [found]

        while len(there := [each for each in both if each.receive() == Empty()]) > 1:
            assert time.monotonic() < deadline
        there[0].send(b"mine")

        assert len(accepted) == 1
        assert receive_frame(accepted[0]) == b"mine"
        for each in (*accepted, *both):
            each.close()


def test_nobody_at_the_address_is_told_at_the_deadline() -> None:
    with Listener("engine") as gone:
        address = gone.address

    with pytest.raises(UnavailableError, match="no answer"):
        connect(address, name="rank 0", deadline=time.monotonic() + 0.1)


def test_who_comes_to_an_address_of_this_machine_a_moment_later_is_found_a_moment_later() -> None:
    """ZeroMQ alone would try again after a tenth of a second, and up to another one."""
    deadline, quickest_s = soon(), math.inf

    while quickest_s >= 0.1:
        assert time.monotonic() < deadline, f"the quickest of all came after {quickest_s} s"
        quickest_s = min(quickest_s, _second_attempt_s())


def _second_attempt_s() -> float:
    """How long after the first attempt in vain the next one comes."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as nobody:
        nobody.bind(f"{folder}/nobody")
        nobody.listen()
        nobody.settimeout(60.0)
        with closing(dial(f"ipc://{folder}/nobody", name="rank 0")):
            nobody.accept()[0].close()
            began = time.monotonic()
            nobody.accept()[0].close()
            return time.monotonic() - began


def test_a_listener_that_never_answers_fails_the_channel_in_time() -> None:
    settings = ChannelSettings(open_s=0.1)
    with Listener("engine") as silent, pytest.raises(UnavailableError, match=r"in 0\.1 s"):
        connect(silent.address, name="rank 0", deadline=soon(), settings=settings)


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_a_name_that_no_listener_takes_is_refused_here(name: str) -> None:
    with pytest.raises(ValueError, match=f"of {len(name)} characters, must have from 1 to 100"):
        Listener(name)
    with pytest.raises(ValueError, match=f"of {len(name)} characters, must have from 1 to 100"):
        connect("ipc:///tmp/penstock-nobody", name=name, deadline=soon())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heartbeat_s", 0.0),
        ("silence_s", 0.5),
        ("open_s", 0.0),
        ("settle_s", -1.0),
        ("linger_s", 1e9),
        ("window_frames", 1),
        ("window_bytes", 1 << 20),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}|{field} {value}"):
        ChannelSettings(**{field: value})  # type: ignore[arg-type]
