"""What arrives at ZeroMQ channels and is not what they expect: refused, counted, harmless."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from lab.fixtures.channel_suite import receive_end, receive_frame, soon
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    ChannelClosed,
    ChannelFailed,
    Empty,
    ReceivedFrame,
)
from penstock.transport.waiting import wait_readable
from penstock.transport.zeromq import IPC, LOOPBACK, WAITING_MAX, ChannelSettings, Listener, dial
from penstock.transport.zmq_link import (
    HEADER_BYTES,
    HELLO_BYTES_MAX,
    ChannelHello,
    ChannelRefusal,
    ChannelWelcome,
    Kind,
    RefusalReason,
    Window,
    decode_greeting,
    encode_credit,
    encode_frame,
    encode_greeting,
    knock_with,
    new_keys,
    private_address,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.transport.zmq_channel import ZmqChannel
    from penstock.transport.zmq_link import Greeting

LIFE = 0x1234_5678_9ABC_DEF0
WINDOW = Window(8, 1 << 20)
HELLO = ChannelHello(name="rank 0", incarnation=LIFE, window=WINDOW)
LAST = ChannelHello(name="the last", incarnation=LIFE, window=WINDOW)
SETTINGS = ChannelSettings(window_frames=8, silence_s=600.0, open_s=60.0)
"""Patient: a raw peer has no pulse, and a busy machine takes its time."""


class Raw:
    """A peer that says byte for byte what a test wants it to."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.lobby = self.context.socket(zmq.DEALER)
        self.lobby.connect(listener.address)
        self.link = self.context.socket(zmq.PAIR)

    def say(self, *parts: bytes) -> Greeting | None:
        """Sends a greeting, and returns the listener's answer, if any."""
        self.lobby.send_multipart(parts)
        deadline = soon()
        before = self.listener.refused.copy()
        while time.monotonic() < deadline:
            self.listener.accept(deadline=time.monotonic() + 0.01)
            if self.lobby.poll(0):
                return decode_greeting(self.lobby.recv())
            if self.listener.refused[RefusalReason.GARBAGE] > before[RefusalReason.GARBAGE]:
                return None  # All others are answered.
        raise AssertionError("neither answered nor refused")

    def enter(self, hello: ChannelHello = HELLO) -> ChannelWelcome:
        welcome = self.say(encode_greeting(hello))
        assert isinstance(welcome, ChannelWelcome), welcome
        if welcome.link.startswith("tcp://"):
            knock_with(self.link, welcome.key.encode())
        self.link.connect(welcome.link)
        return welcome

    def open(self, hello: ChannelHello = HELLO) -> ZmqChannel:
        self.enter(hello)
        self.send(Kind.OPEN, 0)
        channel = self.listener.accept(deadline=soon())
        assert channel is not None
        return channel

    def send(self, kind: Kind, sequence: int, payload: bytes = b"", life: int = LIFE) -> None:
        self.link.send(encode_frame(kind, life, sequence, payload))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture(name="listener", params=[IPC, LOOPBACK], ids=["ipc", "tcp"])
def make_listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    with Listener("engine", request.param, settings=SETTINGS) as listener:
        yield listener


@pytest.fixture(name="raw")
def make_raw(listener: Listener) -> Iterator[Raw]:
    raw = Raw(listener)
    yield raw
    raw.close()


@pytest.fixture(name="channel")
def open_channel(raw: Raw) -> Iterator[ZmqChannel]:
    channel = raw.open()
    yield channel
    channel.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"PENSTOCK",
        b"PENSTOCK\x02",
        b"GET / HTTP/1.1\r\n\r\n",
        encode_greeting(HELLO)[:-1],
        encode_greeting(HELLO) + b"\0",
        encode_greeting(HELLO).replace(b"rank 0", b"\xff\xff\xff\xff\xff\xff"),
        encode_greeting(HELLO).replace(b"name", b"Name"),
        encode_greeting(ChannelHello(name="", incarnation=LIFE, window=WINDOW)),
        encode_greeting(ChannelHello(name="x" * 101, incarnation=LIFE, window=WINDOW)),
        encode_greeting(ChannelHello(name="x", incarnation=LIFE, window=Window(0, 1))),
        encode_greeting(ChannelRefusal(cause="a refusal to a listener")),
        encode_greeting(HELLO).ljust(HELLO_BYTES_MAX, b"\0"),
    ],
    ids=lambda greeting: greeting[:12].hex() + f"-{len(greeting)}",
)
def test_a_greeting_that_is_no_hello_is_refused_without_an_answer(
    listener: Listener, raw: Raw, greeting: bytes
) -> None:
    answer = raw.say(greeting)

    assert answer is None
    assert listener.refused == {RefusalReason.GARBAGE: 1}
    assert isinstance(raw.say(encode_greeting(HELLO)), ChannelWelcome)


