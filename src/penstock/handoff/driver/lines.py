"""Control lines: how the parties of a handoff reach each other, and who dials whom.

    listener = SharedListener("prefill-0", address, secret=secret)
    share = listener.share(["decode-1<prefill-0"])     # what the lines of one party use
    share.accept()                                     # a channel of one of these callers

An engine that hands over to several others has one address for all of them. Who calls is known by
its name, which names the pair as well. A caller whose pair is not open here yet waits for
`UNCLAIMED_S`: the two sides of a pair open it at about the same time.

| party             | listens | dials                             |
|-------------------|---------|-----------------------------------|
| prefill scheduler | yes     |                                   |
| decode scheduler  | yes     | prefill scheduler                 |
| prefill rank      | yes     | its scheduler                     |
| decode rank       |         | its scheduler, its source ranks   |

The side that dialled a line dials again after `REDIAL_S` when it ends, and after twice as long for
each time in vain, up to `REDIAL_MAX_S`. Frames sent meanwhile are lost, and the protocol sends them
again. A new life of a party is a new line that replaces the old.

The one rule: a frame counts as sent by the party that its line leads to, and by no other.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import CapacityError, UnavailableError
from penstock.handoff.protocol.states import Role
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty, ReceivedFrame
from penstock.transport.zeromq import IPC, Listener, dial

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from penstock.handoff.driver.directory import Directory
    from penstock.transport.base import Waitable
    from penstock.transport.machine_keys import Secret
    from penstock.transport.zmq_channel import ZmqChannel
    from penstock.transport.zmq_link import ChannelSettings


UNCLAIMED_S = 5.0
"""How long a caller is kept whose pair is not open here."""
UNCLAIMED_MAX = 64
"""Callers that are kept at the same time; after that, the oldest is sent away."""


class SharedListener:
    """Accepts callers for the parties of several pairs.

    Args:
        name: How callers are to call this end.
        addresses: Where to listen: the first that is free.
        secret: What callers must have, too, or the keys of machines.
        settings: Waiting times, bounds and ports of the channels.

    Raises:
        UnavailableError: none of the addresses can be listened on.
        ValueError: other machines can reach an address, and there are no keys.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[str] = (IPC,),
        *,
        secret: Secret = b"",
        settings: ChannelSettings | None = None,
    ) -> None:
        self._listener = _first_free(name, addresses, secret, settings)
        self._expected: set[str] = set()
        self._arrived: dict[str, tuple[ZmqChannel, float]] = {}
        """Channels that no share has taken yet, and since when."""
        self.stirs = True
        """Whether there may be something to do that the descriptor does not show: a caller who was
        not taken, or one who has to be answered by a certain time."""

    @property
    def name(self) -> str:
        """How callers call this end."""
        return self._listener.name

    @property
    def address(self) -> str:
        """What callers dial."""
        return self._listener.address

    def share(self, callers: Sequence[str]) -> ListenerShare:
        """The part of the listener that accepts these callers, until it is closed."""
        self._expected.update(callers)
        return ListenerShare(self, frozenset(callers))

    def close(self) -> None:
        """Stops accepting; may be called twice."""
        for channel, _ in self._arrived.values():
            channel.close()
        self._arrived.clear()
        self._listener.close()

    @property
    def descriptor(self) -> int:
        """Readable when somebody calls."""
        return self._listener.descriptor

    @property
    def alarm(self) -> float | None:
        """When to look again although nobody called."""
        return self._listener.alarm

    def look(self, callers: frozenset[str]) -> str:
        """The name of one of these callers who has come; empty if none has."""
        now = time.monotonic()
        while (channel := self._listener.accept()) is not None:
            self._drop(channel.name)
            self._arrived[channel.name] = channel, now
        self.stirs = bool(self._arrived) or self._listener.alarm is not None
        if not self._arrived:
            return ""
        unclaimed = [name for name in self._arrived if name not in self._expected]
        late = [name for name in unclaimed if self._arrived[name][1] < now - UNCLAIMED_S]
        for name in {*late, *unclaimed[: max(0, len(unclaimed) - UNCLAIMED_MAX)]}:
            self._drop(name)
        return next((name for name in self._arrived if name in callers), "")

    def take(self, caller: str) -> ZmqChannel:
        """The channel of a caller that `look` has named."""
        return self._arrived.pop(caller)[0]

    def forget(self, callers: frozenset[str]) -> None:
        """Nobody expects these callers any more."""
        self._expected -= callers
        for name in callers:
            self._drop(name)

    def _drop(self, name: str) -> None:
        arrived = self._arrived.pop(name, None)
        if arrived is not None:
            arrived[0].close()


