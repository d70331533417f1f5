"""The supervisor's loop: it serves the engine and watches the processes.

Everything it waits for is a descriptor or a time, so one poll does all the waiting, and an idle
supervisor uses no CPU. The one rule: only the request to stop and the end of the channel end it.
A frame that it cannot read is answered with the reason, and nothing else happens.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections import deque
from typing import TYPE_CHECKING, Literal

from penstock.supervisor.descriptors import HeldDescriptors, close_all
from penstock.supervisor.messages import (
    PROBLEM_CHARACTERS_MAX,
    AnyReply,
    Done,
    EventQueue,
    Fetch,
    Forget,
    Hold,
    MessageError,
    RequestRefused,
    RequestRefusedError,
    StartProcess,
    StopAll,
    StopProcess,
    SupervisorReady,
    decode_request,
    encode,
    receive_packet,
    require_room,
)
from penstock.supervisor.process_table import ProcessTable
from penstock.transport.base import ChannelClosed, ChannelFailed
from penstock.transport.packets import Packet, send_packet

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from penstock.supervisor.messages import AnyRequest, OtherRequest

REPLIES_MAX = 64
"""With more answers that the engine has not read, no further requests are read."""


class SupervisorLoop:
    """Runs one supervisor, from its start to its end."""

    def __init__(self, channel: socket.socket, engine: int) -> None:
        self._channel = channel
        self._engine = engine
        self._engine_gone = False
        self._stop_requests: list[int] = []
        self._stopped = False
        self._held = HeldDescriptors()
        self._events = EventQueue()
        self._replies: deque[tuple[AnyReply, int | None]] = deque()
        self._processes = ProcessTable(self._held, on_event=self._events.add, answer=self._reply)

    def run(self) -> None:
        """Serves the engine until it ends or asks to stop, and all processes have ended."""
        self._reply(SupervisorReady(pid=os.getpid()))
        while True:
            self._flush()
            if self._over():  # Asked here, as `_flush` may have sent the last answer.
                break
            called = self._wait()
            now = time.monotonic()
            for callback in called:
                callback(now)
            self._processes.advance(now)
            self._answer_stop()
        self._held.close()

    def _over(self) -> bool:
        if len(self._processes):
            return False
        return self._engine_gone or (self._stopped and not self._replies)

    def _answer_stop(self) -> None:
        if self._stop_requests and not len(self._processes):
            for request in self._stop_requests:
                self._reply(Done(request=request))
            self._stop_requests.clear()
            self._stopped = True

    # Waiting.

    def _wait(self) -> list[Callable[[float], object]]:
        poller = select.poll()
        callbacks: dict[int, Callable[[float], object]] = {}
        for fd, callback in self._processes.watched():
            poller.register(fd, select.POLLIN)
            callbacks[fd] = callback
        if not self._engine_gone:
            poller.register(self._engine, select.POLLIN)
            callbacks[self._engine] = self._lose_engine
            poller.register(self._channel, self._interest())
            callbacks[self._channel.fileno()] = self._serve
        ready = poller.poll(_timeout_ms(self._processes.due() - time.monotonic()))
        return [callbacks[fd] for fd, _ in ready]

    def _interest(self) -> int:
        reading = select.POLLIN if len(self._replies) < REPLIES_MAX else 0
        writing = select.POLLOUT if self._replies or len(self._events) else 0
        return reading | writing

    def _lose_engine(self, now: float) -> None:
        self._engine_gone = True
        self._processes.stop_all_at_once(now)

    # Requests and answers.

    def _serve(self, now: float) -> None:
        if len(self._replies) >= REPLIES_MAX:
            return  # Writable, or closed: the next `_flush` finds out.
        packet = receive_packet(self._channel)
        if isinstance(packet, ChannelClosed | ChannelFailed):
            self._lose_engine(now)
        elif isinstance(packet, Packet):
            self._handle(packet, now)

    def _handle(self, packet: Packet, now: float) -> None:
        try:
            asked = _read_request(packet)
        except MessageError as error:
            self._refuse(error.request, "caller", str(error))
            close_all(packet.descriptors)
            return
        try:
            if isinstance(asked, Hold):
                self._hold(asked, packet.descriptors[0])
            else:
                self._carry_out(asked, now)
        except RequestRefusedError as error:
            self._refuse(asked.request, error.blame, error.problem)
            close_all(packet.descriptors)

    def _hold(self, asked: Hold, fd: int) -> None:
        self._held.hold(asked.name, fd)
        self._reply(Done(request=asked.request))

    def _carry_out(self, asked: OtherRequest, now: float) -> None:
        match asked:
            case Fetch(request=request, name=name):
                self._fetch(request, name)
            case Forget(request=request, name=name):
                self._require_unused(name)
                self._held.forget(name)
                self._reply(Done(request=request))
            case StartProcess(request=request, spec=spec):
                self._processes.start(request, spec, now)
            case StopProcess(request=request, name=name, stop_s=stop_s):
                self._processes.stop(request, name, stop_s, now)
            case StopAll(request=request):
                require_room(self._stop_requests, "all processes")
                self._stop_requests.append(request)
                self._processes.stop_all_in_order(now)

    def _fetch(self, request: int, name: str) -> None:
        fd = self._held.fetch(name)
        try:
            self._reply(Done(request=request), fd)
        except OSError as error:
            problem = f"descriptor {name!r} cannot be sent: {error.strerror}"
            raise RequestRefusedError(problem, blame="world") from error

    def _require_unused(self, name: str) -> None:
        if users := self._processes.users_of(name):
            raise RequestRefusedError(
                f"descriptor {name!r} is in use: stop these processes first: {', '.join(users)}"
            )

    def _refuse(self, request: int, blame: Literal["caller", "world"], problem: str) -> None:
        self._reply(
            RequestRefused(request=request, blame=blame, problem=problem[:PROBLEM_CHARACTERS_MAX])
        )

    def _reply(self, reply: AnyReply, fd: int | None = None) -> None:
        # A copy of the descriptor: the name may be forgotten before the engine reads the answer.
        self._replies.append((reply, None if fd is None else os.dup(fd)))

    def _flush(self) -> None:
        """Sends as much as the channel takes; events before answers, as they happened before."""
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


def _read_request(packet: Packet) -> AnyRequest:
    if packet.problem:
        raise MessageError(packet.problem)
    asked = decode_request(packet.frame)
    came, wanted = len(packet.descriptors), int(isinstance(asked, Hold))
    if came != wanted:
        problem = f"{came} descriptors came with {type(asked).__name__}, must be {wanted}"
        raise MessageError(problem, request=asked.request)
    return asked


def _timeout_ms(seconds: float) -> int | None:
    # Rounded up: a poll that ends slightly early would have to be repeated.
    return None if math.isinf(seconds) else max(0, math.ceil(seconds * 1000))
