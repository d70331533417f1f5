"""All moves of a block of states at once.

Where a move is eager, the first such move happens alone. Timers expire where nothing usual can
happen; faults come any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol

import numpy as np

from lab.explore.rules import (
    Joins,
    Outcomes,
    Phase,
    Rule,
    counts_of,
    eager_of,
    firsts_of,
    needs_wider,
)
from lab.explore.world import Move
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from lab.explore.rules import (
        Columns,
        Look,
        Marks,
        Mirroring,
        Rows,
        RowState,
        Zobrist,
    )

_NO_RULE = -1
_EVERYWHERE = slice(None)


class BulkWorld(Protocol[Move]):
    """A world whose states are rows of small numbers, with its moves as rules, too."""

    def begin(self) -> RowState:
        """The state in which everything begins."""
        ...

    def moves(self, state: RowState) -> Sequence[Move]:
        """What can happen next, faults last."""
        ...

    def step(self, state: RowState, move: Move) -> RowState:
        """The state after a move."""
        ...

    def check(self, state: RowState) -> None:
        """Looks at a state."""
        ...

    def finished(self, state: RowState) -> bool:
        """Whether all work is done; then nothing usual can happen."""
        ...

    def is_fault(self, move: Move) -> bool:
        """Whether the move is something that goes wrong, and need not happen at all."""
        ...

    def tell(self, state: RowState, move: Move) -> str:
        """The move in words."""
        ...

    def conclude(self) -> None:
        """Looks back when every state was visited."""
        ...

    def joined(self, queue: int, more: int) -> int:
        """A queue with another behind it."""
        ...

    def tail(self, queue: int, longer: int) -> int:
        """What was appended to a queue."""
        ...

    def mirror(self) -> Mirroring | None:
        """How the world looks with parties of equal rights exchanged, where it has such."""
        ...

    def rules(self) -> Sequence[Rule[Move]]:
        """All moves, in families."""
        ...

    def eager_where(self) -> Look | None:
        """Where it is 0 no move is eager; eager moves may be so anywhere when there is none."""
        ...

    def review(self) -> Collection[tuple[int, int]]:
        """Looks at what was taken for granted, to have fewer moves, by all that was seen since.

        Says for which columns and values a move was taken for eager that is none, as the world
        knows now; states in which such a party moved alone are looked at anew.
        """
        ...

    def checks(self) -> Sequence[tuple[int, ...]]:
        """The columns that `check` looks at together."""
        ...


class Stuck(PenstockError):  # noqa: N818 - ends a search from within
    """Nothing can happen in a state, though work is left."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} is stuck")
        self.row = row


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Generic[Move]):
    """Some rows of a block follow the moves at one place of a rule."""

    rule: int
    place: int
    rows: Rows
    marks: Marks
    """Of the states that they lead to, and of their images."""
    outcomes: Outcomes[Move]
    outcome: Rows
    grown: list[tuple[int, NDArray[np.uint32]]]
    """Queues that grow: the column, and what is in it then, for each row."""

    def states(self, columns: Columns, chosen: Rows) -> Columns:
        """The states that the chosen ones of the rows lead to."""
        after: Columns = columns[:, self.rows[chosen]]
        values = self.outcomes.values[self.outcome[chosen]]
        for place, column in enumerate(self.outcomes.columns):
            after[column] = values[:, place]
        for column, queues in self.grown:
            after[column] = queues[chosen]
        return after


class _Looked(NamedTuple):
    """What a rule leads to in some rows."""

    rule: int
    rows: Rows
    entries: NDArray[np.int64]


