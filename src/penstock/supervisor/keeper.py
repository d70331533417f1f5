"""How a supervised process has descriptors kept for its next life.

    arena_fd = keeper().kept("arena.0.1")           # in the life after a crash; before it, None
    keeper().keep("arena.0.1", arena.fd)            # from now on it outlives this life

The process sends a `Hold` over a socket of its own; `serve_keep_request` is the supervisor's
side. A descriptor is kept until its process has ended for good: with status 0, stopped, or after
too many failures.

The one rule: what is kept belongs to one process, by its name among those of its supervisor. No
other process finds it, and nothing of it is left when the supervisor ends. Every request that can
be answered is answered, and a descriptor that is not kept is closed at once.
"""

from __future__ import annotations

import enum
import math
import select
import socket
import time
from typing import TYPE_CHECKING, Protocol

from penstock.errors import UnavailableError
from penstock.supervisor.descriptors import close_all, make_private, read_listed
from penstock.supervisor.messages import (
    PROBLEM_CHARACTERS_MAX,
    Done,
    Hold,
    MessageError,
    RequestRefused,
    RequestRefusedError,
    decode_answer,
    decode_request,
    encode,
    receive_packet,
)
from penstock.supervisor.spec import require_name
from penstock.transport.base import ChannelClosed, ChannelFailed
from penstock.transport.packets import Packet, send_packet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.supervisor.descriptors import HeldDescriptors

ANSWER_S = 5.0
"""The supervisor answers within a millisecond; a machine may be busy."""


class Keeper(Protocol):
    """Keeps descriptors for the next life of this process."""

    def kept(self, name: str) -> int | None:
        """What an earlier life had kept under a name; it belongs to this process."""
        ...

    def keep(self, name: str, fd: int) -> None:
        """Has a copy of a descriptor kept, in place of what was kept under the name before."""
        ...


class SupervisorKeeper:
    """Sends the requests of this process to its supervisor."""

    def __init__(self, kept: Mapping[str, int], channel: socket.socket) -> None:
        self._kept = dict(kept)
        self._channel = channel
        self._channel.settimeout(0)

    def kept(self, name: str) -> int | None:
        """What an earlier life had kept under a name; it belongs to this process."""
        return self._kept.get(name)

    def keep(self, name: str, fd: int) -> None:
        """Has a copy of a descriptor kept, in place of what was kept under the name before.

        Raises:
            UnavailableError: too many are kept, or the supervisor did not answer.
            ValueError: the name has characters that it must not have.
        """
        require_name(name, "name")
        deadline = time.monotonic() + ANSWER_S
        try:
            sent = send_packet(self._channel, encode(Hold(request=1, name=name)), fd)
        except OSError as error:
            raise UnavailableError(f"the supervisor is lost: {error.strerror}") from error
        if not sent:
            raise UnavailableError(f"the supervisor takes no request to keep {name!r}")
        self._wait_for_answer(name, deadline)

    def _wait_for_answer(self, name: str, deadline: float) -> None:
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        left_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000))
        if not readable.poll(left_ms):
            raise UnavailableError(f"the supervisor did not answer in time that it keeps {name!r}")
        packet = receive_packet(self._channel)
        if isinstance(packet, ChannelClosed | ChannelFailed) or not isinstance(packet, Packet):
            raise UnavailableError("the supervisor is lost")
        try:
            answer = decode_answer(packet.frame)
        except MessageError as error:
            raise UnavailableError(f"the supervisor cannot be understood: {error}") from error
        if isinstance(answer, RequestRefused):
            raise UnavailableError(f"the supervisor does not keep it: {answer.problem}")


_connected: list[SupervisorKeeper] = []


def keeper() -> SupervisorKeeper | None:
    """The keeper of this process; `None` without a supervisor, or if its spec lacks `keeps`."""
    return _connected[0] if _connected else None


def connect_keeper(listed: str, channel: int) -> None:
    """Makes `keeper` available, with what the command line lists as kept."""
    make_private((channel,))
    _connected[:] = [SupervisorKeeper(read_listed(listed), socket.socket(fileno=channel))]


# The supervisor's side.


class KeepRequest(enum.Enum):
    """What `serve_keep_request` found on the socket."""

    SERVED = "served"
    NONE = "none"
    CLOSED = "closed"


def serve_keep_request(channel: socket.socket, held: HeldDescriptors, process: str) -> KeepRequest:
    """Reads and answers one request of a process, if there is one."""
    packet = receive_packet(channel)
    if isinstance(packet, ChannelClosed | ChannelFailed):
        return KeepRequest.CLOSED
    if not isinstance(packet, Packet):
        return KeepRequest.NONE
    answer = _answer(packet, held, process)
    try:
        # If the process reads no answers, there is no room for this one, and it is dropped.
        send_packet(channel, encode(answer))
    except OSError:
        return KeepRequest.CLOSED
    return KeepRequest.SERVED


def _answer(packet: Packet, held: HeldDescriptors, process: str) -> Done | RequestRefused:
    request = 0
    try:
        asked = _read_hold(packet)
        request = asked.request
        held.keep(process, asked.name, packet.descriptors[0])
    except MessageError as error:
        problem, request = str(error), error.request
    except RequestRefusedError as error:
        problem = error.problem
    else:
        return Done(request=request)
    close_all(packet.descriptors)
    return RequestRefused(request=request, blame="world", problem=problem[:PROBLEM_CHARACTERS_MAX])


def _read_hold(packet: Packet) -> Hold:
    asked = decode_request(packet.frame)
    if packet.problem:
        raise MessageError(packet.problem, request=asked.request)
    if not isinstance(asked, Hold) or len(packet.descriptors) != 1:
        problem = f"{type(asked).__name__} came with {len(packet.descriptors)} descriptors"
        raise MessageError(f"{problem}, must be Hold with one", request=asked.request)
    return asked
