"""Whether quiet worlds come to their end.

From every state in which nothing usual can happen, the usual order of things is followed: what
can happen happens, and when nothing can, the timer expires that has expired least often. It must
lead to a state in which all work is done, or to one from which that was shown already. This shows
that a path to a good end exists from there; that is what a livelock lacks.

The one rule: every timer has its turn. A resend that is answered in as many moves as there are
timers would otherwise come up again and again, and the deadline behind it never.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lab.explore.following import BulkWorld
    from lab.explore.rules import RowState
    from lab.explore.world import Move

_MOVES_MAX = 5_000
"""Within so many a handoff ends many times over, by its deadlines at the latest."""


def check_endings(world: BulkWorld[Move], quiet: Iterable[RowState]) -> str | None:
    """The first of the quiet states that comes to no end, in words; nothing if all do."""
    fine: set[RowState] = set()
    for state in quiet:
        passed = _follow(world, state, fine)
        if passed is None:
            return ", ".join(world.tell(state, move) for move in world.moves(state))
        fine.update(passed)
    return None


def _follow(world: BulkWorld[Move], state: RowState, fine: set[RowState]) -> list[RowState] | None:
    """The states on the way to the end, or to a state that is known to lead there."""
    passed: list[RowState] = []
    taken: Counter[Move] = Counter()
    for _ in range(_MOVES_MAX):
        if state in fine or world.finished(state):
            return passed
        passed.append(state)
        moves = [move for move in world.moves(state) if not world.is_fault(move)]
        if not moves:
            return None
        move = min(moves, key=taken.__getitem__)
        taken[move] += 1
        state = world.step(state, move)
    return None