def test_a_hello_in_several_parts_is_refused(listener: Listener, raw: Raw) -> None:
    assert raw.say(encode_greeting(HELLO), b"") is None
    assert listener.refused == {RefusalReason.GARBAGE: 1}


def test_a_hello_with_an_unknown_field_is_refused(listener: Listener, raw: Raw) -> None:
    """A newer peer that needs the field understood would be misunderstood."""
    known = encode_greeting(HELLO)
    fields = known[9]  # A msgpack map of so many fields.
    unknown = known[:9] + bytes((fields + 1,)) + known[10:] + b"\xa5extra\x01"

    assert raw.say(unknown) is None
    assert listener.refused == {RefusalReason.GARBAGE: 1}


def test_a_hello_of_another_version_is_refused_with_both_versions(
    listener: Listener, raw: Raw
) -> None:
    hello = bytearray(encode_greeting(HELLO))
    hello[8] = 1

    assert raw.say(bytes(hello)) == ChannelRefusal(
        cause="greeting has version 1, must have version 2: both sides must be of one release"
    )
    assert listener.refused == {RefusalReason.VERSION: 1}


def test_a_hello_that_was_here_before_is_refused(listener: Listener, raw: Raw) -> None:
    raw.enter()

    answer = raw.say(encode_greeting(HELLO))

    assert isinstance(answer, ChannelRefusal)
    assert answer.cause == "rank 0 of incarnation 123456789abcdef0 was here before"
    assert listener.refused == {RefusalReason.REPLAYED: 1}


def test_a_hello_that_is_too_long_ends_that_connection_and_no_other(
    listener: Listener, raw: Raw
) -> None:
    """ZeroMQ refuses it before it is read."""
    other = Raw(listener)
    other.lobby.send(bytes(HELLO_BYTES_MAX + 1))

    assert isinstance(raw.say(encode_greeting(HELLO)), ChannelWelcome)
    assert listener.refused.total() == 0
    other.close()


def crowd(raw: Raw) -> list[Greeting | None]:
    """As many peers as are let in at a time, none of which comes."""
    hellos = [
        ChannelHello(name=f"rank {number}", incarnation=LIFE, window=WINDOW)
        for number in range(WAITING_MAX)
    ]
    return [raw.say(encode_greeting(hello)) for hello in hellos]


def test_a_bounded_number_is_let_in_at_a_time() -> None:
    with Listener("engine", settings=SETTINGS) as listener:
        raw = Raw(listener)

        answers = crowd(raw)
        crowded = raw.say(encode_greeting(LAST))
        raw.close()

    assert all(isinstance(answer, ChannelWelcome) for answer in answers)
    assert crowded == ChannelRefusal(cause="64 peers are being let in, at most that many")
    assert listener.refused == {RefusalReason.CROWDED: 1}


def test_who_is_let_in_but_does_not_come_is_forgotten_in_time() -> None:
    with Listener("engine", settings=ChannelSettings(open_s=0.2)) as listener:
        raw = Raw(listener)
        crowd(raw)
        deadline = soon()

        while (alarm := listener.alarm) is not None:
            assert time.monotonic() < deadline, "somebody is still awaited"
            assert listener.accept(deadline=alarm) is None
        later = raw.say(encode_greeting(LAST))
        raw.close()

    assert isinstance(later, ChannelWelcome)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", RefusalReason.GARBAGE),
        (b"\x02" + bytes(HEADER_BYTES - 2), RefusalReason.GARBAGE),
        (
            encode_frame(Kind.FRAME, LIFE, 1, b"x").replace(b"\x02", b"\x09", 1),
            RefusalReason.GARBAGE,
        ),
        (encode_frame(Kind.CLOSE, LIFE, 1, b"x"), RefusalReason.GARBAGE),
        (encode_frame(Kind.CREDIT, LIFE, 1, bytes(15)), RefusalReason.GARBAGE),
        (encode_frame(Kind.CREDIT, LIFE, 1, encode_credit(1, 0)), RefusalReason.GARBAGE),
        (encode_frame(Kind.OPEN, LIFE, 1), RefusalReason.GARBAGE),
        (encode_frame(Kind.FRAME, LIFE + 1, 1, b"x"), RefusalReason.STALE),
        (encode_frame(Kind.CLOSE, LIFE - 1, 1), RefusalReason.STALE),
        (encode_frame(Kind.FRAME, LIFE, 0, b"x"), RefusalReason.REPLAYED),
        (encode_frame(Kind.CLOSE, LIFE, 0), RefusalReason.REPLAYED),
    ],
)
def test_a_frame_that_does_not_belong_is_refused_and_the_channel_goes_on(
    raw: Raw, channel: ZmqChannel, message: bytes, reason: RefusalReason
) -> None:
    raw.link.send(message)

    raw.send(Kind.FRAME, 1, b"good")

    assert receive_frame(channel) == b"good"
    assert channel.refused == {reason: 1}
    assert channel.is_open


