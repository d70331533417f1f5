"""The search of whole arrays of states sees what the plain search sees, reduced or not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lab.explore import Bounds, FindingKind, explore, explore_in_bulk, rules
from lab.explore.rules import Look, Phase, Rule
from lab.worlds import carrying
from lab.worlds.eagerness import Eagerness
from lab.worlds.faults import Budget
from lab.worlds.rules import RuledWorld
from lab.worlds.worlds import CRASHING, Small
from penstock.handoff.protocol.decode_scheduler import DecodeScheduler

if TYPE_CHECKING:
    from collections.abc import Hashable

    from lab.worlds.carrying import State
    from lab.worlds.world import HandoffWorld

ONE = Small(name="one", prefill_count=1, decode_count=1, reduced=False)
TWO_AT_ONCE = replace(ONE, request_count=2, room=2, berth_count=1)
WORLDS = [
    ONE,
    replace(ONE, budget=Budget(loss=1)),
    replace(ONE, budget=Budget(duplicate=1, write=1, spoil=1, suspect=1, total=1)),
    replace(ONE, layer_count=2),
]
WORLDS_LONG = [
    replace(ONE, budget=Budget(overtake=1, timer=1, withdraw=1, total=1)),
    replace(ONE, budget=Budget(crash=1), crashing=("D0",)),
    TWO_AT_ONCE,
]
REDUCED = [
    replace(ONE, budget=Budget(loss=1)),
    replace(ONE, budget=Budget(crash=1), crashing=("D0",)),
    replace(ONE, prefill_count=2, decode_count=2),
]
REDUCED_LONG = [
    TWO_AT_ONCE,
    *(replace(ONE, budget=Budget(crash=1), crashing=(party,)) for party in ("D", "P", "P0")),
    replace(TWO_AT_ONCE, budget=Budget(cancel=1)),
]
MIRRORED = [
    replace(ONE, decode_count=2),
    replace(ONE, prefill_count=2, decode_count=2, budget=Budget(loss=1), berth_count=1),
]


def long(*worlds: Small) -> list[Any]:
    return [pytest.param(world, marks=pytest.mark.long) for world in worlds]


@pytest.mark.parametrize("small", [*WORLDS, *long(*WORLDS_LONG)], ids=lambda small: small.says)
def test_without_reduction_it_visits_the_same_states_by_as_many_moves(small: Small) -> None:
    plain = explore(small.make())
    bulk = explore_in_bulk(small.make_ruled())

    assert bulk.finding is None
    assert bulk.exhausted
    assert bulk.state_count == plain.state_count
    assert bulk.move_count == plain.move_count
    assert bulk.finished_count == plain.finished_count


class Ends:
    """Remembers the ends that a search has come to, by what the parties are then."""

    def __init__(self, world: HandoffWorld) -> None:
        self.found: set[Hashable] = set()
        self._world = world
        self._finished = world.finished
        world.finished = self.finished  # type: ignore[method-assign]

    def finished(self, state: State) -> bool:
        if not self._finished(state):
            return False
        self._keep(state)
        mirror = self._world.mirror() if isinstance(self._world, RuledWorld) else None
        if mirror is not None:
            image = {mirror.column(at): mirror.value(at, it) for at, it in enumerate(state)}
            self._keep(tuple(image[column] for column in range(len(state))))
        return True

    def _keep(self, state: State) -> None:
        parties = enumerate(state[: len(self._world.parties.names)])
        self.found.add(tuple(self._world.parties.actor(*party).freeze() for party in parties))


@pytest.mark.parametrize("small", [*REDUCED, *long(*REDUCED_LONG)], ids=lambda small: small.says)
def test_reduced_it_visits_fewer_states_and_comes_to_the_same_ends(small: Small) -> None:
    whole, reduced = small.make_ruled(), replace(small, reduced=True).make_ruled()
    ends, reduced_ends = Ends(whole), Ends(reduced)

    first, second = explore_in_bulk(whole), explore_in_bulk(reduced)

    assert first.exhausted
    assert second.exhausted
    assert second.state_count < first.state_count
    assert reduced_ends.found == ends.found


def ends_of(small: Small) -> set[Hashable]:
    """All ends that a search comes to."""
    world = small.make_ruled()
    ends = Ends(world)
    assert explore_in_bulk(world).exhausted
    return ends.found


@pytest.mark.long
def test_one_crash_of_any_party_is_a_crash_of_one_of_them() -> None:
    anybody = replace(ONE, budget=Budget(crash=1), suspicious=False)

    apart = [ends_of(replace(anybody, crashing=(p,), reduced=True)) for p in CRASHING]

    assert set().union(*apart) == ends_of(anybody)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("small", [MIRRORED[0], *long(*MIRRORED[1:])], ids=lambda small: small.says)
def test_of_a_state_and_its_image_one_is_enough(small: Small, *, reduced: bool) -> None:
    whole, halved = small.make_ruled(), replace(small, reduced=reduced, mirrored=True).make_ruled()
    ends, halved_ends = Ends(whole), Ends(halved)

    first, second = explore_in_bulk(whole), explore_in_bulk(halved)

    assert first.exhausted
    assert second.exhausted
    assert second.state_count < 0.6 * first.state_count
    assert halved_ends.found == ends.found


def test_images_are_as_many_as_what_they_stand_for() -> None:
    small = replace(ONE, prefill_count=2, decode_count=2)
    whole, halved = small.make_ruled(), replace(small, mirrored=True).make_ruled()

    first, second = explore_in_bulk(whole), explore_in_bulk(halved)

    # States that are their own image are counted once in both.
    assert second.state_count < first.state_count < 2 * second.state_count


def test_ranks_that_are_not_treated_alike_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the second rank counts; what is delivered is not looked at here.
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete & 2 != 0
    )
    monkeypatch.setattr(carrying, "check_slots", lambda *_: None)

    finding = explore_in_bulk(replace(ONE, decode_count=2, mirrored=True).make_ruled()).finding

    assert finding is not None
    assert finding.problem.startswith("mirror: D and its image differ after")


def test_a_world_in_which_one_certain_rank_may_die_has_no_mirror() -> None:
    small = replace(ONE, decode_count=2, budget=Budget(crash=1), mirrored=True)

    assert replace(small, crashing=("D0",)).make_ruled().mirror() is None
    assert replace(small, crashing=("D0", "D1")).make_ruled().mirror() is not None
    assert replace(small, crashing=("P0",)).make_ruled().mirror() is not None


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "parties"), [((1, 2), ("D0", "D1")), ((2, 1), ("P0", "P1"))])
def test_which_of_several_ranks_dies_makes_no_difference(
    ranks: tuple[int, int], parties: tuple[str, str]
) -> None:
    prefill_count, decode_count = ranks
    world = replace(
        ONE, prefill_count=prefill_count, decode_count=decode_count, budget=Budget(crash=1),
        berth_count=1, suspicious=False,
    )  # fmt: skip

    one, other = (explore_in_bulk(replace(world, crashing=(p,)).make_ruled()) for p in parties)

    assert one.exhausted
    assert other.exhausted
    assert one.state_count == other.state_count
    assert one.move_count == other.move_count
    assert one.finished_count == other.finished_count


def test_what_only_looks_eager_would_hide_ends_if_it_were_not_reviewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = replace(ONE, budget=Budget(cancel=1), reduced=True)
    reviewed = explore_in_bulk(small.make_ruled())
    monkeypatch.setattr(Eagerness, "review", lambda _: set())

    believed = explore_in_bulk(small.make_ruled())

    assert believed.state_count < reviewed.state_count
    assert believed.finished_count < reviewed.finished_count


def test_a_rule_that_overlooks_a_column_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether a rank has computed the prompt decides whether its first token is there.
    monkeypatch.setattr(RuledWorld, "_computed", lambda _, rank: Look(rank, lambda _local: 0))

    finding = explore_in_bulk(replace(ONE, prefill_count=2).make_ruled()).finding

    assert finding is not None
    assert finding.problem == "rules and moves lead to different states"


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_finding_is_told_as_a_story(
    monkeypatch: pytest.MonkeyPatch, *, reduced: bool, mirrored: bool
) -> None:
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete != 0
    )

    small = replace(ONE, prefill_count=2, decode_count=2, reduced=reduced, mirrored=mirrored)
    finding = explore_in_bulk(small.make_ruled()).finding

    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem.startswith("content: a is delivered, but D")
    assert "has the first token" in " ".join(finding.story)


def test_it_stops_at_its_bounds_and_says_so() -> None:
    result = explore_in_bulk(TWO_AT_ONCE.make_ruled(), bounds=Bounds(state_count=100))

    assert not result.exhausted
    assert result.stopped_by == "100 states"


def test_a_column_may_have_any_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = explore_in_bulk(TWO_AT_ONCE.make_ruled())
    monkeypatch.setattr(rules, "_VALUES_FIRST", 2)

    result = explore_in_bulk(TWO_AT_ONCE.make_ruled())

    assert result.exhausted
    assert result.state_count == enough.state_count
    assert result.move_count == enough.move_count


class Clock:
    """A number that only timers change; work is done when it comes to the end, if there is one."""

    def __init__(self, *, circle: int, end: int, running: bool = True) -> None:
        self._circle, self._end, self._running = circle, end, running

    def begin(self) -> tuple[int, ...]:
        return (0,)

    def moves(self, state: tuple[int, ...]) -> list[str]:
        return ["tick"] if self._running and state != (self._end,) else []

    def step(self, state: tuple[int, ...], move: str) -> tuple[int, ...]:
        del move
        return ((state[0] + 1) % self._circle,)

    def check(self, state: tuple[int, ...]) -> None:
        del state

    def finished(self, state: tuple[int, ...]) -> bool:
        return state == (self._end,)

    def is_fault(self, move: str) -> bool:
        del move
        return False

    def tell(self, state: tuple[int, ...], move: str) -> str:
        return f"{move} at {state[0]}"

    def conclude(self) -> None:
        pass

    def joined(self, queue: int, more: int) -> int:
        raise AssertionError((queue, more))

    def tail(self, queue: int, longer: int) -> int:
        raise AssertionError((queue, longer))

    def mirror(self) -> None:
        return None

    def rules(self) -> list[Rule[str]]:
        return [Rule(name="ticks", phase=Phase.QUIET, only=(), reads=(0,), moves=self.moves)]

    def eager_where(self) -> Look | None:
        return None

    def review(self) -> set[tuple[int, int]]:
        return set()

    def checks(self) -> list[tuple[int, ...]]:
        return []


def test_a_world_that_comes_to_its_end_is_fine() -> None:
    result = explore_in_bulk(Clock(circle=5, end=4))

    assert (result.finding, result.exhausted, result.state_count) == (None, True, 5)


def test_a_world_that_goes_round_in_a_circle_is_a_livelock() -> None:
    finding = explore_in_bulk(Clock(circle=5, end=7)).finding

    assert finding is not None
    assert finding.kind is FindingKind.LIVELOCK


def test_a_world_in_which_nothing_can_happen_is_a_deadlock() -> None:
    finding = explore_in_bulk(Clock(circle=5, end=4, running=False)).finding

    assert finding is not None
    assert finding.kind is FindingKind.DEADLOCK
