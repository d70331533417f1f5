"""Groups of parties that nobody can disturb for now: only their moves need be followed.

When all faults have happened, most of what is left concerns one pair of ranks and then the
other, and in which order makes no difference as long as nobody else can send them anything. A
group's moves are a *persistent set* when none of the others, whatever they do among themselves,
can touch a member or send it a message before the group has moved. That is found out by letting
the others move on alone, in all orders; the answer depends on their states only, so it is found
once for each of those.

Ranks that write to each other are always in one group, so that a write concerns one group.
While there is something to do, no timer expires, and every move uses something up: no group
can go round in a circle and keep the others waiting.

What must not break: when in doubt, the group is one that can be disturbed.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from lab.explore.world import Violation
from lab.worlds.moves import MoveKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lab.worlds.moves import Move

State = tuple[int, ...]

_LOOK_MAX = 5_000
"""With more states than this among the others, the group counts as one that can be disturbed."""


class Groups:
    """Finds a group whose moves suffice."""

    def __init__(
        self,
        groups: Sequence[frozenset[int]],
        *,
        routes: Sequence[tuple[int, int]],
        usual: Callable[[State], Sequence[Move]],
        step: Callable[[State, Move], State],
        place_of: Callable[[Move], int],
    ) -> None:
        """Takes what it has to know of a world.

        Args:
            groups: the parties of each group, by their places.
            routes: who says something to whom on each channel; channels follow the parties.
            usual: the moves of a state, without timers and faults.
            step: the state after a move.
            place_of: the party that a move concerns.
        """
        self._usual, self._step, self._place_of = usual, step, place_of
        first = 1 + max(place for route in routes for place in route)
        channels = [(first + number, *route) for number, route in enumerate(routes)]
        self._groups = [
            (
                group,
                # What nobody but the group may change, and what the others' moves depend on.
                _picker([*group, *(c for c, a, b in channels if b in group and a not in group)]),
                _picker(
                    [
                        *(place for place in range(first) if place not in group),
                        *(c for c, _, b in channels if b not in group),
                        first + len(routes) + 1,
                    ]
                ),
            )
            for group in groups
        ]
        self._calm: list[dict[State, bool]] = [{} for _ in groups]

    def chosen(self, state: State, moves: Sequence[Move]) -> list[Move] | None:
        """The moves of a group that nobody can disturb; nothing if there is none."""
        for number, (group, _, _) in enumerate(self._groups):
            mine = [move for move in moves if self._place_of(move) in group]
            if 0 < len(mine) < len(moves) and self._is_calm(number, state):
                return mine
        return None

    def _is_calm(self, number: int, state: State) -> bool:
        """Whether the others, left to themselves, never touch the group."""
        group, own, others = self._groups[number]
        calm = self._calm[number]
        start = others(state)
        known = calm.get(start)
        if known is not None:
            return known
        seen, pending = {start}, [state]
        kept = own(state)
        while pending:
            here = pending.pop()
            for there in self._others_moves(here, group):
                if there is None or own(there) != kept:
                    calm[start] = False
                    return False
                key = others(there)
                if calm.get(key) is False or len(seen) > _LOOK_MAX:
                    calm[start] = False
                    return False
                if key not in seen and key not in calm:
                    seen.add(key)
                    pending.append(there)
        calm.update(dict.fromkeys(seen, True))
        return True

    def _others_moves(self, state: State, group: frozenset[int]) -> list[State | None]:
        """Where the others' moves lead; `None` for what concerns everybody, or breaks something."""
        reached: list[State | None] = []
        for move in self._usual(state):
            if move.kind is MoveKind.PREFILL:
                reached.append(None)
            elif self._place_of(move) not in group:
                try:
                    reached.append(self._step(state, move))
                except Violation:
                    reached.append(None)
        return reached


def _picker(places: list[int]) -> Callable[[State], State]:
    """Picks some entries out of a state."""
    return itemgetter(*sorted(places))
