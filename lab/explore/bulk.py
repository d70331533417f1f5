"""The search for worlds of hundreds of millions of states: whole arrays of states at a time.

    result = explore_in_bulk(world)

Breadth first, as `search`, over states that are rows of small numbers, by rules that are worked
out once (`rules`). Of a visited state about 20 bytes are kept: its mark, and how it was reached,
so that its story can be told. The moves between states are not kept, so livelocks are looked for
in another way: usual moves use something up, so every state leads to a *quiet* one, in which only
timers and faults are left; and from every quiet state, the usual order of things, with timers
expiring in turn, must come to an end with all work done.

What must not break: a rule that overlooks a column hides states. So, all along the way, samples
are compared with the world's own moves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import numpy as np

from lab.explore.bounds import Bounds, Watch
from lab.explore.endings import check_endings
from lab.explore.following import Followed, Following, Stuck
from lab.explore.result import DEFECTS, Finding, FindingKind, Result, said_by
from lab.explore.rules import Broken, Zobrist
from lab.explore.tables import Seen
from lab.explore.trail import Trail, code_of, move_of
from lab.explore.world import Move, Violation

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from lab.explore.following import BulkWorld
    from lab.explore.rules import Columns, Marks, Rows, RowState

CHUNK_STATES = 1 << 16
"""States that are expanded together: enough to make a call of NumPy cheap for each."""


_REVIEW_FIRST = 1 << 12
"""After so many states the world looks back for the first time, then whenever they are four times
as many: what it learns early need not be looked at anew."""


class _Block(NamedTuple):
    """States that wait for their turn."""

    columns: Columns
    marks: Marks
    numbers: NDArray[np.uint32]


class _Alone(NamedTuple):
    """States in which an eager move was followed alone; in few bytes, as there are many."""

    columns: NDArray[np.unsignedinteger[Any]]
    numbers: NDArray[np.uint32]
    party: NDArray[np.int8]
    """The column of the party that moved."""

    @classmethod
    def of(cls, block: _Block, rows: Rows, party: NDArray[np.int8]) -> _Alone:
        """Some states of a block."""
        columns = block.columns[:, rows]
        narrow = columns.max() < 1 << 16
        return cls(columns.astype(np.uint16) if narrow else columns, block.numbers[rows], party)

    def at(self, rows: Rows) -> _Alone:
        """Some of them."""
        return _Alone(self.columns[:, rows], self.numbers[rows], self.party[rows])

    def where(self, failed: Collection[tuple[int, int]]) -> NDArray[np.bool_]:
        """In which of them a party moved that had one of these values in its column."""
        found = np.zeros(len(self.party), dtype=np.bool_)
        for column in {column for column, _ in failed}:
            values = np.array([value for at, value in failed if at == column], dtype=np.uint32)
            found |= (self.party == column) & np.isin(self.columns[column], values)
        return found


class _Bad(Exception):  # noqa: N818 - ends a search from within
    """A promise is broken in a new state."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number, self.problem = number, problem


def explore_in_bulk(world: BulkWorld[Move], *, bounds: Bounds | None = None) -> Result:
    """Visits the states of a world until a finding, its end, or a bound."""
    return _BulkSearch(world, bounds or Bounds()).run()


