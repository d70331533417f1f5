"""The explorer finds what there is to find, in worlds whose states can be counted by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lab.explore import (
    Bounds,
    Finding,
    FindingKind,
    PlainWorld,
    Violation,
    explore,
    packed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.explore import Result

Counts = tuple[int, ...]


class Counters(PlainWorld[Counts, int]):
    """Some counters, each of which goes from 0 to a limit; a move counts one of them up."""

    def __init__(self, count: int, limit: int, *, forbidden: Counts | None = None) -> None:
        self._count = count
        self._limit = limit
        self._forbidden = forbidden

    def begin(self) -> Counts:
        return (0,) * self._count

    def moves(self, state: Counts) -> Sequence[int]:
        return [place for place, value in enumerate(state) if value < self._limit]

    def step(self, state: Counts, move: int) -> Counts:
        return (*state[:move], state[move] + 1, *state[move + 1 :])

    def check(self, state: Counts) -> None:
        if state == self._forbidden:
            raise Violation("counts", f"{state} is forbidden")

    def finished(self, state: Counts) -> bool:
        return min(state) == self._limit


class Philosophers(PlainWorld[tuple[int, ...], tuple[int, str]]):
    """Each takes the fork to the left, then the one to the right, eats once, and goes.

    For each, how many forks are held: 0, 1 or 2; 3 when gone.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def begin(self) -> tuple[int, ...]:
        return (0,) * self._count

    def moves(self, state: tuple[int, ...]) -> Sequence[tuple[int, str]]:
        moves = []
        for seat, forks in enumerate(state):
            left_neighbour = state[(seat - 1) % self._count]
            right_neighbour = state[(seat + 1) % self._count]
            if forks == 0 and left_neighbour != 2:
                moves.append((seat, "takes the left fork"))
            if forks == 1 and right_neighbour not in {1, 2}:
                moves.append((seat, "takes the right fork"))
            if forks == 2:
                moves.append((seat, "goes"))
        return moves

    def step(self, state: tuple[int, ...], move: tuple[int, str]) -> tuple[int, ...]:
        seat, _ = move
        return (*state[:seat], state[seat] + 1, *state[seat + 1 :])

    def finished(self, state: tuple[int, ...]) -> bool:
        return set(state) == {3}


class Corridor(PlainWorld[tuple[int, int], str]):
    """Two people meet in a corridor; with bad luck both are too polite to pass."""

    def begin(self) -> tuple[int, int]:
        return (0, 0)

    def moves(self, state: tuple[int, int]) -> Sequence[str]:
        if state == (9, 9):
            return []
        if state == (0, 0):
            return ["meet", "pass"]
        return ["both step left" if state == (1, 1) else "both step right"]

    def step(self, state: tuple[int, int], move: str) -> tuple[int, int]:
        del state
        if move == "pass":
            return (9, 9)
        return (1, 1) if move in {"meet", "both step right"} else (2, 2)

    def finished(self, state: tuple[int, int]) -> bool:
        return state == (9, 9)


def finding_of(result: Result) -> Finding:
    assert result.finding is not None
    assert not result.exhausted
    return result.finding


@pytest.mark.parametrize(("count", "limit"), [(1, 5), (2, 3), (3, 4), (4, 2)])
def test_every_state_and_every_move_is_visited_once(count: int, limit: int) -> None:
    result = explore(Counters(count, limit))

    assert result.exhausted
    assert result.finding is None
    assert result.state_count == (limit + 1) ** count
    assert result.move_count == count * limit * (limit + 1) ** (count - 1)
    assert result.finished_count == 1


def test_the_story_that_leads_to_a_broken_promise_is_a_shortest_one() -> None:
    result = explore(Counters(3, 4, forbidden=(2, 0, 1)))

    finding = finding_of(result)
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem == "counts: (2, 0, 1) is forbidden"
    assert sorted(finding.story) == ["0", "0", "2"]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_deadlock_is_found(count: int) -> None:
    result = explore(Philosophers(count))

    finding = finding_of(result)
    assert finding.kind is FindingKind.DEADLOCK
    assert len(finding.story) == count
    assert {line.split("'")[1] for line in finding.story} == {"takes the left fork"}


def test_one_philosopher_more_than_forks_in_reach_needs_no_luck() -> None:
    result = explore(Philosophers(1))

    assert finding_of(result).kind is FindingKind.DEADLOCK


def test_a_livelock_is_found_though_there_is_always_a_move() -> None:
    result = explore(Corridor())

    finding = finding_of(result)
    assert finding.kind is FindingKind.LIVELOCK
    assert finding.story == ("meet",)


def test_a_move_that_raises_is_a_finding_with_the_move_at_the_end_of_its_story() -> None:
    class Broken(Counters):
        def step(self, state: Counts, move: int) -> Counts:
            if state == (1, 1):
                raise KeyError("nothing there")
            return super().step(state, move)

    finding = finding_of(explore(Broken(2, 3)))

    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem == "KeyError: 'nothing there'"
    assert len(finding.story) == 3


def test_a_search_that_reaches_a_bound_does_not_claim_to_be_exhausted() -> None:
    result = explore(Counters(4, 9), bounds=Bounds(state_count=100))

    assert not result.exhausted
    assert result.stopped_by == "100 states"
    assert result.finding is None
    assert "not exhausted: stopped by 100 states" in result.summary()


def test_a_search_ends_in_time() -> None:
    result = explore(Counters(6, 9), bounds=Bounds(seconds=0.05))

    assert result.stopped_by == "0 seconds"
    assert result.state_count < 10**6  # Not all of them.


def test_a_search_stays_within_its_memory() -> None:
    result = explore(Counters(6, 9), bounds=Bounds(memory_bytes=1 << 20))

    assert result.stopped_by == "1048576 bytes of memory"


@pytest.mark.parametrize("name", ["seconds", "state_count", "memory_bytes"])
def test_a_bound_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be more than 0, got 0"):
        Bounds(**{name: 0})


def test_the_result_as_a_document_tells_the_same_as_the_summary() -> None:
    result = explore(Philosophers(3))

    document = result.document()

    assert document["states"] == result.state_count
    assert document["exhausted"] is False
    assert document["finding"] == {
        "kind": "deadlock",
        "problem": "nothing can happen, work is left",
        "story": list(finding_of(result).story),
    }
    assert next(iter(finding_of(result).lines())) == "deadlock: nothing can happen, work is left"


def test_equal_values_are_packed_alike_whatever_the_order_of_their_sets() -> None:
    left, right = frozenset(), frozenset()
    for item in ("a", "b", "c", 1, (2, None)):
        left |= {item}
    for item in ((2, None), 1, "c", "b", "a"):
        right |= {item}

    assert packed((left, True)) == packed((right, True))
    assert packed(("1",)) != packed((1,))
    assert packed(((1,), 2)) != packed((1, (2,)))


def test_values_that_cannot_be_told_apart_are_not_packed() -> None:
    with pytest.raises(TypeError, match="plain values"):
        packed((object(),))