class ListenerShare:
    """What one party uses of a shared listener: it looks like a listener of its own."""

    def __init__(self, listener: SharedListener, callers: frozenset[str]) -> None:
        self._listener = listener
        self._callers = callers

    @property
    def address(self) -> str:
        """What the callers dial."""
        return self._listener.address

    def accept(self) -> ZmqChannel | None:
        """The channel of the next caller, if one has come."""
        caller = self._listener.look(self._callers)
        return self._listener.take(caller) if caller else None

    @property
    def ready(self) -> bool:
        """Whether `accept` has a channel to give now."""
        return bool(self._listener.look(self._callers))

    @property
    def descriptor(self) -> int:
        """Readable when somebody calls any of the shares."""
        return self._listener.descriptor

    @property
    def alarm(self) -> float | None:
        """When to look again although nobody called."""
        return self._listener.alarm

    @property
    def stirs(self) -> bool:
        """Whether there may be something to do that the descriptor does not show."""
        return self._listener.stirs

    def close(self) -> None:
        """Its callers are not accepted any more; the listener goes on for the others."""
        self._listener.forget(self._callers)


def _first_free(
    name: str, addresses: Sequence[str], secret: Secret, settings: ChannelSettings | None
) -> Listener:
    problem = UnavailableError(f"listener {name!r} has no address, must have at least one")
    for address in addresses:
        try:
            return Listener(name, address, secret=secret, settings=settings)
        except UnavailableError as error:
            problem = error
    raise problem


_log = logging.getLogger(__name__)

REDIAL_S, REDIAL_MAX_S = 0.1, 2.0
REDIAL_DOUBLINGS_MAX = 10
_LISTENER = ""
"""The listener among lines; no party has this name."""
FRAMES_A_LINE = 64
"""Frames that are taken from one line before the others have their turn."""


class LineFrame(NamedTuple):
    """A frame, and whose line it came over."""

    name: str
    frame: bytes


class Lines(Protocol):
    """The lines of one party."""

    def send(self, name: str, frame: bytes) -> bool:
        """Hands a frame over; `False` if there is no line, or no room on it: it is lost."""
        ...

    def receive(self) -> list[LineFrame]:
        """What has come, a bounded number of frames of each line; never waits."""
        ...

    def opened(self) -> list[str]:
        """To whom a line was opened since the last call."""
        ...

    @property
    def waitables(self) -> Sequence[Waitable]:
        """What to ask, and then to wait for, until there is something to receive."""
        ...

    @property
    def descriptors(self) -> Sequence[int]:
        """What to wait for, besides."""
        ...

    def next_deadline(self) -> float | None:
        """When `receive` should be called although nothing came."""
        ...

    def close(self) -> None:
        """Ends all lines."""
        ...