class _BulkSearch(Generic[Move]):
    def __init__(self, world: BulkWorld[Move], bounds: Bounds) -> None:
        self._world = world
        self._watch = Watch(bounds)
        self._zobrist = Zobrist(len(world.begin()), world.mirror())
        self._finding: Finding | None = None
        self._rules = world.rules()
        self._following = Following(world, self._rules, self._zobrist)
        self._checked = [(columns, Seen()) for columns in world.checks()]
        self._seen = Seen()
        self._trail = Trail()
        self._queue: deque[_Block] = deque()
        self._alone: list[_Alone] = []
        self._waiting: list[tuple[Columns, Marks]] = []
        self._waiting_count = 0
        self._next_first = 0
        self._move_count = 0
        self._review_at = _REVIEW_FIRST
        self._begin()

    def run(self) -> Result:
        stopped_by = ""
        while self._finding is None and not stopped_by and self._refill():
            self._expand(self._queue.popleft())
            stopped_by = self._watch.must_stop(len(self._seen))
            self._review()
        if self._finding is None and not stopped_by:
            self._look_back()
        return Result(
            state_count=len(self._seen),
            move_count=self._move_count,
            finished_count=self._following.finished_count,
            exhausted=self._finding is None and not stopped_by,
            stopped_by=stopped_by or ("the finding" if self._finding else ""),
            reduced=False,
            delays=None,
            seconds=self._watch.seconds,
            memory_bytes=self._watch.grown_bytes(),
            finding=self._finding,
        )

    def _review(self) -> None:
        """Now and then, and at the end, the world looks at what it took for granted.

        Where it was wrong, states are followed by all their moves after all. So what was seen
        until then was not in vain: they are states of this world, if not the fewest.
        """
        at_end = not self._queue and not self._waiting
        if self._finding is None and (at_end or len(self._seen) >= self._review_at):
            self._review_at = 4 * len(self._seen)
            failed = self._world.review()
            if failed:
                self._following.forget_eager(failed)
                self._follow_anew(failed)

    def _follow_anew(self, failed: Collection[tuple[int, int]]) -> None:
        kept, anew = [], []
        for alone in self._alone:
            found = alone.where(failed)
            if found.any():
                anew.append(alone.at(np.flatnonzero(found)))
                kept.append(alone.at(np.flatnonzero(~found)))
            else:
                kept.append(alone)
        self._alone = kept
        if anew:
            columns = np.concatenate([alone.columns for alone in anew], axis=1, dtype=np.uint32)
            numbers = np.concatenate([alone.numbers for alone in anew])
            marks = self._zobrist.marks(columns)
            for first in range(0, len(numbers), CHUNK_STATES):
                rows = slice(first, first + CHUNK_STATES)
                self._queue.append(_Block(columns[:, rows], marks[:, rows], numbers[rows]))

    # ---------------------------------------------------------------- states that wait

    def _begin(self) -> None:
        columns = np.array([self._world.begin()], dtype=np.uint32).T.copy()
        marks = self._zobrist.marks(columns)
        self._seen.add(self._zobrist.keys(marks))
        self._trail.add(np.zeros(1, dtype=np.int64), 0)
        self._take_in(columns, marks)

    def _take_in(self, columns: Columns, marks: Marks) -> None:
        """New states wait until there are enough of them for a block."""
        self._waiting.append((columns, marks))
        self._waiting_count += marks.shape[1]
        if self._waiting_count >= CHUNK_STATES:
            self._close_block()

    def _close_block(self) -> None:
        columns = np.concatenate([columns for columns, _ in self._waiting], axis=1)
        marks = np.concatenate([marks for _, marks in self._waiting], axis=1)
        first, self._next_first = self._next_first, self._next_first + marks.shape[1]
        numbers = np.arange(first, self._next_first, dtype=np.uint32)
        self._queue.append(_Block(columns, marks, numbers))
        self._waiting, self._waiting_count = [], 0

    def _refill(self) -> bool:
        if not self._queue and self._waiting:
            self._close_block()
        return bool(self._queue)

    # ---------------------------------------------------------------- what happens to them

    def _expand(self, block: _Block) -> None:
        try:
            for followed in self._following.all_of(block.columns, block.marks):
                self._move_count += len(followed.rows)
                fresh = np.flatnonzero(self._seen.add(self._zobrist.keys(followed.marks)))
                if len(fresh):
                    self._arrive(block, followed, fresh)
            self._keep_alone(block)
            self._compare(block)
        except Broken as broken:
            number = int(block.numbers[broken.row])
            last = code_of(broken.rule, broken.place)
            self._find(FindingKind.VIOLATION, said_by(broken.defect), number, last=last)
        except Stuck as stuck:
            problem = "nothing can happen, work is left"
            self._find(FindingKind.DEADLOCK, problem, int(block.numbers[stuck.row]))
        except _Bad as bad:
            self._find(FindingKind.VIOLATION, bad.problem, bad.number)

    def _keep_alone(self, block: _Block) -> None:
        rows, party = self._following.alone
        if len(rows):
            self._alone.append(_Alone.of(block, rows, party))

    def _arrive(self, block: _Block, followed: Followed[Move], fresh: Rows) -> None:
        columns = followed.states(block.columns, fresh)
        first = self._trail.add(
            block.numbers[followed.rows[fresh]], code_of(followed.rule, followed.place)
        )
        self._check(columns, first)
        self._take_in(columns, followed.marks[:, fresh])

    def _check(self, columns: Columns, first: int) -> None:
        """Looks at the new states, at each combination of what `check` looks at once."""
        for looked_at, seen in self._checked:
            marks = np.zeros(columns.shape[1], dtype=np.uint64)
            for column in looked_at:
                marks += self._zobrist.of[0, column][columns[column]]
            for row in np.flatnonzero(seen.add(marks)):
                try:
                    self._world.check(_state(columns, int(row)))
                except DEFECTS as defect:
                    raise _Bad(first + int(row), said_by(defect)) from defect

    def _compare(self, block: _Block) -> None:
        """In one state of a block, rules lead to the same states as the world's own moves."""
        row = int(block.numbers[0]) % len(block.numbers)
        state = _state(block.columns, row)
        columns = block.columns[:, row : row + 1]
        by_rules = {
            int(mark)
            for followed in self._following.all_of(
                columns, block.marks[:, row : row + 1], again=True
            )
            for mark in followed.marks[0]
        }
        afters = [self._world.step(state, move) for move in self._world.moves(state)]
        if afters:
            rows = np.array(afters, dtype=np.uint32).T.copy()
            by_moves = {int(mark) for mark in self._zobrist.marks(rows)[0]}
        else:
            by_moves = set()
        if by_rules != by_moves:
            raise _Bad(int(block.numbers[row]), "rules and moves lead to different states")

    # ---------------------------------------------------------------- findings

    def _look_back(self) -> None:
        lost = check_endings(self._world, self._following.quiet_states())
        if lost is not None:
            problem = f"from here the usual order of things leads to no end: {lost}"
            self._finding = Finding(kind=FindingKind.LIVELOCK, problem=problem, story=())
            return
        try:
            self._world.conclude()
        except Violation as violation:
            self._finding = Finding(kind=FindingKind.VIOLATION, problem=str(violation), story=())

    def _find(
        self, kind: FindingKind, problem: str, number: int, *, last: int | None = None
    ) -> None:
        codes = self._trail.path_to(number) + ([] if last is None else [last])
        state, story = self._world.begin(), []
        for code in codes:
            rule, place = move_of(code)
            move = self._rules[rule].moves(state)[place]
            story.append(self._world.tell(state, move))
            if len(story) < len(codes) or last is None:
                state = self._world.step(state, move)
        self._finding = Finding(kind=kind, problem=problem, story=tuple(story))


def _state(columns: Columns, row: int) -> RowState:
    return tuple(int(value) for value in columns[:, row])
