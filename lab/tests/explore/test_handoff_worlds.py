"""The shipped machines in small worlds: all states, no finding; and what removed rules lead to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.explore import explore
from lab.tests.explore.looking import problem_of, require_nothing_found
from lab.tests.sim.test_handoff_bugs import plant_no_fence
from lab.worlds.faults import Budget
from lab.worlds.worlds import Small
from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock.handoff.protocol.decode_scheduler import Claimed, DecodeScheduler
from penstock.handoff.protocol.prefill_rank import PrefillRank
from penstock.handoff.protocol.states import ReportStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.handoff.protocol.decode_rank import Key


def small(name: str, **parameters: object) -> Small:
    return Small(**({"name": name, "prefill_count": 1, "decode_count": 1} | parameters))  # type: ignore[arg-type]


QUICK = [
    small("nothing goes wrong"),
    small("two layers", layer_count=2),
    small("two targets", decode_count=2),
    small("two sources", prefill_count=2),
    small("two by two", prefill_count=2, decode_count=2),
    small("a loss and a duplicate", budget=Budget(loss=1, duplicate=1)),
    small("an early timer", budget=Budget(timer=1)),
    small("a cancel", budget=Budget(cancel=1)),
    small("a withdrawal", budget=Budget(withdraw=1)),
    small("a write that fails", budget=Budget(write=1)),
    small("wrong bytes", budget=Budget(spoil=1)),
    small("false suspicion", budget=Budget(suspect=1)),
    small("a decode rank dies", budget=Budget(crash=1), crashing=("D0",)),
]
SCHEDULER_DIES = small(
    "the decode scheduler dies between two requests",
    request_count=2,
    budget=Budget(crash=1),
    crashing=("D",),
    suspicious=False,
    delays=2,
    bulk=False,
)
PREFILL_SCHEDULER_DIES = small(
    "the prefill scheduler dies, and the next one computes in the same blocks",
    request_count=2,
    budget=Budget(crash=1),
    crashing=("P",),
    suspicious=False,
    berth_count=1,
)


@pytest.mark.parametrize(
    "world",
    [*QUICK, SCHEDULER_DIES, pytest.param(PREFILL_SCHEDULER_DIES, marks=pytest.mark.long)],
    ids=lambda world: world.name,
)
def test_a_small_world_has_no_deadlock_and_breaks_no_promise(world: Small) -> None:
    require_nothing_found(world)


@pytest.mark.parametrize(
    "parameters",
    [
        {"layer_count": 2},
        {"prefill_count": 2, "decode_count": 2},
        pytest.param(
            {"prefill_count": 2, "decode_count": 2, "budget": Budget(loss=1), "berth_count": 1},
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"request_count": 2, "budget": Budget(cancel=1), "berth_count": 1},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_a_reduced_search_visits_fewer_states_and_comes_to_the_same_ends(
    parameters: dict[str, object],
) -> None:
    whole = small("whole", **parameters, reduced=False).look()
    reduced = small("reduced", **parameters).look()

    assert whole.exhausted
    assert reduced.exhausted
    assert reduced.state_count < whole.state_count
    assert reduced.finished_count == whole.finished_count


@pytest.mark.parametrize("reduced", [False, True])
def test_a_reduced_search_finds_what_the_whole_search_finds(
    monkeypatch: pytest.MonkeyPatch, *, reduced: bool
) -> None:
    monkeypatch.setattr(
        DecodeScheduler, "_every_rank_is_complete", lambda _, claimed: claimed.complete != 0
    )

    problem = problem_of(
        small("count", prefill_count=2, decode_count=2, budget=Budget(loss=1), reduced=reduced)
    )

    assert problem.startswith("content: a is delivered, but D")


def test_what_is_worked_out_once_is_all_that_decides() -> None:
    world = small("memo", budget=Budget(loss=1, withdraw=1)).make()
    explore(world)

    for memo in world.parties.memos:
        memo.check_completeness()


@pytest.mark.parametrize("bulk", [False, True])
def test_without_the_count_of_ranks_the_explorer_finds_a_partial_delivery(
    monkeypatch: pytest.MonkeyPatch, *, bulk: bool
) -> None:
    def any_rank(scheduler: DecodeScheduler, claimed: Claimed) -> bool:
        del scheduler
        return claimed.complete != 0

    monkeypatch.setattr(DecodeScheduler, "_every_rank_is_complete", any_rank)

    problem = problem_of(small("count", decode_count=2, bulk=bulk))

    assert problem.startswith("content: a is delivered, but D")


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("fault", ["write", "suspect", "crash"])
def test_without_the_fence_the_explorer_finds_a_write_into_memory_given_back(
    fault: str, monkeypatch: pytest.MonkeyPatch, *, bulk: bool
) -> None:
    plant_no_fence(monkeypatch)

    problem = problem_of(small("fence", budget=Budget(**{fault: 1}), bulk=bulk))

    assert problem.startswith("given back: D0")


@pytest.mark.parametrize(
    ("crashing", "reduced"),
    [
        ("P", False),
        ("P0", True),
        pytest.param("P", True, marks=pytest.mark.long),
        pytest.param("P0", False, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_calls_a_handoff_dropped_while_it_writes_to_its_slots_is_found(
    crashing: str, monkeypatch: pytest.MonkeyPatch, *, reduced: bool
) -> None:
    stop: Callable[[DecodeRank, Key], None] = DecodeRank._stop_if_still

    def report_and_stop(rank: DecodeRank, key: Key) -> None:
        if rank.collections[key].is_moving:
            rank._report(key, ReportStatus.DROPPED)
        stop(rank, key)

    monkeypatch.setattr(DecodeRank, "_stop_if_still", report_and_stop)

    problem = problem_of(
        small(
            "dropped",
            decode_count=2,
            berth_count=1,
            budget=Budget(crash=1),
            crashing=(crashing,),
            suspicious=False,
            reduced=reduced,
        )
    )

    assert problem.startswith("given back: D")
    assert problem.endswith("writes to the slots of a")


def test_a_rank_that_answers_too_early_is_found_at_work_for_two_lives_of_its_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DecodeRank, "_moves_for_an_earlier_life", lambda _: False)

    problem = problem_of(SCHEDULER_DIES)

    assert problem.startswith("given back: D0 takes a part for D#")


@pytest.mark.parametrize("bulk", [False, True])
def test_writes_that_are_not_abandoned_are_found_to_read_blocks_that_were_given_to_others(
    monkeypatch: pytest.MonkeyPatch, *, bulk: bool
) -> None:
    monkeypatch.setattr(PrefillRank, "_abandon_writes", lambda _: None)

    problem = problem_of(replace(PREFILL_SCHEDULER_DIES, bulk=bulk))

    assert problem == (
        "given back: P0 computes for P#2 while the blocks of a, of an earlier life, are read"
    )
