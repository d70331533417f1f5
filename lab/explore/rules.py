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

from collections import defaultdict
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from lab.explore.result import DEFECTS
from lab.explore.tables import MISSING, Lookup, mixed
from lab.explore.world import Move
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Columns = NDArray[np.uint32]
    Rows = NDArray[np.int64]
    Marks = NDArray[np.uint64]

RowState = tuple[int, ...]
Move_contra = TypeVar("Move_contra", contravariant=True)

_VALUES_FIRST = 1 << 12
"""Tables by value begin with so many, and are doubled when a column has more."""
_QUEUE_BITS = np.uint64(32)

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
        self._seen = np.full(_VALUES_FIRST, MISSING, dtype=np.int32)

    def of(self, state: RowState) -> int:
        """What it is in one state."""
        return self._see(state[self.column])

    def at(self, columns: Columns, rows: Rows) -> NDArray[np.int32]:
        """What it is in each of these rows; 0 or more."""
        values = columns[self.column, rows]
        seen = self._known(values)
        if len(seen) and seen.min() == MISSING:
            self._look_at(values[seen == MISSING])
            seen = self._seen[values]
        return seen

    def where(self, columns: Columns, rows: Rows | slice) -> Rows:
        """Those of the rows in which it is not 0."""
        values = columns[self.column, rows]
        seen = self._known(values)
        found = np.flatnonzero(seen)
        missing = found[seen[found] == MISSING]
        if len(missing):
            self._look_at(values[missing])
            found = np.flatnonzero(self._seen[values])
        return found if isinstance(rows, slice) else rows[found]

    def _known(self, values: NDArray[np.uint32]) -> NDArray[np.int32]:
        try:
            return self._seen[values]
        except IndexError:
            self._grow(int(values.max()))
            return self._seen[values]

    def _look_at(self, values: NDArray[np.uint32]) -> None:
        for value in {int(value) for value in values}:
            self._seen[value] = self._see(value)

    def _grow(self, value: int) -> None:
        more = np.full(2 * value, MISSING, dtype=np.int32)
        more[: len(self._seen)] = self._seen
        self._seen = more


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Move]):
    """A family of moves."""

    name: str
    phase: Phase
    only: tuple[Look, ...]
    """Where one of these is 0 there are no moves; a cheap way to leave rows out."""
    reads: tuple[int, ...]
    """The party that moves first, where a move may be eager."""
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


class Mirroring(Protocol):
    """What a state looks like with parties of equal rights in each other's places."""

    def column(self, column: int) -> int:
        """Where the image of a column is."""
        ...

    def value(self, column: int, value: int) -> int:
        """The image of what is in a column."""
        ...


class Zobrist:
    """A random number for every value of every column; a state's mark is the sum of its own.

    So the mark of a successor follows from the columns that changed. (Zobrist, 1970.) Where a
    world has a mirror, a state has two marks, its own and that of its image; the lower one is
    that of both.
    """

    def __init__(self, column_count: int, mirror: Mirroring | None = None) -> None:
        self._column_count, self._mirror = column_count, mirror
        self.mark_count = 1 if mirror is None else 2
        self.of: Marks = np.zeros((self.mark_count, column_count, 0), dtype=np.uint64)
        """For states and images, by column and value; 0 where an image was not asked for yet."""
        self._fill(_VALUES_FIRST)

    def _fill(self, value_count: int) -> None:
        before = self.of
        columns = np.arange(self._column_count, dtype=np.uint64) << np.uint64(32)
        values = np.arange(value_count, dtype=np.uint64)
        self.of = np.zeros((self.mark_count, self._column_count, value_count), dtype=np.uint64)
        self.of[0] = mixed(np.bitwise_or.outer(columns, values))
        self.of[1:, :, : before.shape[2]] = before[1:]

    def know(self, column: int, values: NDArray[np.integer[Any]]) -> None:
        """Makes sure that there are numbers for some values of a column, and for their images."""
        most = int(values.max(initial=0))
        if most >= self.of.shape[2]:
            self._fill(2 * most)
        if self._mirror is not None:
            for value in {int(value) for value in values[self.of[1, column][values] == 0]}:
                place, image = self._mirror.column(column), self._mirror.value(column, value)
                if image >= self.of.shape[2]:
                    self._fill(2 * image)
                self.of[1, column, value] = self.of[0, place, image]

    def at(self, column: int, values: NDArray[np.integer[Any]]) -> Marks:
        """The numbers of some values of a column, and of their images."""
        numbers: Marks = self.of[:, column][:, values]
        return numbers

    def keys(self, marks: Marks) -> Marks:
        """What states are remembered by, given their marks and those of their images."""
        return marks[0] if self._mirror is None else mixed(np.minimum(marks[0], marks[1]))

    def marks(self, columns: Columns) -> Marks:
        """The marks of whole states, and of their images."""
        total = np.zeros((self.mark_count, columns.shape[1]), dtype=np.uint64)
        for column, values in enumerate(columns):
            self.know(column, values)
            total += self.at(column, values)
        return total


