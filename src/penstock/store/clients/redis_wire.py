"""Commands and replies over one connection to Redis, by a deadline, without copies.

redis-py opens the connection (names, TLS, passwords: `redis`); from then on its socket
is used here. A value goes from the caller's memory to the socket and from the socket to the
caller's memory. redis-py would copy it two times in each direction, and bounds the time between
two pieces of an answer, not that of an answer: one that trickles never ends
(docs/decisions/0018-clients-of-shared-stores.md has the figures).

The one rule: after any error the connection is closed. Nobody knows which replies would still come,
and they would be taken for those of the next commands.
"""

from __future__ import annotations

import select
import ssl
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.store.clients.blobs import BlobStoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

AHEAD_BYTES = 4 << 20
"""How much is asked for before it is taken. The server has that much in its memory for this
connection; more does not make it faster."""
LATE_S = 0.01
"""By how much a call of the socket may end after the deadline."""
AHEAD_COMMANDS = 128
BUFFER_BYTES = 64 << 10
"""Small replies and small ranges are taken from the socket together; a range of at least this size
goes straight to its target."""
VECTORS_MAX = 512
"""Buffers of one `sendmsg`; the system takes 1,024."""
LINE_BYTES_MAX = 4_096
DEPTH_MAX = 4
"""Lists in lists of a reply; `CLUSTER SLOTS` has three levels."""
MEMBERS_MAX = 1 << 16


class ErrorReply(NamedTuple):
    """The server refused one command. The text begins with a word for the kind of error."""

    text: str

    @property
    def kind(self) -> str:
        """Such as `OOM`, `READONLY` or `MOVED`."""
        return self.text.partition(" ")[0]


class Taken(NamedTuple):
    """A value of this size went to where the command said."""

    size_bytes: int


Reply = int | bytes | str | ErrorReply | Taken | list["Reply"] | None


class RedisCommand(NamedTuple):
    """A command, and what becomes of the value in its reply."""

    request: Sequence[bytes | memoryview]
    places: Sequence[memoryview | int] | None = None
    """Memory that the value goes to; a number is that many bytes to leave out. `None`: the reply
    is the value."""
    reply_bytes: int = 0
    """How large the reply may become."""


def command(*words: bytes) -> RedisCommand:
    """A command of small words, whose reply is small too."""
    return RedisCommand([_framed(words)])


def command_into(places: Sequence[memoryview | int], *words: bytes) -> RedisCommand:
    """A command whose reply is a value that goes to memory."""
    size = sum(place if isinstance(place, int) else place.nbytes for place in places)
    return RedisCommand([_framed(words)], places, size)


def command_of(name: bytes, buffers: Sequence[memoryview], *options: bytes) -> RedisCommand:
    """`SET` of a value that lies in several buffers."""
    size = sum(buffer.nbytes for buffer in buffers)
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
        3 + len(options),
        len(name),
        name,
        size,
    )
    tail = b"".join((b"\r\n", *(b"$%d\r\n%b\r\n" % (len(each), each) for each in options)))
    return RedisCommand([head, *buffers, tail])


def _framed(words: Sequence[bytes]) -> bytes:
    return b"".join(
        (b"*%d\r\n" % len(words), *(b"$%d\r\n%b\r\n" % (len(each), each) for each in words))
    )


