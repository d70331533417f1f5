"""Moves that look at, and change, few columns of a state: worked out once for what they see.

A state of a large world is a row of small numbers. A *rule* is a family of moves whose
possibility and outcome depend on some columns only: those it *reads* (and may change), and
those it *views* through a function of their value. It may also *append* to queues whatever
they hold. So a rule is worked out once for each combination of what it reads and views, on the
first state that shows it, by the world's own `moves` and `step`; then it is applied to whole
arrays of states.

What must not break: a rule names every column that matters. A change to any other column is
an error here; that nothing else is looked at is checked on samples, see `bulk`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from penstock.errors import PenstockError
from penstock.testing.explore.result import DEFECTS
from penstock.testing.explore.tables import MISSING, Lookup, mixed
from penstock.testing.explore.world import Move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Columns = NDArray[np.uint16]
    Rows = NDArray[np.int64]
    Marks = NDArray[np.uint64]

RowState = tuple[int, ...]
Move_contra = TypeVar("Move_contra", contravariant=True)

VALUES_MAX = 1 << 16
"""Columns hold 16 bits."""

_WIDE = -2
"""The outcome depends on the rule's further columns, too."""
_COUNT_BITS = 8
"""An entry is the number of its first outcome; then the place of the eager one, counted from 1;
and in the lowest bits how many outcomes there are."""


class Broken(PenstockError):  # noqa: N818 - carries a defect to where its story is told
    """A move broke a promise, or the world itself."""

    def __init__(self, *, row: int, rule: int, place: int, defect: Exception) -> None:
        super().__init__(str(defect))
        self.row, self.rule, self.place, self.defect = row, rule, place, defect


class Crowded(PenstockError):  # noqa: N818 - ends a search as a bound does
    """A column of the world has more values than 16 bits can tell apart."""


class Phase(IntEnum):
    """When the moves of a rule are possible."""

    USUAL = 0
    QUIET = 1
    """When nothing usual is."""
    FAULT = 2
    EARLY = 3
    """A fault that is none when nothing usual is possible."""


class Look:
    """A function of the values of a column, worked out once for each value."""

    def __init__(self, column: int, see: Callable[[int], int]) -> None:
        self.column = column
        self._see = see
        self._seen = np.full(VALUES_MAX, MISSING, dtype=np.int32)

    def of(self, state: RowState) -> int:
        """What it is in one state."""
        return self._see(state[self.column])

    def at(self, columns: Columns, rows: Rows) -> NDArray[np.int32]:
        """What it is in each of these rows; 0 or more."""
        values = columns[self.column, rows]
        seen: NDArray[np.int32] = self._seen[values]
        if len(seen) and seen.min() == MISSING:
            for value in {int(value) for value in values[seen == MISSING]}:
                self._seen[value] = self._see(value)
            seen = self._seen[values]
        return seen


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Move]):
    """A family of moves."""

    name: str
    phase: Phase
    only: tuple[Look, ...]
    """Where one of these is 0 there are no moves; a cheap way to leave rows out."""
    reads: tuple[int, ...]
    views: tuple[Look, ...] = ()
    appends: tuple[int, ...] = ()
    moves: Callable[[RowState], Sequence[Move]]
    eager: Callable[[RowState, Sequence[Move]], int | None] | None = None
    """Which of the moves may happen alone, by its place; depends on what the rule reads only."""
    wider: tuple[int, ...] = ()
    """Columns that are read, and may change, where `is_wide` says so."""
    is_wide: Callable[[RowState, RowState], bool] = field(default=lambda _before, _after: False)
    """Whether what happened between two states depends on the wider columns."""


class Stepping(Protocol[Move_contra]):
    """What rules need of a world."""

    def step(self, state: RowState, move: Move_contra) -> RowState:
        """The state after a move."""
        ...

    def joined(self, queue: int, more: int) -> int:
        """A queue with another behind it."""
        ...

    def tail(self, queue: int, longer: int) -> int:
        """What was appended to a queue."""
        ...


class Zobrist:
    """A random number for every value of every column; a state's mark is the sum of its own.

    So the mark of a successor follows from the columns that changed. (Zobrist, 1970.)
    """

    def __init__(self, column_count: int) -> None:
        places = np.arange(column_count * VALUES_MAX, dtype=np.uint64)
        self.of = mixed(places).reshape(column_count, VALUES_MAX)

    def marks(self, columns: Columns) -> Marks:
        """The marks of whole states."""
        total = np.zeros(columns.shape[1], dtype=np.uint64)
        for marks, values in zip(self.of, columns, strict=True):
            total += marks[values]
        return total