class Joins:
    """Queues with others behind them, each worked out once."""

    def __init__(self, joined: Callable[[int, int], int]) -> None:
        self._joined = joined
        self._known = Lookup()

    def of(self, queues: NDArray[np.uint32], more: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Each queue with the other behind it."""
        result = more.copy()
        busy = np.flatnonzero(queues)
        if len(busy):
            pairs = queues[busy].astype(np.uint64) << _QUEUE_BITS | more[busy]
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
        self._eager_keys: dict[int, list[int]] = defaultdict(list)
        """Where a move is eager, by the value of the first column that the rule reads."""
        self._count = 0
        self.values = np.zeros((64, len(self.columns)), dtype=np.uint32)
        """Of each outcome, what is in its columns afterwards."""
        self.tails = np.zeros((64, len(rule.appends)), dtype=np.uint32)
        """Of each outcome, what is appended to each queue."""
        self.gains = np.zeros((64, zobrist.mark_count), dtype=np.uint64)
        """By how much each outcome changes the marks, queues aside."""

    def entries(self, columns: Columns, rows: Rows) -> NDArray[np.int64]:
        """For each row its first outcome and their number, or that it needs a wider look."""
        keys = self._keys(columns, rows)
        found = self._known.find(keys)
        missing = np.flatnonzero(found == MISSING)
        if len(missing):
            fresh, first = np.unique(keys[missing], return_index=True)
            worked_out = rows[missing[first]]
            numbers = np.array([self._work_out(columns, int(row)) for row in worked_out])
            self._known.put(fresh, numbers)
            eager = np.flatnonzero(eager_of(numbers))
            parties = columns[self.columns[0], worked_out[eager]]
            for value, key in zip(parties.tolist(), fresh[eager].tolist(), strict=True):
                self._eager_keys[value].append(key)
            found = self._known.find(keys)
        return found

    def forget_eager(self, values: Iterable[int]) -> None:
        """What is eager is worked out anew where the party that moves has one of these values."""
        keys = [key for value in values for key in self._eager_keys.pop(value, ())]
        if keys:
            self._known.put(
                np.array(keys, dtype=np.uint64), np.full(len(keys), MISSING, dtype=np.int64)
            )

    def _keys(self, columns: Columns, rows: Rows) -> Marks:
        keys = np.zeros(len(rows), dtype=np.uint64)
        for column in self.columns:
            keys += self._zobrist.of[0, column][columns[column, rows]]
        for view in self.rule.views:
            keys += self._zobrist.of[0, view.column][view.at(columns, rows)]
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
        number, self._count = self._count, self._count + 1
        if number == len(self.gains):
            self.values, self.tails = _doubled(self.values), _doubled(self.tails)
            self.gains = _doubled(self.gains)
        self.values[number] = [after[column] for column in self.columns]
        self.tails[number] = [self._world.tail(state[queue], after[queue]) for queue in appends]
        for column in self.columns:
            if after[column] != state[column]:
                values = np.array([after[column], state[column]])
                self._zobrist.know(column, values)
                now, before = self._zobrist.at(column, values).T
                self.gains[number] += now - before


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
