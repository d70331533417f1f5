"""Two designs that failed, as small models: the explorer finds why in each of them.

A prefill instance has two ranks. In one step of the model both compute requests A and B, and
each rank hears of it by one signal. A rank can send a request only when it has been told where
to (registration), which another thread does at moments of its own.

`TOGETHER`: what is registered when the signal comes goes into one group; what is registered
later becomes a group of its own. The ranks meet at a barrier at the beginning of a group, and at
another at the end of each of its requests.

`ALONE`: every request is a group of its own, so that all ranks meet equally often; the order is
that in which a rank happened to hear of things.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from lab.explore import FindingKind, PlainWorld, Violation, explore

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = (0, 1)
SIGNALLED = ("A", "B")


class Design(Enum):
    TOGETHER = "together"
    ALONE = "alone"


class Place(Enum):
    """Where the sender of a rank is."""

    IDLE = "idle"
    BEGIN = "waits at the begin barrier"
    SENDING = "sending"
    FINISH = "waits at the finish barrier"


class Rank(NamedTuple):
    registered_count: int = 0
    signalled: bool = False
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups that wait for the sender; the first is under way unless it is idle."""
    place: Place = Place.IDLE
    sent: tuple[str, ...] = ()


class Instance(NamedTuple):
    ranks: tuple[Rank, ...] = (Rank(), Rank())
    reported: tuple[str, ...] = ()
    """What the engine was told to be finished."""


class Prefill(PlainWorld[Instance, tuple[int, str]]):
    """One prefill instance of either design."""

    def __init__(self, design: Design, *, registered: str) -> None:
        self._design = design
        self._registered = tuple(registered)
        """The requests in the order in which every rank is told where to send them."""

    def begin(self) -> Instance:
        return Instance()

    def moves(self, state: Instance) -> Sequence[tuple[int, str]]:
        moves = []
        for number, rank in enumerate(state.ranks):
            if rank.registered_count < len(self._registered):
                moves.append((number, "registers"))
            if not rank.signalled:
                moves.append((number, "is signalled"))
            if rank.place is Place.IDLE and rank.groups:
                moves.append((number, "comes to the begin barrier"))
            if rank.place is Place.SENDING:
                moves.append((number, "sends and comes to the finish barrier"))
        return moves

    def step(self, state: Instance, move: tuple[int, str]) -> Instance:
        number, what = move
        rank = state.ranks[number]
        match what:
            case "registers":
                rank = self._register(rank)
            case "is signalled":
                rank = self._signal(rank)
            case "comes to the begin barrier":
                rank = rank._replace(place=Place.BEGIN)
            case _:
                rank = rank._replace(place=Place.FINISH, sent=(*rank.sent, rank.groups[0][0]))
        ranks = tuple(rank if other == number else state.ranks[other] for other in RANKS)
        return self._meet(state._replace(ranks=ranks))

    def _register(self, rank: Rank) -> Rank:
        request = self._registered[rank.registered_count]
        rank = rank._replace(registered_count=rank.registered_count + 1)
        return rank._replace(groups=(*rank.groups, (request,))) if rank.signalled else rank

    def _signal(self, rank: Rank) -> Rank:
        known = self._registered[: rank.registered_count]
        ready = tuple(request for request in SIGNALLED if request in known)
        groups = [ready] if self._design is Design.TOGETHER and ready else [(r,) for r in ready]
        return rank._replace(signalled=True, groups=(*rank.groups, *groups))

    def _meet(self, state: Instance) -> Instance:
        """Barriers open when everybody has come."""
        places = {rank.place for rank in state.ranks}
        if places == {Place.BEGIN}:
            ranks = tuple(rank._replace(place=Place.SENDING) for rank in state.ranks)
            return state._replace(ranks=ranks)
        if places == {Place.FINISH}:
            # The reports of the ranks are merged, and the id of the first one is taken.
            reported = (*state.reported, state.ranks[0].groups[0][0])
            return Instance(ranks=tuple(map(self._next, state.ranks)), reported=reported)
        return state

    def _next(self, rank: Rank) -> Rank:
        rest = rank.groups[0][1:]
        if rest:
            return rank._replace(groups=(rest, *rank.groups[1:]), place=Place.SENDING)
        return rank._replace(groups=rank.groups[1:], place=Place.IDLE)

    def check(self, state: Instance) -> None:
        for request in state.reported:
            lacking = [str(n) for n, rank in enumerate(state.ranks) if request not in rank.sent]
            if lacking:
                raise Violation(
                    "completion", f"{request} is told finished, rank {lacking[0]} has not sent it"
                )

    def finished(self, state: Instance) -> bool:
        return sorted(state.reported) == sorted(SIGNALLED)

    def tell(self, state: Instance, move: tuple[int, str]) -> str:
        number, what = move
        return f"rank {number} {what} {state.ranks[number].groups}"


def test_ranks_that_grouped_their_work_differently_wait_for_each_other_for_ever() -> None:
    result = explore(Prefill(Design.TOGETHER, registered="AB"))

    assert result.finding is not None
    assert result.finding.kind is FindingKind.DEADLOCK
    begins = [line[:6] for line in result.finding.story if "begin barrier" in line]
    # One rank has one group of two requests; the other has begun a second group.
    assert sorted(begins.count(rank) for rank in ("rank 0", "rank 1")) == [1, 2]


def test_ranks_with_equal_groups_in_different_order_finish_what_one_has_not_sent() -> None:
    result = explore(Prefill(Design.ALONE, registered="BA"))

    assert result.finding is not None
    assert result.finding.kind is FindingKind.VIOLATION
    assert result.finding.problem in {
        "completion: A is told finished, rank 1 has not sent it",
        "completion: B is told finished, rank 1 has not sent it",
    }


def test_equal_groups_are_right_only_while_all_ranks_hear_of_everything_in_one_order() -> None:
    result = explore(Prefill(Design.ALONE, registered="AB"))

    assert result.exhausted
    assert result.finding is None


def test_one_delay_suffices_to_find_either() -> None:
    designs = [(Design.TOGETHER, "AB"), (Design.ALONE, "BA")]

    results = [explore(Prefill(design, registered=order), delays=1) for design, order in designs]

    kinds = [result.finding and result.finding.kind for result in results]
    assert kinds == [FindingKind.DEADLOCK, FindingKind.VIOLATION]