def test_a_frame_in_several_parts_is_refused(raw: Raw, channel: ZmqChannel) -> None:
    good = encode_frame(Kind.FRAME, LIFE, 1, b"good")

    raw.link.send_multipart([good, good])
    raw.link.send(good)

    assert receive_frame(channel) == b"good"
    assert channel.refused == {RefusalReason.GARBAGE: 1}


def test_a_replayed_frame_arrives_once(raw: Raw, channel: ZmqChannel) -> None:
    for _ in range(3):
        raw.send(Kind.FRAME, 1, b"once")
    raw.send(Kind.FRAME, 2, b"then")

    assert [receive_frame(channel), receive_frame(channel)] == [b"once", b"then"]
    assert channel.receive() == Empty()
    assert channel.refused == {RefusalReason.REPLAYED: 2}


def test_a_lost_frame_fails_the_channel(raw: Raw, channel: ZmqChannel) -> None:
    """An order that has a hole is none."""
    raw.send(Kind.FRAME, 1, b"first")
    raw.send(Kind.FRAME, 4, b"fourth")

    assert receive_frame(channel) == b"first"
    assert receive_end(channel) == ChannelFailed("frames 2 to 3 of rank 0 were lost")


def test_a_frame_that_is_too_long_fails_the_channel(raw: Raw, channel: ZmqChannel) -> None:
    """ZeroMQ ends the connection before it is read."""
    raw.send(Kind.FRAME, 1, bytes(FRAME_BYTES_MAX + 1))

    assert receive_end(channel) == ChannelFailed("the connection to rank 0 was lost")


def test_a_peer_that_ignores_its_window_fails(raw: Raw, channel: ZmqChannel) -> None:
    """Memory that it may take is bounded, whatever it does."""
    for sequence in range(1, SETTINGS.window_frames + 2):
        raw.send(Kind.FRAME, sequence, b"x")
    while not channel.failure:
        assert wait_readable(channel.descriptor, soon())
        channel._pump()

    frames = [receive_frame(channel) for _ in range(SETTINGS.window_frames + 1)]
    end = receive_end(channel)

    assert len(frames) == 9
    assert isinstance(end, ChannelFailed)
    assert "9 frames of 9 bytes ahead of its credit of 8 frames" in end.cause


def test_another_peer_cannot_take_the_place_of_one_that_is_there(
    raw: Raw, channel: ZmqChannel
) -> None:
    """Nor does it disturb the one that is there, though it knows the address and comes and goes."""
    address = raw.link.getsockopt_string(zmq.LAST_ENDPOINT)
    for _ in range(5):
        stranger = raw.context.socket(zmq.PAIR)
        stranger.linger = 0
        stranger.connect(address)
        stranger.send(encode_frame(Kind.CLOSE, LIFE, 1))
        channel.receive(deadline=time.monotonic() + 0.02)
        stranger.close(linger=0)

    raw.send(Kind.FRAME, 1, b"good")

    assert receive_frame(channel) == b"good"
    assert channel.is_open


def mutations(message: bytes, chance: random.Random) -> bytes:
    """The message with some bytes changed, added or removed."""
    changed = bytearray(message)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(3):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1:
                changed[at:at] = chance.randbytes(chance.randrange(1, 20))
            case _:
                del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(2))
def test_mutated_greetings_never_break_a_listener(listener: Listener, raw: Raw, seed: int) -> None:
    """Few of them are good hellos of somebody else; the others are refused and counted."""
    chance = random.Random(seed)
    garbage = 0
    for _ in range(80):
        mutated = mutations(encode_greeting(HELLO), chance)[:HELLO_BYTES_MAX]
        answer = raw.say(mutated)
        garbage += answer is None

    assert listener.refused[RefusalReason.GARBAGE] == garbage > 40
    assert isinstance(raw.say(encode_greeting(LAST)), ChannelWelcome)


