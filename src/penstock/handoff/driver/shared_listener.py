"""One listener of a process for the lines of all its pairs.

    listener = SharedListener("prefill-0", address, secret=secret)
    share = listener.share(["decode-1<prefill-0"])     # what the lines of one party use
    share.accept()                                     # a channel of one of these callers

An engine that hands over to several others has one address for all of them. Who calls is known by
its name, which names the pair as well. A caller whose pair is not open here yet waits for
`UNCLAIMED_S`: the two sides of a pair open it at about the same time.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.transport.zeromq import IPC, Listener

if TYPE_CHECKING:
    from collections.abc import Sequence

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