class RedisWire:
    """One connection. One thread uses it at a time."""

    def __init__(self, sock: socket.socket, peer: str, close: Callable[[], None]) -> None:
        self.peer = peer
        self._socket = sock
        self._close = close
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = 0
        self._end = 0
        self._deadline = 0.0
        self._limit_s = -1.0
        """What the socket was told last."""
        self._gathers = not isinstance(sock, ssl.SSLSocket)

    @property
    def local_host(self) -> str:
        """The address of this machine by which the server is reached."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        self._close()

    def is_idle(self) -> bool:
        """Whether it can be used: nothing came since the last reply, not even its end."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return self._start == self._end and not poller.poll(0)

    def exchange(self, commands: Sequence[RedisCommand], deadline: float) -> list[Reply]:
        """Sends commands and takes their replies.

        Raises `BlobStoreError`: the connection is of no use any more; it is closed.
        """
        self._deadline = deadline
        begun = time.monotonic()
        whole = False
        try:
            replies = self._exchange(commands)
            whole = True
        except TimeoutError:
            waited = time.monotonic() - begun
            raise BlobStoreError(f"{self.peer} did not answer in {waited:.3g} s") from None
        except OSError as problem:
            reason = problem.strerror or str(problem) or type(problem).__name__
            raise BlobStoreError(f"{self.peer}: the connection was lost: {reason}") from None
        except _ProtocolError as problem:
            raise BlobStoreError(f"{self.peer} does not answer as Redis does: {problem}") from None
        finally:
            if not whole:
                self._close()
        return replies

    def _exchange(self, commands: Sequence[RedisCommand]) -> list[Reply]:
        replies: list[Reply] = []
        sent = 0
        ahead_bytes = 0
        for index, current in enumerate(commands):
            batch: list[bytes | memoryview] = []
            while sent < len(commands) and sent - index < AHEAD_COMMANDS:
                following = commands[sent]
                if sent > index and ahead_bytes + following.reply_bytes > AHEAD_BYTES:
                    break
                batch += following.request
                ahead_bytes += following.reply_bytes
                sent += 1
            if batch:
                self._send(batch)
            replies.append(self._reply(current.places))
            ahead_bytes -= current.reply_bytes
        return replies

    def _wait(self) -> None:
        """Bounds the next call of the socket by the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        # Telling the socket is a call of the system; a large value takes a hundred of them.
        if not left <= self._limit_s <= left + LATE_S:
            self._socket.settimeout(left)
            self._limit_s = left

    def _send(self, parts: list[bytes | memoryview]) -> None:
        if not self._gathers:
            # A record of TLS for each small part would cost more than to join them.
            for part in _joined(parts):
                self._wait()
                self._socket.sendall(part)
            return
        index = 0
        while index < len(parts):
            self._wait()
            count = self._socket.sendmsg(parts[index : index + VECTORS_MAX])
            while index < len(parts) and count >= memoryview(parts[index]).nbytes:
                count -= memoryview(parts[index]).nbytes
                index += 1
            if count:
                parts[index] = memoryview(parts[index])[count:]

    def _reply(self, places: Sequence[memoryview | int] | None, depth: int = 0) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._value(_number(rest), places)
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b"-":
            return ErrorReply(rest.decode("utf-8", "replace"))
        if kind == b"*" and depth < DEPTH_MAX:
            count = _number(rest)
            if count > MEMBERS_MAX:
                raise _ProtocolError(f"a list of {count} members")
            return [self._reply(None, depth + 1) for _ in range(count)] if count >= 0 else None
        raise _ProtocolError(f"a reply begins with {bytes(line[:16])!r}")

    def _value(self, size: int, places: Sequence[memoryview | int] | None) -> Reply:
        if size < 0:
            return None
        value = bytearray()
        if places is None:
            if size > BUFFER_BYTES:
                raise _ProtocolError(f"a value of {size} bytes where a small one was asked for")
            value = bytearray(size)
        self._take([memoryview(value)] if places is None else places, size)
        if self._line():
            raise _ProtocolError(f"a value of {size} bytes does not end after them")
        return bytes(value) if places is None else Taken(size)

    def _take(self, places: Sequence[memoryview | int], size: int) -> None:
        """Puts the next bytes where they belong; there may be fewer than were asked for."""
        left = size
        for place in places:
            if not left:
                return
            if isinstance(place, int):
                count = min(place, left)
                self._skip(count)
            else:
                count = min(place.nbytes, left)
                self._fill(place[:count] if count < place.nbytes else place)
            left -= count
        if left:
            raise _ProtocolError(f"a value of {size} bytes, which is {left} more than asked for")

    def _fill(self, target: memoryview) -> None:
        done = 0
        size = target.nbytes
        while done < size:
            buffered = self._end - self._start
            if buffered:
                count = min(buffered, size - done)
                target[done : done + count] = self._buffer[self._start : self._start + count]
                self._start += count
            elif size - done >= BUFFER_BYTES:
                self._wait()
                count = self._socket.recv_into(target[done:])
                if not count:
                    raise ConnectionResetError("it was closed by the server")
            else:
                self._receive()
                count = 0
            done += count

    def _skip(self, size: int) -> None:
        while size:
            if self._start == self._end:
                self._receive()
            count = min(self._end - self._start, size)
            self._start += count
            size -= count

    def _receive(self) -> None:
        """Gets more into the buffer, of which nothing before `start` is needed."""
        kept = self._end - self._start
        if kept and self._start:
            self._buffer[:kept] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, kept
        self._wait()
        count = self._socket.recv_into(self._buffer[kept:])
        if not count:
            raise ConnectionResetError("it was closed by the server")
        self._end += count

    def _line(self) -> bytes:
        """The next line, without its end."""
        while True:
            seen = bytes(self._buffer[self._start : min(self._end, self._start + LINE_BYTES_MAX)])
            end = seen.find(b"\r\n")
            if end >= 0:
                self._start += end + 2
                return seen[:end]
            if len(seen) == LINE_BYTES_MAX:
                raise _ProtocolError(f"a line begins with {seen[:16]!r} and does not end")
            self._receive()


class _ProtocolError(Exception):
    """What came is no reply."""


def _number(text: bytes) -> int:
    if len(text) > 20 or not text.removeprefix(b"-").isdigit():
        raise _ProtocolError(f"{text[:16]!r} where a number belongs")
    return int(text)


def _joined(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes; small parts that follow each other are one."""
    joined: list[bytes | memoryview] = []
    small: list[bytes | memoryview] = []
    for part in parts:
        if memoryview(part).nbytes < BUFFER_BYTES:
            small.append(part)
            continue
        joined += [b"".join(small), part]
        small = []
    return [*joined, b"".join(small)]
