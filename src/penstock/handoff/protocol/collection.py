"""The values that a decode rank keeps: what it has of each handoff, and its landing areas.

P11: a part is in `have` only after its bytes were verified and moved, and a handoff is complete
only when the set of every source is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import Life
    from penstock.handoff.protocol.states import TargetState


class LandingArea(NamedTuple):
    """The landing area of one life of one source; `open` until it is retired."""

    peer: Life
    generation: int
    """Counted per life, and never given twice."""
    open: bool


class Berth(NamedTuple):
    """One place in an area."""

    peer: Life
    generation: int
    berth: int


class SourceState(NamedTuple):
    """What is wanted of one source rank, and what is there."""

    name: str
    grid: Grid
    claimed: int = 0
    """The incarnation that parts were claimed from; 0 when nothing was, or it has stopped."""
    have: int = 0
    """The set of parts that are verified and in their slots."""
    under_way: int = 0
    """The set of parts that our mover is at work on."""
    bad: tuple[int, ...] = ()
    """Parts whose first attempt was not intact; then their second; and so on."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is there."""
        return self.have == self.grid.everything

    @property
    def is_arriving(self) -> bool:
        """Whether the notice of a part is still to come."""
        return self.have | self.under_way != self.grid.everything

    def has(self, part: int) -> bool:
        """Whether a part is there."""
        return bool(self.have >> part & 1)

    def is_taking(self, part: int) -> bool:
        """Whether our mover is at work on a part."""
        return bool(self.under_way >> part & 1)

    def attempt_of(self, part: int) -> int:
        """Which attempt at a part we wait for."""
        return sum(bad >> part & 1 for bad in self.bad) if self.bad else 0

    def with_parts(self, more: int, under_way: int) -> SourceState:
        """The source with more parts, and others under way."""
        # Written out because it is done for every part: `_replace` takes four times as long.
        have = self.have | more
        return SourceState(self.name, self.grid, self.claimed, have, under_way, self.bad)

    def with_spoiled(self, part: int, attempt: int) -> SourceState:
        """The source after an attempt at a part was not intact."""
        bad = [*self.bad, *(0 for _ in range(attempt + 1 - len(self.bad)))]
        bad[attempt] |= 1 << part
        return self._replace(bad=tuple(bad), under_way=self.under_way & ~(1 << part))


class Collection(NamedTuple):
    """One handoff with one decode rank."""

    state: TargetState
    sources: tuple[SourceState, ...]
    scheduler: int
    """The incarnation of the scheduler whose slots these are."""
    why: str = ""
    poison_count: int = 0
    """How many areas failed under it."""

    @property
    def is_complete(self) -> bool:
        """Whether every part of every source is there."""
        return all(source.is_complete for source in self.sources)

    @property
    def is_moving(self) -> bool:
        """Whether our mover is at work on a part of it."""
        return any(source.under_way for source in self.sources)

    @property
    def is_arriving(self) -> bool:
        """Whether the notice of a part of any source is still to come."""
        return any(source.is_arriving for source in self.sources)

    def source(self, name: str) -> SourceState | None:
        """One source, if it is one."""
        for source in self.sources:
            if source.name == name:
                return source
        return None

    def lacks(self, name: str) -> bool:
        """Whether something of this source is missing."""
        source = self.source(name)
        return source is not None and not source.is_complete

    def taking(self, name: str, part: int) -> Collection:
        """After our mover began with a part."""
        return self._with(name, lambda source: source.with_parts(0, source.under_way | 1 << part))

    def taken(self, name: str, parts: int) -> Collection:
        """After a set of parts was verified and moved."""
        return self._with(name, lambda source: source.with_parts(parts, source.under_way & ~parts))

    def untaken(self, name: str, part: int) -> Collection:
        """After our mover gave a part up."""
        return self._with(
            name, lambda source: source._replace(under_way=source.under_way & ~(1 << part))
        )

    def spoiled(self, name: str, part: int, attempt: int) -> Collection:
        """After a part was found not to be intact."""
        return self._with(name, lambda source: source.with_spoiled(part, attempt))

    def claimed(self, name: str, incarnation: int) -> Collection:
        """After a claim was sent to a life of a source."""
        return self._with(name, lambda source: source._replace(claimed=incarnation))

    def stopped(self, name: str) -> Collection:
        """After a source confirmed that it writes nothing more, or cannot be asked."""
        return self._with(name, lambda source: source._replace(claimed=0))

    def _with(self, name: str, change: Callable[[SourceState], SourceState]) -> Collection:
        sources = [change(each) if each.name == name else each for each in self.sources]
        return Collection(self.state, tuple(sources), self.scheduler, self.why, self.poison_count)
