"""Descriptors that a supervised process has kept for its next life.

    arena_fd = keeping.kept("arena.0.1")            # in the life after a crash; before it, None
    keeping.keep("arena.0.1", arena.fd)             # from now on it outlives this life

A supervisor keeps them until the process has ended for good: with status 0, stopped, or after
too many failures. The one rule: what is kept belongs to one process, by its name among those of
its supervisor. No other process finds it, and nothing of it is left when the supervisor ends.
"""

from __future__ import annotations

import math
import select
import socket
import time
from typing import TYPE_CHECKING, Protocol

from penstock.errors import UnavailableError
from penstock.supervisor.descriptors import make_private
from penstock.supervisor.inherited import read_listed
from penstock.supervisor.messages import Hold, MessageError, Refused, decode_answer, encode
from penstock.supervisor.spec import require_name
from penstock.supervisor.wire import Packet, receive_packet, send_packet
from penstock.transport.base import Closed, Failed

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_S = 5.0
"""The supervisor answers within a millisecond; a machine may be busy."""


class Keeper(Protocol):
    """Somebody who keeps descriptors for the next life of this process."""

    def kept(self, name: str) -> int | None:
        """What an earlier life had kept under a name; it is this process's own."""
        ...

    def keep(self, name: str, fd: int) -> None:
        """Has a copy of a descriptor kept, in place of what was kept under the name before."""
        ...


class SupervisorKeeper:
    """The supervisor of this process, as the process asks it to keep descriptors."""

    def __init__(self, kept: Mapping[str, int], channel: socket.socket) -> None:
        self._kept = dict(kept)
        self._channel = channel
        self._channel.settimeout(0)

    def kept(self, name: str) -> int | None:
        """What an earlier life had kept under a name; it is this process's own."""
        return self._kept.get(name)

    def keep(self, name: str, fd: int) -> None:
        """Has a copy of a descriptor kept, in place of what was kept under the name before.

        Raises:
            UnavailableError: too many are kept, or the supervisor did not answer.
            ValueError: the name is none.
        """
        require_name(name, "name")
        deadline = time.monotonic() + ANSWER_S
        try:
            sent = send_packet(self._channel, encode(Hold(request=1, name=name)), fd)
        except OSError as error:
            raise UnavailableError(f"the supervisor is lost: {error.strerror}") from error
        if not sent:
            raise UnavailableError(f"the supervisor takes no wish to keep {name!r}")
        self._hear(name, deadline)

    def _hear(self, name: str, deadline: float) -> None:
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        left_ms = max(0, math.ceil((deadline - time.monotonic()) * 1000))
        if not readable.poll(left_ms):
            raise UnavailableError(f"the supervisor did not say that it keeps {name!r}")
        packet = receive_packet(self._channel)
        if isinstance(packet, Closed | Failed) or not isinstance(packet, Packet):
            raise UnavailableError("the supervisor is lost")
        try:
            answer = decode_answer(packet.frame)
        except MessageError as error:
            raise UnavailableError(f"the supervisor cannot be understood: {error}") from error
        if isinstance(answer, Refused):
            raise UnavailableError(f"the supervisor does not keep it: {answer.problem}")


_mine: list[SupervisorKeeper] = []


def keeper() -> SupervisorKeeper | None:
    """The supervisor of this process; `None` if there is none, or its spec does not say `keeps`."""
    return _mine[0] if _mine else None


def take_over(listed: str, channel: int) -> None:
    """Takes over what the command line lists, and the socket that wishes go by."""
    make_private((channel,))
    _mine[:] = [SupervisorKeeper(read_listed(listed), socket.socket(fileno=channel))]
