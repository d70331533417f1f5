"""Copies with nothing around them: what the link itself costs an engine's steps.

The same turns over the link as a mover takes, at the same rate, but one extent a step, without
staging, kernels, sums, manifests or reports. What a loop loses beside them no way of driving
copies can give back, so this is the ceiling of all of them, measured in the same rounds.

The one rule: it takes the link as the movers do, so that it differs by their work alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lab.bench.interference.shares import budget_bytes
from lab.bench.interference.traffic import DRAIN_S
from penstock.errors import UnavailableError
from penstock.movers.cuda.calls import choose_calls
from penstock.movers.cuda.staging import StagingSize
from penstock.movers.cuda.streams import CudaLink, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.movers.cuda.calls import Calls

IN_FLIGHT_MAX = 4
"""Copies under way, each of what a step may move; a link that cannot follow is given no more."""


class Extents(NamedTuple):
    """Where one way begins and ends, and how much there is."""

    target: int
    source: int
    length: int


@dataclass(slots=True)
class _Way:
    """One direction, and what is under way in it."""

    extents: Extents
    calls: Calls = field(default_factory=lambda: choose_calls([]))
    link: CudaLink = field(default_factory=CudaLink)
    flying: deque[tuple[StreamEvent, int]] = field(default_factory=deque)
    spare: list[StreamEvent] = field(default_factory=list)
    ended: list[tuple[float, int]] = field(default_factory=list)
    """When copies were seen to have ended, and their bytes."""

    def send(self, length: int) -> None:
        """Submits one copy."""
        event = self.spare.pop() if self.spare else StreamEvent()
        length = min(length, self.extents.length)
        extent = (self.extents.target, self.extents.source, length)
        self.calls.send(self.link, extent, StagingSize().turn_bytes)
        self.calls.mark(event, self.link)
        self.calls.make()
        self.flying.append((event, length))

    def collect(self) -> None:
        """Looks what has ended."""
        for _ in range(self.calls.reached([event for event, _ in self.flying])):
            event, length = self.flying.popleft()
            self.spare.append(event)
            self.ended.append((time.monotonic(), length))

    def close(self) -> None:
        """Gives streams and events back."""
        self.link.wait()
        self.link.close()
        for event in (*self.spare, *(event for event, _ in self.flying)):
            event.close()


class BareCopies:
    """A side: one copy a way and step, of what the rate allows since the step before.

    Args:
        ways: One a direction.
        gb_per_s: Both ways together.
        clock: In seconds.
    """

    def __init__(
        self,
        ways: Sequence[Extents],
        *,
        gb_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ways = [_Way(extents) for extents in ways]
        self._gb_per_s = gb_per_s
        self._clock = clock
        self._last = 0.0

    def begin(self) -> None:
        """The first copy comes with the first step."""
        self._last = self._clock()

    def at_boundary(self) -> None:
        """Submits what the time since the step before allows."""
        now = self._clock()
        allowed = budget_bytes(self._gb_per_s, max(now - self._last, 1e-6), len(self._ways))
        self._last = now
        for way in self._ways:
            way.collect()
            if len(way.flying) < IN_FLIGHT_MAX:
                way.send(allowed)

    def end(self, began: float, ended: float) -> int:
        """Waits for what is in flight; returns the bytes that ended between two times."""
        give_up = time.monotonic() + DRAIN_S
        moved_bytes = 0
        for way in self._ways:
            while way.flying:
                way.collect()
                if time.monotonic() > give_up:
                    raise UnavailableError(f"bare copies have not ended after {DRAIN_S:g} s")
            moved_bytes += sum(length for at, length in way.ended if began < at <= ended)
            way.ended.clear()
        return moved_bytes

    def close(self) -> None:
        """Gives everything back."""
        for way in self._ways:
            way.close()
