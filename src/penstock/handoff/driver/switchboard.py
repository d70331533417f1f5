"""Control lines within a process: for tests, simulators, and engines whose ranks share one.

    board = Switchboard()
    lines = board.join("decode/0", ["decode", "prefill/0"])

A party that joins under a name that is taken begins another life: the lines of the earlier one
end. No clock is read. The one rule: as with lines between processes, what was sent to a life
does not reach the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import CapacityError, UnavailableError
from penstock.handoff.driver.lines import FRAMES_A_LINE, Heard
from penstock.transport.base import Empty, ReceivedFrame
from penstock.transport.inproc import channel_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.transport.base import Waitable
    from penstock.transport.inproc import InprocChannel


class Switchboard:
    """Joins parties of one process."""

    def __init__(self) -> None:
        self._parties: dict[str, InprocLines] = {}

    def join(self, name: str, peers: Sequence[str]) -> InprocLines:
        """The lines of a party to those of its peers that are here, now or later."""
        earlier = self._parties.get(name)
        if earlier is not None:
            earlier.close()
        lines = InprocLines(name, peers)
        self._parties[name] = lines
        for peer in peers:
            other = self._parties.get(peer)
            if other is not None and name in other.peers:
                here, there = channel_pair(name, peer)
                lines.connect(peer, here)
                other.connect(name, there)
        return lines


class InprocLines:
    """The lines of one party; see `Lines`."""

    def __init__(self, name: str, peers: Sequence[str]) -> None:
        self.name = name
        self.peers = frozenset(peers)
        self._channels: dict[str, InprocChannel] = {}
        self._opened: list[str] = []

    def connect(self, peer: str, channel: InprocChannel) -> None:
        """Takes a line to a peer, in the place of an earlier one."""
        earlier = self._channels.pop(peer, None)
        if earlier is not None:
            earlier.close()
        self._channels[peer] = channel
        self._opened.append(peer)

    def send(self, name: str, frame: bytes) -> bool:
        """Hands a frame over; see `Lines`."""
        channel = self._channels.get(name)
        try:
            if channel is not None:
                channel.send(frame)
        except (UnavailableError, CapacityError):
            return False
        return channel is not None

    def receive(self) -> list[Heard]:
        """What has come; see `Lines`."""
        found: list[Heard] = []
        for name, channel in list(self._channels.items()):
            for _ in range(FRAMES_A_LINE):
                match channel.receive():
                    case ReceivedFrame(frame):
                        found.append(Heard(name, frame))
                    case Empty():
                        break
                    case _:
                        self._channels.pop(name).close()
                        break
        return found

    def opened(self) -> list[str]:
        """To whom a line was opened; see `Lines`."""
        found, self._opened = self._opened, []
        return found

    @property
    def waitables(self) -> Sequence[Waitable]:
        """The channels."""
        return list(self._channels.values())

    @property
    def descriptors(self) -> Sequence[int]:
        """None but those of the channels."""
        return ()

    def next_deadline(self) -> float | None:
        """There is nothing to watch the clock for."""
        return None

    def close(self) -> None:
        """Ends all lines."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
