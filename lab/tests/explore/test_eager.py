"""Moves that may happen at once, because it makes no difference when; and those that may not."""

from __future__ import annotations

import pytest

from lab.explore import Violation
from lab.explore.eager import check_commuting
from lab.explore.memo import Memo

STAMP, ADD, ASK = range(3)
"""Inputs: the first is eager."""

Said = tuple[tuple[int, int], ...]


class Clerk:
    """Adds up, and stamps what lies there once."""

    def __init__(self, *, tells: bool) -> None:
        self.total = 0
        self.stamped = False
        self._tells = tells

    def give(self, given: int) -> Said:
        if given == STAMP:
            self.stamped = True
        elif given == ADD:
            self.total = min(2, self.total + 1)
        elif self._tells:
            return ((0, int(self.stamped)),)
        return ((1, self.total),) if given == ASK else ()


def memo_of(clerk: Clerk, *inputs: int) -> Memo[Clerk, int, Said]:
    """What is known after the stamp came first, and then everything else in every order."""
    memo = Memo(clerk, freeze=lambda c: (c.total, c.stamped), run=Clerk.give)
    states = {memo.after(0, STAMP)[0]}
    for _ in range(4):
        states |= {memo.after(state, given)[0] for state in states for given in inputs}
    return memo


def eager_in(memo: Memo[Clerk, int, Said], state: int) -> list[int]:
    return [] if memo.machine(state).stamped else [STAMP]


def test_a_move_that_commutes_with_all_others_is_found_to() -> None:
    memo = memo_of(Clerk(tells=False), ADD, ASK)

    pairs = check_commuting(
        memo, eager_in=lambda state: eager_in(memo, state), applies=lambda *_: True
    )

    # Not stamped with a total of 0, 1 and 2; the last two were never visited by the search.
    assert pairs == 3


def test_a_move_whose_time_makes_a_difference_is_found_out() -> None:
    memo = memo_of(Clerk(tells=True), ADD, ASK)

    with pytest.raises(Violation, match="inputs 0 and 2 do not commute in 0"):
        check_commuting(memo, eager_in=lambda state: eager_in(memo, state), applies=lambda *_: True)


def test_what_only_exists_after_the_move_needs_no_twin() -> None:
    memo = memo_of(Clerk(tells=True), ADD, ASK)

    check_commuting(
        memo,
        eager_in=lambda state: eager_in(memo, state),
        applies=lambda state, given: given != ASK or memo.machine(state).stamped,
    )
