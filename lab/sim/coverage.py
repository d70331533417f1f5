"""What the worlds have seen: events, faults, and every move of the state tables.

A simulator that never lets a rank die proves nothing about dead ranks, so the campaign
counts what happened and says what was seen too rarely. Pairs of state and move that are not
in a table are impossible: the cache raises when one is tried.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.operations import Outcome, Purpose
from penstock.cache.states import TABLES
from penstock.machine import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.sim.scenarios import SimulatedWorld

EVENT_KINDS: tuple[str, ...] = tuple(sorted(kind.__name__ for kind in ev.Event.__subclasses__()))

FAULT_KINDS: tuple[str, ...] = (
    "abort while computing",
    "abort while loading",
    "block corrupt",
    "block missing",
    "block unreadable",
    "blocks of another engine in a store",
    "bytes rot",
    "bytes rot in a store",
    "copy cancelled",
    "deadline passed",
    "device emptied",
    "event refused",
    "foreign blocks found",
    "gap in KV events",
    "lease lost",
    "lease waits for a store",
    "no room",
    "rank comes back",
    "rank dies",
    "rank fails",
    "rank hangs",
    "rank is lost",
    "rank is slow",
    "recompute is quicker",
    "report from a dead rank",
    "report from an earlier life",
    "report from before a reset",
    "report of an unknown operation",
    "report twice",
    "reset",
    "store answers for a dead rank",
    "store answers from an earlier life",
    "store is full",
    "store is killed",
    "store is slow",
    "store loses power",
    "store page",
    "store page is late",
    "store reclaims",
    "store writes after the copy was given up",
    "tier back empty",
    "tier back with its bytes",
    "tier off, fenced",
    "tier off, not fenced",
    "weights change",
    "write after the copy was given up",
)

COPY_KINDS: tuple[str, ...] = tuple(
    f"{purpose.value} {outcome.value}" for purpose in Purpose for outcome in Outcome
)

SHARE_MIN = 0.01
"""Every kind of event and fault occurs in at least this share of the seeds."""
EVENTS_MEAN_MIN = 60.0
"""A seed has at least so many events on average."""
SEEDS_MIN = 2000
"""With fewer seeds, a rare kind may be missing by chance, and nothing is held against it."""

Moves = dict[str, list[list[int]]]
"""Table to counts, by move and state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """What can be seen in the worlds of one scenario."""

    events: tuple[str, ...]
    faults: tuple[str, ...]
    copy_word: str
    """What it is whose ways to end are counted in `copies`."""
    copies: tuple[str, ...]
    has_tables: bool
    """Whether the moves of the cache's state tables are to be seen in its worlds."""
    events_mean_min: float


CACHE_KINDS = Kinds(
    events=EVENT_KINDS,
    faults=FAULT_KINDS,
    copy_word="copy",
    copies=COPY_KINDS,
    has_tables=True,
    events_mean_min=EVENTS_MEAN_MIN,
)


@dataclass(slots=True)
class Coverage:
    """Counts over any number of worlds; adding two gives what one run over both would."""

    kinds: Kinds = CACHE_KINDS
    seed_count: int = 0
    event_count: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """How often each kind of event occurred."""
    faults: Counter[str] = field(default_factory=Counter)
    event_seeds: Counter[str] = field(default_factory=Counter)
    """In how many seeds each kind of event occurred."""
    fault_seeds: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """How often a copy for each purpose ended in each way."""
    copy_seeds: Counter[str] = field(default_factory=Counter)
    moves: Moves = field(default_factory=dict)

    def add_world(self, world: SimulatedWorld) -> None:
        """One more world has ended."""
        self.seed_count += 1
        self.event_count += world.events.total()
        self.events.update(world.events)
        self.faults.update(world.faults)
        self.copies.update(world.copies)
        self.event_seeds.update(world.events.keys())
        self.fault_seeds.update(world.faults.keys())
        self.copy_seeds.update(world.copies.keys())

    def add(self, other: Coverage) -> None:
        """Worlds that ran elsewhere."""
        self.seed_count += other.seed_count
        self.event_count += other.event_count
        self.events.update(other.events)
        self.faults.update(other.faults)
        self.event_seeds.update(other.event_seeds)
        self.copies.update(other.copies)
        self.fault_seeds.update(other.fault_seeds)
        self.copy_seeds.update(other.copy_seeds)
        for name, counts in other.moves.items():
            mine = self.moves.setdefault(name, [[0] * len(row) for row in counts])
            for mine_row, row in zip(mine, counts, strict=True):
                mine_row[:] = [a + b for a, b in zip(mine_row, row, strict=True)]

    @property
    def events_mean(self) -> float:
        """Events a seed."""
        return self.event_count / max(1, self.seed_count)

    def shortfalls(self) -> list[str]:
        """What was seen too rarely, one sentence each; nothing when there were few seeds."""
        if self.seed_count < SEEDS_MIN:
            return []
        return [*self._too_rare(), *self._never_moved()]

    def _too_rare(self) -> Iterator[str]:
        mean_min = self.kinds.events_mean_min
        if self.events_mean < mean_min:
            yield f"{self.events_mean:.1f} events a seed, at least {mean_min:.0f} are due"
        wanted = SHARE_MIN * self.seed_count
        for what, kinds, seeds in (
            ("event", self.kinds.events, self.event_seeds),
            ("fault", self.kinds.faults, self.fault_seeds),
        ):
            for kind in kinds:
                if seeds[kind] < wanted:
                    share = seeds[kind] / self.seed_count
                    yield f"{what} {kind!r} in {share:.2%} of the seeds, {SHARE_MIN:.0%} are due"

    def _never_moved(self) -> Iterator[str]:
        for table in TABLES if self.kinds.has_tables else ():
            counts = self.moves[table.name]
            for state, move in table.legal:
                if not counts[move][state]:
                    yield f"{table.name}: {move.name} in state {state.name} never happened"


@contextmanager
def counting_moves() -> Iterator[Moves]:
    """Has the state tables of this process count; the counts are complete at the end."""
    moves: Moves = {}
    earlier = [table.counts for table in TABLES]
    for table in TABLES:
        table.count_moves()
    try:
        yield moves
    finally:
        for table, counts in zip(TABLES, earlier, strict=True):
            assert table.counts is not None
            moves[table.name] = table.counts.tolist()
            table.counts = counts