@pytest.mark.parametrize("seed", range(8))
def test_mutated_headers_never_deliver_a_frame_out_of_its_turn(
    raw: Raw, channel: ZmqChannel, seed: int
) -> None:
    """Every frame is received once and in order, until a header is mutated into a later one."""
    chance = random.Random(seed)
    received = mutated_count = 0
    for sequence in range(1, 200):
        good = encode_frame(Kind.FRAME, LIFE, sequence, sequence.to_bytes(8, "big"))
        mutated = mutations(good[:HEADER_BYTES], chance)
        differs = mutated[:HEADER_BYTES] != good[:HEADER_BYTES]
        if differs:
            raw.link.send(mutated)
        raw.link.send(good)
        answer = channel.receive(deadline=soon())
        if answer != ReceivedFrame(sequence.to_bytes(8, "big")):
            break
        received += 1
        mutated_count += differs

    ended = channel.receive()
    assert received == 199 or isinstance(ended, ChannelFailed | ChannelClosed)
    assert channel.refused.total() == mutated_count


@pytest.fixture(name="front")
def make_front() -> Iterator[zmq.Socket[bytes]]:
    """A listener that says byte for byte what a test wants it to."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.bind(private_address(IPC))
    yield front
    context.destroy(linger=0)


def dial_for(front: zmq.Socket[bytes], answer: bytes, settings: ChannelSettings) -> ZmqChannel:
    address = front.getsockopt_string(zmq.LAST_ENDPOINT)
    channel = dial(address, name="rank 0", settings=settings)
    route, _ = front.recv_multipart()
    front.send_multipart([route, answer])
    return channel


@pytest.mark.parametrize("version", [0, 1, 255])
def test_a_listener_of_another_version_fails_the_channel_with_both_versions(
    front: zmq.Socket[bytes], version: int
) -> None:
    answer = b"PENSTOCK" + bytes((version,)) + b"whatever it says"

    channel = dial_for(front, answer, SETTINGS)

    assert receive_end(channel) == ChannelFailed(
        f"{channel.name} refused: greeting has version {version}, must have version 2: "
        "both sides must be of one release"
    )
    assert channel.refused == {RefusalReason.VERSION: 1}
    channel.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"PENSTOCK\x02\x80",
        encode_greeting(HELLO),
        encode_greeting(
            ChannelWelcome(
                name="x",
                incarnation=1,
                window=WINDOW,
                link="tcp://192.0.2.1:80",
                pulse="tcp://192.0.2.1:80",
                key="k" * 40,
            )
        ),
    ],
    ids=["nothing", "empty", "hello", "another transport"],
)
def test_an_answer_that_is_none_is_ignored_until_the_channel_fails(
    front: zmq.Socket[bytes], answer: bytes
) -> None:
    channel = dial_for(front, answer, SETTINGS)
    while channel.receive() == Empty() and not channel.refused:
        assert wait_readable(channel.descriptor, soon())

    channel._open_deadline = time.monotonic()  # Or the test would take a minute.

    assert receive_end(channel) == ChannelFailed(f"no answer from {channel.name} in 60.0 s")
    assert channel.refused == {RefusalReason.GARBAGE: 1}
    channel.close()


def test_a_channel_whose_listener_is_gone_before_it_gets_there_fails(
    front: zmq.Socket[bytes],
) -> None:
    nowhere = private_address(IPC)
    key = new_keys().public.decode()
    welcome = ChannelWelcome(
        name="x", incarnation=1, window=WINDOW, link=nowhere, pulse=nowhere, key=key
    )

    channel = dial_for(front, encode_greeting(welcome), SETTINGS)

    assert receive_end(channel) == ChannelFailed("x was gone before the connection was made")
    channel.close()


# A greeting of ZeroMQ for a mechanism that the other end does not speak.
STRANGE = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_a_stranger_that_breaks_off_before_the_hello_is_a_listener_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = zmq.Socket.connect

    def connect_slowly(lobby: zmq.Socket[bytes], address: str) -> None:
        connect(lobby, address)
        deadline = soon()
        while address.startswith("ipc://") and lobby.poll(0, zmq.POLLOUT):
            assert time.monotonic() < deadline

    monkeypatch.setattr(zmq.Socket, "connect", connect_slowly)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "socket"))
        stranger.listen()
        stranger.settimeout(60)

        def break_off() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(STRANGE)
                while connection.recv(1024):
                    pass

        thread = threading.Thread(target=break_off, daemon=True)
        thread.start()
        channel = dial(
            f"ipc://{tmp_path}/socket", name="rank 0", settings=ChannelSettings(open_s=0.2)
        )

        assert not channel.wait_open(deadline=soon())
        assert "no answer from" in str(channel.failure)
        assert "it breaks off every connection" in str(channel.failure)
        channel.close()
        thread.join(60)
