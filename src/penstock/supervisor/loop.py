"""The supervisor's one loop: the channel, the engine, the processes, and the time.

Everything it waits for is a descriptor or a time, so that one poll is all its waiting, and an
idle supervisor costs nothing. The one rule: nothing that comes over the channel ends it but the
request to stop, and the channel's end. What it cannot read it refuses, and says so.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from penstock.supervisor.backlog import Backlog
from penstock.supervisor.crew import Crew
from penstock.supervisor.descriptors import close_all
from penstock.supervisor.holdings import Holdings
from penstock.supervisor.messages import (
    PROBLEM_CHARACTERS_MAX,
    AnyReply,
    Done,
    Fetch,
    Forget,
    Hold,
    MessageError,
    Ready,
    Refused,
    StartProcess,
    StopAll,
    StopProcess,
    decode_request,
    encode,
)
from penstock.supervisor.refusing import RefusedError, require_room
from penstock.supervisor.wire import Packet, receive_packet, send_packet
from penstock.transport.base import Closed, Failed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from penstock.supervisor.messages import AnyRequest, OtherRequest

REPLIES_MAX = 64
"""An engine that does not take its answers is not listened to until it does."""


class Loop:
    """A supervisor, between its start and its end."""

    def __init__(self, channel: socket.socket, engine: int) -> None:
        self._channel = channel
        self._engine = engine
        self._engine_gone = False
        self._stop_requests: list[int] = []
        self._stopped = False
        self._holdings = Holdings()
        self._events = Backlog()
        self._replies: deque[tuple[AnyReply, int | None]] = deque()
        self._crew = Crew(self._holdings, tell=self._events.add, answer=self._reply)

    def run(self) -> None:
        """Serves the engine until it is gone or has said stop, and all processes have ended."""
        self._reply(Ready(pid=os.getpid()))
        while True:
            self._flush()
            if self._over():  # Perhaps since this moment: then there is nothing to wait for.
                break
            called = self._wait()
            now = time.monotonic()
            for callback in called:
                callback(now)
            self._crew.advance(now)
            self._answer_stop()
        self._holdings.close()

    def _over(self) -> bool:
        if len(self._crew):
            return False
        return self._engine_gone or (self._stopped and not self._replies)

    def _answer_stop(self) -> None:
        if self._stop_requests and not len(self._crew):
            for request in self._stop_requests:
                self._reply(Done(request=request))
            self._stop_requests.clear()
            self._stopped = True

    # Waiting.

    def _wait(self) -> list[Callable[[float], object]]:
        poller = select.poll()
        callbacks: dict[int, Callable[[float], object]] = {}
        for fd, callback in self._crew.watched():
            poller.register(fd, select.POLLIN)
            callbacks[fd] = callback
        if not self._engine_gone:
            poller.register(self._engine, select.POLLIN)
            callbacks[self._engine] = self._lose_engine
            poller.register(self._channel, self._interest())
            callbacks[self._channel.fileno()] = self._serve
        ready = poller.poll(_timeout_ms(self._crew.due() - time.monotonic()))
        return [callbacks[fd] for fd, _ in ready]

    def _interest(self) -> int:
        reading = select.POLLIN if len(self._replies) < REPLIES_MAX else 0
        writing = select.POLLOUT if self._replies or len(self._events) else 0
        return reading | writing

    def _lose_engine(self, now: float) -> None:
        self._engine_gone = True
        self._crew.stop_all_at_once(now)

    # Talking.

    def _serve(self, now: float) -> None:
        if len(self._replies) >= REPLIES_MAX:
            return  # Writable, or hung up: then the next `_flush` finds out.
        packet = receive_packet(self._channel)
        if isinstance(packet, Closed | Failed):
            self._lose_engine(now)
        elif isinstance(packet, Packet):
            self._handle(packet, now)

    def _handle(self, packet: Packet, now: float) -> None:
        try:
            asked = _request_in(packet)
        except MessageError as error:
            self._refuse(error.request, "caller", str(error))
            close_all(packet.descriptors)
            return
        try:
            if isinstance(asked, Hold):
                self._hold(asked, packet.descriptors[0])
            else:
                self._carry_out(asked, now)
        except RefusedError as error:
            self._refuse(asked.request, error.blame, error.problem)
            close_all(packet.descriptors)

    def _hold(self, asked: Hold, fd: int) -> None:
        self._holdings.hold(asked.name, fd)
        self._reply(Done(request=asked.request))

    def _carry_out(self, asked: OtherRequest, now: float) -> None:
        match asked:
            case Fetch(request=request, name=name):
                self._fetch(request, name)
            case Forget(request=request, name=name):
                self._require_unused(name)
                self._holdings.forget(name)
                self._reply(Done(request=request))
            case StartProcess(request=request, spec=spec):
                self._crew.start(request, spec, now)
            case StopProcess(request=request, name=name, stop_s=stop_s):
                self._crew.stop(request, name, stop_s, now)
            case StopAll(request=request):
                require_room(self._stop_requests, "all processes")
                self._stop_requests.append(request)
                self._crew.stop_all_in_order(now)

    def _fetch(self, request: int, name: str) -> None:
        fd = self._holdings.fetch(name)
        try:
            self._reply(Done(request=request), fd)
        except OSError as error:
            problem = f"descriptor {name!r} cannot be sent: {error.strerror}"
            raise RefusedError(problem, blame="world") from error

    def _require_unused(self, name: str) -> None:
        if users := self._crew.users_of(name):
            raise RefusedError(
                f"descriptor {name!r} is in use: stop these processes first: {', '.join(users)}"
            )

    def _refuse(self, request: int, blame: Literal["caller", "world"], problem: str) -> None:
        self._reply(Refused(request=request, blame=blame, problem=problem[:PROBLEM_CHARACTERS_MAX]))

    def _reply(self, reply: AnyReply, fd: int | None = None) -> None:
        # A descriptor of its own: the name may be forgotten before the engine takes the answer.
        self._replies.append((reply, None if fd is None else os.dup(fd)))

    def _flush(self) -> None:
        """Sends what the engine has room for; events first, as they explain the answers."""
        try:
            while not self._engine_gone and self._send_next():
                pass
        except ConnectionError:
            self._lose_engine(time.monotonic())

    def _send_next(self) -> bool:
        if (event := self._events.next()) is not None:
            sent = send_packet(self._channel, encode(event))
            if sent:
                self._events.drop()
            return sent
        if not self._replies:
            return False
        reply, fd = self._replies[0]
        sent = send_packet(self._channel, encode(reply), fd)
        if sent:
            self._replies.popleft()
            close_all(() if fd is None else (fd,))
        return sent


def _request_in(packet: Packet) -> AnyRequest:
    if packet.problem:
        raise MessageError(packet.problem)
    asked = decode_request(packet.frame)
    came, wanted = len(packet.descriptors), int(isinstance(asked, Hold))
    if came != wanted:
        problem = f"{came} descriptors came with {type(asked).__name__}, must be {wanted}"
        raise MessageError(problem, request=asked.request)
    return asked


def _timeout_ms(seconds: float) -> int | None:
    # Rounded up: a poll that ended a little early would only be repeated.
    return None if math.isinf(seconds) else max(0, math.ceil(seconds * 1000))