class _Unopened:
    """A channel whose opening has not been reported: opening counts as ready, too.

    A channel itself is ready only when a frame has come, and asking it may open it.
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: ZmqChannel) -> None:
        self._channel = channel

    @property
    def ready(self) -> bool:
        return self._channel.ready or self._channel.was_open

    @property
    def descriptor(self) -> int:
        return self._channel.descriptor

    @property
    def alarm(self) -> float | None:
        return self._channel.alarm


class ZmqLines:
    """Lines over ZeroMQ, within a machine or between them.

    Args:
        name: of this party.
        listen: where to listen; nowhere if it is empty.
        dials: the parties to dial, by name: their addresses.
        callers: the parties that may dial us.
        secret: what all parties have in common, or the keys of their machines; nobody else is
            let in.
        settings: of the channels.
        listener: in the place of one at `listen`, where all pairs of a process share one.
        answer_names: of those who answer a dial under the name of their process, that name.
    """

    def __init__(
        self,
        name: str,
        *,
        listen: str = "",
        dials: Mapping[str, str],
        callers: Sequence[str] = (),
        secret: Secret = b"",
        settings: ChannelSettings | None = None,
        listener: SharedListener | None = None,
        answer_names: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.refused: Counter[str] = Counter()
        """Who called, or answered, that should not have."""
        self._secret = secret
        self._settings = settings
        self._dials = dict(dials)
        self._callers = frozenset(callers)
        self._answer_names = dict(answer_names or {})
        self._listener: Listener | ListenerShare | None = None
        self._share: ListenerShare | None = None
        """The listener, if others use it, too."""
        if listen and listener is not None:
            self._listener = self._share = listener.share(callers)
        elif listen:
            self._listener = Listener(name, listen, secret=secret, settings=settings)
        self._channels: dict[str, ZmqChannel] = {}
        self._reported: set[str] = set()
        """To whom the line is known to be open."""
        self._opened: list[str] = []
        self._causes: dict[str, tuple[str, str]] = {}
        """Why each line ended last: logged once, however often it is dialled in vain."""
        self._redial_at = dict.fromkeys(self._dials, 0.0)
        self._vain: dict[str, int] = {}
        """How often each party was dialled in vain since its line was open."""
        self._quiet: dict[str, int] = {}
        """Lines that were found empty and not used since, and their descriptors: asking one
        takes forty microseconds, and a poll over all of them two. The listener, too, under no name,
        while it owes nobody an answer."""
        self._quiet_poll: select.poll | None = None
        """Over these descriptors, until there are others."""
        self._quiet_due: float | None = math.inf
        """When to ask one of them although it shows nothing; not known after one was asked."""
        self._redial()

    @property
    def address(self) -> str:
        """Where this party listens."""
        return "" if self._listener is None else self._listener.address

    def send(self, name: str, frame: bytes) -> bool:
        channel = self._channels.get(name)
        if channel is None or not channel.is_open:
            return False
        self._disturb(name)  # What comes in the course of a send is not shown.
        try:
            channel.send(frame)
        except (UnavailableError, CapacityError):
            return False
        return True

    def receive(self) -> list[LineFrame]:
        silent = self._silent()
        if self._listener is not None and _LISTENER not in silent:
            self._accept(self._listener)
        if self._redial_at:
            self._redial()
        found: list[LineFrame] = []
        for name, channel in list(self._channels.items()):
            if name not in silent:
                self._receive_from(name, channel, found)
        return found

    def opened(self) -> list[str]:
        found, self._opened = self._opened, []
        return found

    @property
    def waitables(self) -> Sequence[Waitable]:
        """The listener, and the channels that were used since they were found empty."""
        if len(self._quiet) == len(self._channels) + (self._listener is not None) and (
            self._share is None or self._listener_is_quiet
        ):
            return ()
        channels: list[Waitable] = [
            channel if name in self._reported else _Unopened(channel)
            for name, channel in self._channels.items()
            if name not in self._quiet
        ]
        if self._listener is not None and not self._listener_is_quiet:
            channels.append(self._listener)
        return channels

    @property
    def descriptors(self) -> Sequence[int]:
        """Of the others."""
        return [*self._quiet.values()]

    def next_deadline(self) -> float | None:
        """When to dial again, or to give up a line that is lost."""
        due = self._due_of_quiet() if self._quiet_due is None else self._quiet_due
        if self._redial_at:
            due = min(due, *self._redial_at.values())
        return None if due == math.inf else due

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._quiet.clear()
        self._redial_at.clear()
        if self._listener is not None:
            self._listener.close()

    def _receive_from(self, name: str, channel: ZmqChannel, found: list[LineFrame]) -> None:
        for _ in range(FRAMES_A_LINE):
            answer = channel.receive()
            if channel.was_open and name not in self._reported:
                if name in self._dials and channel.name != self._answer_names.get(name, name):
                    self.refused["answered under another name"] += 1
                    self._lose(name)
                    return
                self._reported.add(name)
                self._opened.append(name)
                self._causes.pop(name, None)
            match answer:
                case ReceivedFrame(frame):
                    found.append(LineFrame(name, frame))
                case Empty():
                    self._calm(name, channel.descriptor)
                    return
                case ended:
                    self._log_end(name, ended, opened=channel.was_open)
                    self._lose(name)
                    return

    def _log_end(self, name: str, ended: ChannelClosed | ChannelFailed, *, opened: bool) -> None:
        """Why a line ended, or was not opened: the next try looks the same from outside."""
        why = ended.cause if isinstance(ended, ChannelFailed) else "closed there"
        what = "line lost" if opened else "no line"
        if self._causes.get(name) != (what, why):
            _log.info("%s party=%s peer=%s cause=%s", what, self.name, name, why)
        self._causes[name] = (what, why)

    def _silent(self) -> Container[str]:
        """The lines from which nothing can be received."""
        quiet = self._quiet
        if not quiet:
            return quiet
        if self._quiet_poll is None:
            self._quiet_poll = select.poll()
            for fd in quiet.values():
                self._quiet_poll.register(fd, select.POLLIN)
        ready = self._quiet_poll.poll(0)
        now = time.monotonic()
        due = self._due_of_quiet() if self._quiet_due is None else self._quiet_due
        if not ready and now < due and (self._share is None or self._listener_is_quiet):
            return quiet
        readable = {fd for fd, _ in ready}
        self._quiet_due = None  # What is asked may have another alarm afterwards.
        return {
            name
            for name, fd in quiet.items()
            if fd not in readable
            and (
                self._listener_is_quiet
                if name == _LISTENER
                else not 0 < (self._channels[name].alarm or 0) <= now
            )
        }

    @property
    def _listener_is_quiet(self) -> bool:
        return _LISTENER in self._quiet and not (self._share is not None and self._share.stirs)

    def _due_of_quiet(self) -> float:
        """When a quiet line has to be asked; its alarm changes only when it is."""
        alarms = [self._channels[name].alarm for name in self._quiet if name != _LISTENER]
        self._quiet_due = min([at for at in alarms if at], default=math.inf)
        return self._quiet_due

    def _calm(self, name: str, descriptor: int) -> None:
        """Nothing is there, and the descriptor shows what comes from now on."""
        if name not in self._quiet:
            self._quiet[name] = descriptor
            self._quiet_poll = self._quiet_due = None

    def _accept(self, listener: Listener | ListenerShare) -> None:
        # It may have had to answer somebody: what comes in the course of that is not shown.
        owing = listener.alarm is not None
        while (channel := listener.accept()) is not None:
            if channel.name not in self._callers:
                self.refused["called by a stranger"] += 1
                channel.close()
                continue
            self._drop(channel.name)
            self._channels[channel.name] = channel
        if owing or listener.alarm is not None:
            self._disturb(_LISTENER)
        else:
            self._calm(_LISTENER, listener.descriptor)

    def _lose(self, name: str) -> None:
        """A line has ended; who dialled it dials again."""
        channel = self._channels.get(name)
        was_open = channel is not None and channel.was_open and channel.name == name
        self._drop(name)
        if name in self._dials:
            vain = self._vain[name] = 0 if was_open else self._vain.get(name, 0) + 1
            wait_s = min(REDIAL_S * 2.0 ** min(vain, REDIAL_DOUBLINGS_MAX), REDIAL_MAX_S)
            self._redial_at[name] = time.monotonic() + wait_s

    def _drop(self, name: str) -> None:
        self._reported.discard(name)
        self._disturb(name)
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.close()

    def _disturb(self, name: str) -> None:
        if self._quiet.pop(name, None) is not None:
            self._quiet_poll = self._quiet_due = None

    def _redial(self) -> None:
        now = time.monotonic()
        for name in [name for name, at in self._redial_at.items() if at <= now]:
            del self._redial_at[name]
            self._channels[name] = dial(
                self._dials[name], name=self.name, secret=self._secret, settings=self._settings
            )


def zmq_lines(
    directory: Directory,
    name: str,
    *,
    secret: Secret = b"",
    settings: ChannelSettings | None = None,
    listener: SharedListener | None = None,
) -> ZmqLines:
    """The lines of a party after the table above, at the addresses of a directory."""
    prefill, decode = directory.prefill, directory.decode
    peers = directory.peers_of(name)
    listen, dials = "", {}
    match directory.role_of(name):
        case Role.PREFILL_SCHEDULER:
            listen = prefill.address
        case Role.DECODE_SCHEDULER:
            listen, dials = decode.address, {prefill.scheduler: prefill.address}
        case Role.PREFILL_RANK:
            listen = directory.place_of(name).address
            dials = {prefill.scheduler: prefill.address}
        case Role.DECODE_RANK:
            dials = {rank.name: rank.address for rank in prefill.ranks if rank.name in peers}
            dials[decode.scheduler] = decode.address
    callers = [peer for peer in peers if peer not in dials]
    return ZmqLines(
        name,
        listen=listen,
        dials=dials,
        callers=callers,
        secret=secret,
        settings=settings,
        listener=listener,
        answer_names=directory.answer_names,
    )
