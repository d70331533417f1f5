"""Quiet worlds that come to an end are told from those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lab.explore.endings import check_endings

if TYPE_CHECKING:
    from collections.abc import Sequence

QUIET, ASKED, DONE = (0,), (1,), (2,)


class Asking:
    """A question that is asked again whenever nothing comes of it, and perhaps a deadline."""

    def __init__(self, timers: Sequence[str]) -> None:
        self._timers = timers

    def moves(self, state: tuple[int, ...]) -> Sequence[str]:
        return {QUIET: self._timers, ASKED: ["the answer helps nobody"], DONE: []}[state]

    def step(self, _state: tuple[int, ...], move: str) -> tuple[int, ...]:
        return {"ask again": ASKED, "give up": DONE}.get(move, QUIET)

    def finished(self, state: tuple[int, ...]) -> bool:
        return state == DONE

    def is_fault(self, _move: str) -> bool:
        return False

    def tell(self, _state: tuple[int, ...], move: str) -> str:
        return move


def lost(*timers: str) -> str | None:
    return check_endings(cast("Any", Asking(timers)), [QUIET])


def test_a_deadline_has_its_turn_though_a_question_is_asked_again_in_step_with_it() -> None:
    assert lost("ask again", "give up") is None
    assert lost("give up", "ask again") is None


def test_a_question_that_is_asked_again_for_ever_comes_to_no_end() -> None:
    assert lost("ask again") == "ask again"
