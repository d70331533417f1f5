"""Which peers have been silent for too long. Kept beside the four machines, not in them.

Any message is a sign of life. A peer that was silent for `ping_s` gets a `Ping`; one that was
silent for `suspect_s` is suspected, and the driver calls the machine's `suspect`. The machines
do not know this class, so that an explorer can let any peer be suspected at any time.

P20: suspicion depends on time alone. It is no proof of death: it fails requests over and retires
memory, and never frees any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.handoff.protocol.settings import HandoffTimes


class Pulse(NamedTuple):
    """When a peer last sent something, and was last asked."""

    last_message: float
    last_ping: float
    suspected: bool = False


class SilentPeers(NamedTuple):
    """The peers that have been silent."""

    ask: tuple[str, ...]
    """Send these a `Ping`."""
    suspect: tuple[str, ...]
    """Call the machine's `suspect` for these."""


class Liveness:
    """The heartbeats of one party."""

    def __init__(self, times: HandoffTimes) -> None:
        self.times = times
        self.pulses: dict[str, Pulse] = {}

    def watch(self, names: Iterable[str], now: float) -> None:
        """Names all peers that matter now; others are not asked, and forgotten."""
        before = self.pulses
        self.pulses = {name: before.get(name, Pulse(now, now)) for name in names}

    def record_message(self, name: str, now: float) -> None:
        """A message from a peer came."""
        if name in self.pulses:
            self.pulses[name] = Pulse(now, now)

    def handle_timer(self, now: float) -> SilentPeers:
        """Who is to be asked, and who is suspected now; each silence is reported once."""
        times = self.times
        suspect = tuple(
            name
            for name, pulse in self.pulses.items()
            if not pulse.suspected and now - pulse.last_message >= times.suspect_s
        )
        ask = tuple(
            name for name, pulse in self.pulses.items() if now - pulse.last_ping >= times.ping_s
        )
        for name in suspect:
            self.pulses[name] = self.pulses[name]._replace(suspected=True)
        for name in ask:
            self.pulses[name] = self.pulses[name]._replace(last_ping=now)
        return SilentPeers(ask, suspect)

    def next_deadline(self) -> float | None:
        """When `handle_timer` should be called at the latest."""
        times = self.times
        return min(
            (
                pulse.last_ping + times.ping_s
                if pulse.suspected
                else min(pulse.last_ping + times.ping_s, pulse.last_message + times.suspect_s)
                for pulse in self.pulses.values()
            ),
            default=None,
        )
