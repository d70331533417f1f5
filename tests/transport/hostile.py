"""What a stranger can send at a socket, byte for byte: as a plain stream, and as ZeroMQ.

for place in bound_by(pid): storm(place, random.Random(seed))
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq

from penstock.transport.zmq_link import ChannelHello, Window, encode_greeting

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

LISTENING_TCP = "0A"
LISTENING_UNIX = "01"
_PATIENCE_S = 0.05
"""A stranger stays for so long when nothing is said to it."""


class Place(NamedTuple):
    """Where a process listens."""

    family: socket.AddressFamily
    kind: int
    address: str | tuple[str, int]

    @property
    def url(self) -> str:
        """The same for ZeroMQ."""
        if isinstance(self.address, str):
            return f"ipc://{self.address.replace(chr(0), '@')}"
        return f"tcp://{self.address[0]}:{self.address[1]}"


def bound_by(pid: int) -> list[Place]:
    """Every socket that a process listens on, as the kernel knows them."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    found: list[Place] = []
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, kind, _, inode, *path = line.split(maxsplit=7)
        if inode in inodes and int(flags, 16) & 0x10000 and path:
            found.append(Place(socket.AF_UNIX, int(kind, 16), path[0].replace("@", "\0", 1)))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == LISTENING_TCP and rest[5] in inodes:
            host, _, port = local.partition(":")
            address = socket.inet_ntoa(struct.pack("<I", int(host, 16)))
            found.append(Place(socket.AF_INET, socket.SOCK_STREAM, (address, int(port, 16))))
    return found


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
NULL = GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
PING = b"\x04\x07\x04PING\x00\x00"


def command(body: bytes) -> bytes:
    return b"\x04" + bytes((len(body),)) + body


def ready(kind: bytes) -> bytes:
    length = struct.pack(">I", len(kind))
    identity = b"\x08Identity" + struct.pack(">I", 0)
    return command(b"\x05READY\x0bSocket-Type" + length + kind + identity)


def frame(body: bytes, *, more: bool = False) -> bytes:
    return bytes((int(more), len(body))) + body


def streams(chance: random.Random) -> Iterator[bytes]:
    """Bytes that a stranger writes to a socket before it hangs up."""
    hello = encode_greeting(ChannelHello(name="decode-0", incarnation=7, window=Window(8, 1 << 20)))
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield chance.randbytes(3)
    yield chance.randbytes(5000)
    yield b"\xff" * 200
    yield bytes(200)
    for cut in (1, 9, 10, 11, 12, 32, 63):
        yield NULL[:cut]
    yield b"\x01\x00" + frame(b"x", more=True)  # ZMTP 1.0: no greeting.
    yield b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + frame(b"x", more=True)  # ZMTP 2.0.
    yield CURVE + command(b"\x05HELLO" + chance.randbytes(194))
    yield CURVE + command(b"\x05HELLO") + command(b"\x08INITIATE" + chance.randbytes(200))
    for kind in (b"DEALER", b"PAIR", b"ROUTER", b"SUB", b"nonsense"):
        met = NULL + ready(kind)
        yield met
        yield met + frame(b"x", more=True)  # Three bytes, and no part follows.
        yield met + frame(b"", more=True) + frame(b"x")
        yield met + frame(b"") * 10
        yield met + frame(hello)
        yield met + frame(hello) * 3
        yield met + frame(b"x", more=True) * 3000
        yield met + b"\x02" + struct.pack(">Q", (1 << 63) - 1) + b"x"  # A huge one, cut off.
        yield met + b"\x00\xff" + b"x" * 100
        yield met + b"\x00\x01x" * 3000 + PING * 3  # A full queue, and then a heartbeat.
        yield met + b"\x00\x01x" * 80 + PING * 3
        yield met + b"\x00\x01x" * 200 + PING * 3
        yield met + PING * 50
        yield met + command(b"\x04PING") + command(b"\x04PING\x01") + command(b"\x04PONG")
        yield met + command(b"\x05ERROR\xff") + command(b"\x09SUBSCRIBE") + command(b"\x06CANCEL")
        yield met + ready(kind)
        yield met + chance.randbytes(300)


def send_stream(place: Place, content: bytes, *, read: bool) -> None:
    """Writes bytes at a socket, and hangs up, whether it took them or not."""
    with socket.socket(place.family, place.kind) as stranger, suppress(OSError):
        stranger.settimeout(_PATIENCE_S)
        stranger.connect(place.address)
        if place.kind != socket.SOCK_STREAM:
            stranger.send(content[:4000])
            return
        stranger.sendall(content[: len(NULL)])
        if content.startswith(GREETING):
            # What comes before both have greeted is not read when the connection ends.
            got = 0
            while got < len(NULL):
                got += len(stranger.recv(4000)) or len(NULL)
        stranger.sendall(content[len(NULL) :])
        if read:
            while stranger.recv(4000):
                pass


def storm(place: Place, chance: random.Random, *, count: int = 1000) -> None:
    """Everything above, or so many of it, and the same as ZeroMQ would send it."""
    found = list(streams(chance))
    for content in chance.sample(found, min(count, len(found))):
        send_stream(place, content, read=True)
    if place.kind != socket.SOCK_STREAM:
        return
    hello = encode_greeting(ChannelHello(name="decode-0", incarnation=9, window=Window(8, 1 << 20)))
    with zmq.Context() as context:
        for kind in (zmq.DEALER, zmq.PAIR, zmq.REQ, zmq.ROUTER, zmq.PUSH):
            stranger = context.socket(kind)
            stranger.linger = 100
            stranger.connect(place.url)
            for parts in ([hello], [hello, b""], [b"x"] * 50, [bytes(100_000)], [b""]):
                with suppress(zmq.ZMQError):
                    stranger.send_multipart(parts, zmq.DONTWAIT)
            stranger.poll(20)
            stranger.close()
