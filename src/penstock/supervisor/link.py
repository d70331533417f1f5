"""The engine's end of the channel, and its watch over the supervisor's process.

The one rule: the end is noticed, however it came. The channel tells of most; the pidfd tells
even where a copy of the other end, in some process that the engine forked, keeps the channel
open.
"""

from __future__ import annotations

import math
import os
import select
import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import UnavailableError
from penstock.supervisor.descriptors import close_all
from penstock.supervisor.messages import AnyReply, Event, MessageError, decode_answer
from penstock.supervisor.wire import Packet, receive_packet, send_packet
from penstock.transport.base import Closed, Empty, Failed

if TYPE_CHECKING:
    import socket
    import subprocess

DYING_S = 0.2
"""A process that is killed closes its channel a moment before its status can be had."""

KILLED_S = 5.0
"""Nothing survives SIGKILL, but the kernel may be busy."""


class Answer(NamedTuple):
    """A reply or an event, and the descriptors that came with it; the taker owns them."""

    message: AnyReply | Event
    descriptors: tuple[int, ...]


class Link:
    """The way to one supervisor."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.end: Closed | Failed | None = None
        """How it ended; absent while it has not."""
        self._channel = channel
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._poll = select.epoll()
        for fd in (channel.fileno(), self._pidfd):
            self._poll.register(fd, select.EPOLLIN)

    @property
    def descriptor(self) -> int:
        """Readable when there is something to take."""
        return self._poll.fileno()

    def send(self, frame: bytes, fd: int | None, *, deadline: float) -> None:
        """Sends a frame.

        Raises:
            UnavailableError: the supervisor is lost, or takes nothing until the deadline.
        """
        writable = select.poll()
        writable.register(self._channel, select.POLLOUT)
        try:
            while not send_packet(self._channel, frame, fd):
                if not writable.poll(_left_ms(deadline)):
                    raise UnavailableError("the supervisor takes no requests: deadline passed")
        except ConnectionError:
            raise UnavailableError(self.lose().cause) from None

    def take(self, deadline: float | None) -> Answer | Empty | Closed | Failed:
        """The next message; waits for it until `deadline`, if given."""
        if self.end is not None:
            return self.end
        left_ms = 0 if deadline is None else _left_ms(deadline)
        ready = [fd for fd, _ in self._poll.poll(left_ms / 1000)]
        if not ready:
            return Empty()
        if self._channel.fileno() not in ready:
            return self.lose()
        packet = receive_packet(self._channel)
        if isinstance(packet, Empty):
            return packet
        return self._read(packet) if isinstance(packet, Packet) else self.lose()

    def _read(self, packet: Packet) -> Answer | Failed:
        try:
            message = decode_answer(packet.frame)
        except MessageError as error:
            close_all(packet.descriptors)
            return self.lose(f"the supervisor cannot be understood: {error}")
        return Answer(message, packet.descriptors)

    def lose(self, cause: str = "") -> Failed:
        """Ends the link, which ends the supervisor and its processes, if they have not yet."""
        lost = Failed(cause or self._cause())
        if self.end is None:
            self.end = lost
            self._cut()
        return lost

    def _cause(self) -> str:
        who = f"the supervisor (process {self._process.pid})"
        if not self._ended_by(time.monotonic() + DYING_S):
            return f"{who} closed its channel"
        status = self._process.poll()
        if status is None or status >= 0:
            return f"{who} ended: {status}"
        return f"{who} ended by signal {-status}"

    def close(self, *, deadline: float) -> None:
        """Ends the link in good order; the supervisor's process is gone afterwards."""
        self.end = self.end or Closed()
        self._cut()
        if not self._ended_by(deadline):
            self._process.kill()  # Which kills its processes, too.
            self._ended_by(time.monotonic() + KILLED_S)
        self._process.poll()
        if not self._poll.closed:
            self._poll.close()
            os.close(self._pidfd)

    def _cut(self) -> None:
        if self._channel.fileno() >= 0:
            self._poll.unregister(self._channel.fileno())
            self._channel.close()

    def _ended_by(self, deadline: float) -> bool:
        if self._process.poll() is not None:
            return True
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        return bool(ended.poll(_left_ms(deadline)))


def require_deadline(deadline: float) -> None:
    """Refuses what is no time: nothing here waits for ever."""
    if not math.isfinite(deadline):
        raise ValueError(f"deadline is {deadline}, must be a time on the monotonic clock")


def _left_ms(deadline: float) -> int:
    # Rounded up: a poll that ended a little early would only be repeated.
    return max(0, math.ceil((deadline - time.monotonic()) * 1000))
