"""With at most k delays: few orders, and the bugs that need no more than k of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.explore import FindingKind, PlainWorld, Violation, explore

if TYPE_CHECKING:
    from collections.abc import Sequence

Log = tuple[str, ...]


class Errands(PlainWorld[Log, str]):
    """Each errand is run once; usually in the order of the alphabet."""

    def __init__(self, errands: str, *, wrong: str = "", fault: str = "") -> None:
        self._errands = errands
        self._wrong = tuple(wrong)
        self._fault = fault

    def begin(self) -> Log:
        return ()

    def moves(self, state: Log) -> Sequence[str]:
        return [errand for errand in self._errands if errand not in state]

    def step(self, state: Log, move: str) -> Log:
        return (*state, move)

    def check(self, state: Log) -> None:
        if self._wrong and state[-len(self._wrong) :] == self._wrong:
            raise Violation("order", f"{''.join(state)} is wrong")

    def finished(self, state: Log) -> bool:
        return set(self._errands) - {self._fault} <= set(state)

    def is_fault(self, move: str) -> bool:
        return move == self._fault


def test_without_delays_there_is_one_order() -> None:
    result = explore(Errands("abcd"), delays=0)

    assert result.exhausted
    assert result.delays == 0
    assert (result.state_count, result.move_count) == (5, 4)


def test_with_one_delay_each_move_is_the_last_one_once() -> None:
    result = explore(Errands("abcd"), delays=1)

    # The usual order is "abcd"; delaying a, b or c puts it to the end.
    assert result.exhausted
    assert result.finished_count == 4


def test_enough_delays_give_all_orders() -> None:
    bounded, whole = explore(Errands("abcd"), delays=6), explore(Errands("abcd"))

    assert whole.finished_count == 24
    assert bounded.finished_count == 24


@pytest.mark.parametrize(
    ("wrong", "delays"), [("abcd", 0), ("db", 1), ("ca", 2), ("dba", 3), ("dcba", 6)]
)
def test_a_wrong_order_is_found_with_as_many_delays_as_it_takes(wrong: str, delays: int) -> None:
    results = [explore(Errands("abcd", wrong=wrong), delays=k) for k in range(delays + 1)]

    assert [result.finding is not None for result in results] == [False] * delays + [True]


def test_a_fault_costs_no_delay() -> None:
    result = explore(Errands("abx", wrong="axb", fault="x"), delays=0)

    assert result.finding is not None
    assert result.finding.kind is FindingKind.VIOLATION
    assert result.finding.story == ("a", "x", "b")


def test_delays_are_told_in_the_story() -> None:
    result = explore(Errands("abc", wrong="bca"), delays=1)

    assert result.finding is not None
    assert result.finding.story == ("(delayed: a)", "b", "c", "a")


def test_fewer_delays_than_none_are_refused() -> None:
    with pytest.raises(ValueError, match="delays must be 0 or more, got -1"):
        explore(Errands("ab"), delays=-1)