class Following(Generic[Move]):
    """Applies rules to blocks."""

    def __init__(
        self, world: BulkWorld[Move], rules: Sequence[Rule[Move]], zobrist: Zobrist
    ) -> None:
        self._world, self._zobrist = world, zobrist
        self._rules = rules
        self._narrow = [Outcomes(n, r, world, zobrist, wide=False) for n, r in enumerate(rules)]
        self._wide = [Outcomes(n, r, world, zobrist, wide=True) for n, r in enumerate(rules)]
        self._joins = Joins(world.joined)
        self._quiet: list[Columns] = []
        self._parties = np.array([rule.reads[0] for rule in rules], dtype=np.int8)
        self.finished_count = 0
        self.alone: tuple[Rows, NDArray[np.int8]] = (np.zeros(0, np.int64), np.zeros(0, np.int8))
        """Of the last block, the rows that were followed by an eager move, and the column of the
        party that moved."""

    def forget_eager(self, failed: Collection[tuple[int, int]]) -> None:
        """What is eager is worked out anew, for these columns and values."""
        for outcomes in self._narrow:
            party = int(self._parties[outcomes.number])
            outcomes.forget_eager([value for column, value in failed if column == party])

    def all_of(
        self, columns: Columns, marks: Marks, *, again: bool = False
    ) -> Iterator[Followed[Move]]:
        """Every move of every state; quiet states are noted, unless it is done again."""
        rows = np.arange(columns.shape[1])
        count = np.zeros(len(rows), dtype=np.int64)
        alone = self._eager_rows(columns, rows)
        chosen = np.full(len(rows), _NO_RULE, dtype=np.int16)
        looked = [*self._phase(Phase.USUAL, columns, _EVERYWHERE)]
        for look in looked:
            mine = look.rows[(eager_of(look.entries) > 0) & alone[look.rows]]
            mine = mine[chosen[mine] == _NO_RULE]
            chosen[mine] = look.rule
        eager = np.flatnonzero(chosen != _NO_RULE)
        self.alone = (eager, self._parties[chosen[eager]])
        for look in looked:
            yield from self._follow_alone(look, columns, marks, chosen, count)
            yield from self._follow(look, columns, marks, chosen, count)
        moved = count > 0
        quiet = np.flatnonzero(~moved)
        free = rows[chosen == _NO_RULE]
        phases: tuple[tuple[Phase, Rows | slice], ...] = (
            (Phase.QUIET, quiet),
            (Phase.FAULT, _EVERYWHERE if len(free) == len(rows) else free),
            (Phase.EARLY, free[moved[free]]),
        )
        for phase, where in phases:
            for look in self._phase(phase, columns, where):
                yield from self._follow(look, columns, marks, chosen, count)
        if len(quiet) and not again:
            self._note(columns, quiet, count)

    def _eager_rows(self, columns: Columns, rows: Rows) -> NDArray[np.bool_]:
        where = self._world.eager_where()
        return np.ones(len(rows), dtype=np.bool_) if where is None else where.at(columns, rows) > 0

    def quiet_states(self) -> Iterator[RowState]:
        """All states in which nothing usual can happen, though work is left."""
        for columns in self._quiet:
            for row in columns.T:
                yield tuple(int(value) for value in row)

    def _note(self, columns: Columns, quiet: Rows, count: NDArray[np.int64]) -> None:
        unfinished = []
        for row in quiet:
            if self._world.finished(tuple(int(value) for value in columns[:, row])):
                self.finished_count += 1
            elif count[row]:
                unfinished.append(row)
            else:
                raise Stuck(int(row))
        if unfinished:
            self._quiet.append(columns[:, unfinished])

    def _phase(self, phase: Phase, columns: Columns, rows: Rows | slice) -> Iterator[_Looked]:
        for number, rule in enumerate(self._rules):
            if rule.phase is not phase:
                continue
            mine = rows
            for look in rule.only:
                mine = look.where(columns, mine)
            if isinstance(mine, slice):
                mine = np.arange(columns.shape[1])
            if len(mine):
                yield _Looked(number, mine, self._narrow[number].entries(columns, mine))

    def _follow_alone(
        self,
        look: _Looked,
        columns: Columns,
        marks: Marks,
        chosen: NDArray[np.int16],
        count: NDArray[np.int64],
    ) -> Iterator[Followed[Move]]:
        """Where an eager move of this rule was chosen, it alone is followed."""
        mine = np.flatnonzero(chosen[look.rows] == look.rule)
        if not len(mine):
            return
        rows, entries = look.rows[mine], look.entries[mine]
        places, firsts = eager_of(entries) - 1, firsts_of(entries)
        count[rows] += 1
        for place in range(int(places.max()) + 1):
            at = np.flatnonzero(places == place)
            if len(at):
                yield self._one(
                    self._narrow[look.rule], place, firsts[at] + place, columns, marks, rows[at]
                )

    def _follow(
        self,
        look: _Looked,
        columns: Columns,
        marks: Marks,
        chosen: NDArray[np.int16],
        count: NDArray[np.int64],
    ) -> Iterator[Followed[Move]]:
        """All moves of a rule, where no eager move was chosen."""
        free = np.flatnonzero(chosen[look.rows] == _NO_RULE)
        rows, entries = look.rows[free], look.entries[free]
        wide = needs_wider(entries)
        if wide.any():
            wider = rows[wide]
            outcomes = self._wide[look.rule]
            found = outcomes.entries(columns, wider)
            yield from self._all_places(outcomes, found, columns, marks, wider, count)
        yield from self._all_places(self._narrow[look.rule], entries, columns, marks, rows, count)

    def _all_places(
        self,
        outcomes: Outcomes[Move],
        entries: NDArray[np.int64],
        columns: Columns,
        marks: Marks,
        rows: Rows,
        count: NDArray[np.int64],
    ) -> Iterator[Followed[Move]]:
        counts, firsts = counts_of(entries), firsts_of(entries)
        count[rows] += counts
        for place in range(int(counts.max(initial=0))):
            at = np.flatnonzero(counts > place)
            yield self._one(outcomes, place, firsts[at] + place, columns, marks, rows[at])

    def _one(
        self,
        outcomes: Outcomes[Move],
        place: int,
        outcome: Rows,
        columns: Columns,
        marks: Marks,
        rows: Rows,
    ) -> Followed[Move]:
        """Rows that follow one move each, at the same place of the rule."""
        after = marks[:, rows] + outcomes.gains[outcome].T
        grown = []
        for at, queue in enumerate(outcomes.rule.appends):
            tails = outcomes.tails[outcome, at]
            longer = np.flatnonzero(tails)
            if len(longer):
                queues = columns[queue, rows]
                before = queues[longer]
                now = self._joins.of(before, tails[longer])
                self._zobrist.know(queue, now)
                after[:, longer] += self._zobrist.at(queue, now) - self._zobrist.at(queue, before)
                queues[longer] = now
                grown.append((queue, queues))
        return Followed(
            rule=outcomes.number,
            place=place,
            rows=rows,
            marks=after,
            outcomes=outcomes,
            outcome=outcome,
            grown=grown,
        )
