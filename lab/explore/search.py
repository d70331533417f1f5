"""The search: every state of a world, breadth first.

    result = explore(world)

Breadth first, so that the story that leads to a finding is a shortest one. When all states
were visited without a finding, the search looks at the graph as a whole: from every state, a
path must lead to one in which all work is done. A state from which none does is a livelock;
scheduling cannot help there, however fair it is.

The one rule that must not break: `exhausted` is said only when no state was left out that
bounds, or a reduction that keeps all findings, did not excuse.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

from lab.explore.bounds import Bounds, Watch
from lab.explore.delays import Delayed
from lab.explore.graph import BEGINNING, Graph
from lab.explore.result import DEFECTS, Finding, FindingKind, Result, said_by
from lab.explore.world import Move, State, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.explore.world import World


def explore(
    world: World[State, Move],
    *,
    bounds: Bounds | None = None,
    delays: int | None = None,
) -> Result:
    """Visits the states of a world until a finding, its end, or a bound.

    Args:
        world: what to look at.
        bounds: where to stop; a quarter of an hour and 6 GiB by default.
        delays: at most so many moves are put off, see `delays`; all orders when `None`.
    """
    bounds = bounds or Bounds()
    if delays is None:
        return _Search(world, bounds).run()
    late = Delayed(world, delays=delays)
    result = _Search(late, bounds, level_of=lambda state: state.used).run()
    return replace(result, delays=delays)


class _Search(Generic[State, Move]):
    def __init__(
        self,
        world: World[State, Move],
        bounds: Bounds,
        *,
        level_of: Callable[[State], int] = lambda _: 0,
    ) -> None:
        self._world = world
        self._watch = Watch(bounds)
        self._level_of = level_of
        self._graph = Graph()
        self._queues: list[deque[tuple[int, State]]] = [deque()]
        self._finding: Finding | None = None
        self._stopped_by = ""

    def run(self) -> Result:
        self._begin()
        for queue in self._queues:  # Grows at its end while states with more delays turn up.
            while queue and self._finding is None and not self._stopped_by:
                number, state = queue.popleft()
                self._expand(number, state)
                self._stopped_by = self._watch.must_stop(len(self._graph))
        if not any(self._queues) and self._finding is None:
            self._stopped_by = ""
            self._look_back()
        return Result(
            state_count=len(self._graph),
            move_count=self._graph.edge_count,
            finished_count=self._graph.finished_count,
            exhausted=self._finding is None and not self._stopped_by,
            stopped_by=self._stopped_by or ("the finding" if self._finding else ""),
            reduced=False,
            delays=None,
            seconds=self._watch.seconds,
            memory_bytes=self._watch.grown_bytes(),
            finding=self._finding,
        )

    def _begin(self) -> None:
        state = self._world.begin()
        self._enter(state, parent=BEGINNING, place=0)

    def _enter(self, state: State, *, parent: int, place: int) -> int:
        """Takes in a state that a move has led to."""
        number, fresh = self._graph.enter(self._world.pack(state), parent=parent, move=place)
        if not fresh:
            return number
        try:
            self._world.check(state)
        except DEFECTS as defect:
            self._find(FindingKind.VIOLATION, str(defect), number)
            return number
        if self._world.finished(state):
            self._graph.finish(number)
        level = self._level_of(state)
        while level >= len(self._queues):
            self._queues.append(deque())
        self._queues[level].append((number, state))
        return number

    def _expand(self, number: int, state: State) -> None:
        moves = self._world.moves(state)
        if not moves:
            if not self._world.finished(state):
                self._find(FindingKind.DEADLOCK, "nothing can happen, work is left", number)
            return
        for place in range(len(moves)):
            self._follow(number, state, moves, place)
            if self._finding is not None:
                return

    def _follow(self, number: int, state: State, moves: Sequence[Move], place: int) -> None:
        """Follows one move."""
        try:
            successor = self._world.step(state, moves[place])
        except DEFECTS as defect:
            last = self._world.tell(state, moves[place])
            self._find(FindingKind.VIOLATION, said_by(defect), number, last=last)
            return
        reached = self._enter(successor, parent=number, place=place)
        self._graph.join(number, reached)

    def _look_back(self) -> None:
        """Every state was visited: what can be said about them all?"""
        lost = self._graph.first_lost()
        if lost is not None:
            problem = "from here no path leads to an end with all work done"
            self._find(FindingKind.LIVELOCK, problem, lost)
            return
        try:
            self._world.conclude()
        except Violation as violation:
            self._find(FindingKind.VIOLATION, str(violation), BEGINNING)

    def _find(self, kind: FindingKind, problem: str, number: int, *, last: str = "") -> None:
        story = [*self._story(number), *([last] if last else [])]
        self._finding = Finding(kind=kind, problem=problem, story=tuple(story))

    def _story(self, number: int) -> list[str]:
        """Walks from the beginning to a state again, and tells every move."""
        state, reported = self._world.begin(), []
        for place in self._graph.path_to(number):
            move = self._world.moves(state)[place]
            reported.append(self._world.tell(state, move))
            state = self._world.step(state, move)
        return reported