class Joins:
    """Queues with others behind them, each worked out once."""

    def __init__(self, joined: Callable[[int, int], int]) -> None:
        self._joined = joined
        self._known = Lookup()

    def of(self, queues: NDArray[np.uint16], more: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """Each queue with the other behind it."""
        result = more.copy()
        busy = np.flatnonzero(queues)
        if len(busy):
            pairs = queues[busy].astype(np.uint64) << np.uint64(16) | more[busy]
            keys = mixed(pairs)
            found = self._known.find(keys)
            missing = np.flatnonzero(found == MISSING)
            if len(missing):
                fresh, first = np.unique(keys[missing], return_index=True)
                numbers = [
                    self._joined(int(queues[busy[row]]), int(more[busy[row]]))
                    for row in missing[first]
                ]
                self._known.put(fresh, np.array(numbers, dtype=np.int64))
                found = self._known.find(keys)
            result[busy] = found
        return result


class Outcomes(Generic[Move]):
    """What a rule leads to, for everything that it was ever seen to read and view."""

    def __init__(
        self,
        number: int,
        rule: Rule[Move],
        world: Stepping[Move],
        zobrist: Zobrist,
        *,
        wide: bool,
    ) -> None:
        self.number, self.rule = number, rule
        self._world, self._zobrist = world, zobrist
        self._wide = wide
        self.columns = (*rule.reads, *rule.wider) if wide else rule.reads
        self._known = Lookup()
        self._count = 0
        self.values = np.zeros((64, len(self.columns)), dtype=np.uint16)
        """Of each outcome, what is in its columns afterwards."""
        self.tails = np.zeros((64, len(rule.appends)), dtype=np.uint16)
        """Of each outcome, what is appended to each queue."""
        self.gains = np.zeros(64, dtype=np.uint64)
        """By how much each outcome changes the mark, queues aside."""

    def entries(self, columns: Columns, rows: Rows) -> NDArray[np.int64]:
        """For each row its first outcome and their number, or that it needs a wider look."""
        keys = self._keys(columns, rows)
        found = self._known.find(keys)
        missing = np.flatnonzero(found == MISSING)
        if len(missing):
            fresh, first = np.unique(keys[missing], return_index=True)
            numbers = [self._work_out(columns, int(row)) for row in rows[missing[first]]]
            self._known.put(fresh, np.array(numbers, dtype=np.int64))
            found = self._known.find(keys)
        return found

    def _keys(self, columns: Columns, rows: Rows) -> Marks:
        keys = np.zeros(len(rows), dtype=np.uint64)
        for column in self.columns:
            keys += self._zobrist.of[column][columns[column, rows]]
        for view in self.rule.views:
            keys += self._zobrist.of[view.column][view.at(columns, rows)]
        return keys

    def _work_out(self, columns: Columns, row: int) -> int:
        state = tuple(int(value) for value in columns[:, row])
        first, moves = self._count, self.rule.moves(state)
        assert len(moves) < 1 << _COUNT_BITS
        for place, move in enumerate(moves):
            try:
                after = self._world.step(state, move)
            except DEFECTS as defect:
                raise Broken(row=row, rule=self.number, place=place, defect=defect) from defect
            if not self._wide and self.rule.is_wide(state, after):
                self._count = first
                return _WIDE
            self._keep(state, after)
        alone = None if self.rule.eager is None else self.rule.eager(state, moves)
        eager = 0 if alone is None or self._wide else alone + 1
        return (first << _COUNT_BITS | eager) << _COUNT_BITS | len(moves)

    def _keep(self, state: RowState, after: RowState) -> None:
        appends = self.rule.appends
        for column, (before, now) in enumerate(zip(state, after, strict=True)):
            if before != now and column not in self.columns and column not in appends:
                raise RuntimeError(f"{self.rule.name} changes column {column}, and must not")
        if max(after) >= VALUES_MAX:
            raise Crowded
        number, self._count = self._count, self._count + 1
        if number == len(self.gains):
            self.values, self.tails = _doubled(self.values), _doubled(self.tails)
            self.gains = _doubled(self.gains)
        self.values[number] = [after[column] for column in self.columns]
        self.tails[number] = [self._world.tail(state[queue], after[queue]) for queue in appends]
        marks = self._zobrist.of
        gain = sum(int(marks[c][after[c]]) - int(marks[c][state[c]]) for c in self.columns)
        self.gains[number] = gain % (1 << 64)


def counts_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many outcomes each entry has; none where a wider look is needed."""
    return np.where(entries < 0, 0, entries & ((1 << _COUNT_BITS) - 1))


def firsts_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first outcome of each entry."""
    return entries >> 2 * _COUNT_BITS


def eager_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the eager outcome of each entry, counted from 1; 0 where there is none."""
    return np.where(entries < 0, 0, entries >> _COUNT_BITS & ((1 << _COUNT_BITS) - 1))


def needs_wider(entries: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Where a wider look is needed."""
    wide: NDArray[np.bool_] = entries == _WIDE
    return wide


def _doubled(values: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([values, np.zeros_like(values)])
