"""File descriptors: held by the supervisor, inherited, and kept for a process's next life.

    arena = Arena.attach(inherited_descriptor("arena-0"))        # in a supervised process

The engine has descriptors held under names of its choice; a process has descriptors kept for its
next life, under names that no other process and not the engine can use. A process that was
restarted finds the same arena under the same name.

    arena_fd = keeper().kept("arena.0.1")           # in the life after a crash; before it, None
    keeper().keep("arena.0.1", arena.fd)            # from now on it outlives this life

The process sends a `Hold` over a socket of its own; `serve_keep_request` is the supervisor's
side. A descriptor is kept until its process has ended for good: with status 0, stopped, or after
too many failures.

The rules:

- A descriptor that some process is started with stays open. Its restart must not fail because an
  arena is missing.
- What is kept belongs to one process, by its name among those of its supervisor. No other process
  finds it, and nothing of it is left when the supervisor ends. Every request that can be answered
  is answered, and a descriptor that is not kept is closed at once.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Protocol

from penstock.errors import UnavailableError
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
    require_name,
)
from penstock.transport.base import ChannelClosed, ChannelFailed
from penstock.transport.unix_sockets import Packet, send_packet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


HELD_MAX = 256
"""A quarter of the 1,024 that a process may have open by default; eight arenas a rank of 32."""


class HeldDescriptors:
    """The descriptors that a supervisor holds, by name. It owns them."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def hold(self, name: str, fd: int) -> None:
        """Takes a descriptor over; the caller still owns it if this is refused."""
        if name in self._descriptors:
            raise RequestRefusedError(f"name is {name!r}, which is held already: forget it first")
        if len(self._descriptors) >= HELD_MAX:
            raise RequestRefusedError(
                f"name is {name!r}, but {HELD_MAX} descriptors are held, which is the most",
                blame="world",
            )
        self._descriptors[name] = fd

    def keep(self, process: str, name: str, fd: int) -> None:
        """Keeps a process's own descriptor, in place of the one of that name, if there is one."""
        owned = f"{process}/{name}"
        if owned in self._descriptors:
            self.forget(owned)
        self.hold(owned, fd)

    def kept_by(self, process: str) -> dict[str, int]:
        """What a process had kept, by the names that it gave; this table still owns them."""
        prefix = f"{process}/"
        return {
            name.removeprefix(prefix): fd
            for name, fd in self._descriptors.items()
            if name.startswith(prefix)
        }

    def forget_kept_by(self, process: str) -> None:
        """Closes what a process had kept, once it is not started again."""
        for name in self.kept_by(process):
            self.forget(f"{process}/{name}")

    def fetch(self, name: str) -> int:
        """The descriptor of a name; this table still owns it."""
        try:
            return self._descriptors[name]
        except KeyError:
            known = ", ".join(sorted(self._descriptors)) or "none"
            problem = f"descriptor {name!r} is not held, must be one of: {known}"
            raise RequestRefusedError(problem) from None

    def forget(self, name: str) -> None:
        os.close(self.fetch(name))
        del self._descriptors[name]

    def close(self) -> None:
        close_all(self._descriptors.values())
        self._descriptors.clear()


# Those that a process inherits, by the names its command line gives them.

_inherited: dict[str, int] = {}


def inherited_descriptor(name: str) -> int:
    """A descriptor that this process was started with; it belongs to this process.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _inherited:
        known = ", ".join(sorted(_inherited)) or "none"
        raise ValueError(
            f"name is {name!r}, must be one of the descriptors this process was started with: "
            f"{known}"
        )
    return _inherited[name]


def inherit_listed(listed: str) -> None:
    """Makes the descriptors of a list available to `inherited_descriptor`."""
    _inherited.update(read_listed(listed))


def list_descriptors(descriptors: Mapping[str, int]) -> str:
    """Descriptors as a command line lists them: `name=number,…`."""
    return ",".join(f"{name}={fd}" for name, fd in descriptors.items())


def read_listed(listed: str) -> dict[str, int]:
    """The descriptors of such a list; programs that this process starts do not inherit them."""
    found: dict[str, int] = {}
    for item in filter(None, listed.split(",")):
        name, _, number = item.partition("=")
        found[name] = int(number)
    make_private(found.values())
    return found


def make_inheritable(descriptors: Iterable[int]) -> None:
    """Lets the next program that this process starts inherit them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, 0)


def make_private(descriptors: Iterable[int]) -> None:
    """Keeps the programs that this process starts from inheriting them."""
    for fd in descriptors:
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)


def close_all(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


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


def serve_keep_request(channel: socket.socket, held: HeldDescriptors, process: str) -> bool:
    """Reads and answers one request of a process; false if there is none.

    Raises `OSError`: the process has closed its end.
    """
    packet = receive_packet(channel)
    if isinstance(packet, ChannelClosed | ChannelFailed):
        raise ConnectionResetError(f"process {process!r} has closed its channel")
    if not isinstance(packet, Packet):
        return False
    # If the process reads no answers, there is no room for this one, and it is dropped.
    send_packet(channel, encode(_answer(packet, held, process)))
    return True


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
