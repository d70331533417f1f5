"""Every check of an epoch in the shipped machines: without it, the explorer finds something."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lab.explore import FindingKind, explore
from lab.tests.explore.epoch_checks import (
    answer_earlier_claims,
    begin_what_was_dropped,
    believe_every_report,
    close_later_claims,
    merge_earlier_claims,
    serve_what_was_stopped,
    stop_later_claims,
)
from lab.worlds import actions as do
from lab.worlds.faults import Budget
from lab.worlds.moves import NO_FAULT, Move
from lab.worlds.prefill import PrefillRankActor
from lab.worlds.scene import DECODE, PREFILL
from lab.worlds.schedulers import PrefillSchedulerActor, SchedulerActor
from lab.worlds.worlds import WORLDS, Small
from penstock.handoff.protocol.states import HandoffOutcome

if TYPE_CHECKING:
    from lab.tests.sim.planting import Plant
    from lab.worlds.carrying import State
    from lab.worlds.world import HandoffWorld

ONE = Small(name="epochs", prefill_count=1, decode_count=1, reduced=False)
AGAIN = replace(ONE, budget=Budget(withdraw=1, duplicate=1, overtake=1, total=2))
"""A claim is withdrawn and made again, while the network repeats or delays something."""
(ANYWAY,) = (world for world in WORLDS if world.insistent)
"""A claim is made again though the one before was cancelled, and its end is on its way still."""
PIECEWISE = replace(ONE, layer_count=2, berth_count=1, budget=Budget(withdraw=1, overtake=1))
"""A claim in two parts, for which there is one berth, is withdrawn and made again."""

CHECKS = [
    pytest.param(believe_every_report, AGAIN, "content: a is delivered, but D0", id="reports"),
    pytest.param(begin_what_was_dropped, AGAIN, "given back: D0", id="expects"),
    pytest.param(serve_what_was_stopped, AGAIN, "stopped: P0 writes for claim 1", id="stopped"),
    pytest.param(merge_earlier_claims, AGAIN, "epoch: P0: an earlier Claim changes", id="claims"),
    pytest.param(stop_later_claims, AGAIN, "epoch: P0: an earlier Stop changes", id="stops"),
    pytest.param(answer_earlier_claims, AGAIN, "epoch: P: an earlier Await changes", id="awaits"),
    pytest.param(close_later_claims, ANYWAY, "epoch: P: an earlier Close changes", id="closes"),
]


@pytest.mark.parametrize(
    ("bulk", "reduced"),
    [
        (True, True),
        pytest.param(False, False, marks=pytest.mark.long),
        pytest.param(True, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("plant", "world", "problem"), CHECKS)
def test_without_one_check_of_the_epoch_the_explorer_finds_what_it_is_for(
    plant: Plant,
    world: Small,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    bulk: bool,
    reduced: bool,
) -> None:
    plant(monkeypatch)

    finding = replace(world, bulk=bulk, reduced=reduced).look().finding

    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem.startswith(problem)


def test_with_all_of_them_nothing_is_found() -> None:
    result = replace(AGAIN, bulk=True).look()

    assert result.finding is None
    assert result.exhausted


# ------------------------------------------------------------------ what they save


class Waiting:
    """Remembers the states in which nothing but a timer can help a claim that is open."""

    def __init__(self, world: HandoffWorld) -> None:
        self.states: list[State] = []
        self._world = world
        self._moves = world.moves
        world.moves = self.moves  # type: ignore[method-assign]

    def moves(self, state: State) -> object:
        moves = self._moves(state)
        actions = [self._world.parties.actions[m.action] for m in moves if m.fault == NO_FAULT]
        if moves and all(isinstance(action, do.Expire) for action in actions):
            self.states.append(state)
        return moves


def waiting_states(world: HandoffWorld) -> list[State]:
    """All states in which both engines have to wait for a timer."""
    waiting = Waiting(world)
    result = explore(world)
    assert result.finding is None
    assert result.exhausted
    return [
        state
        for state in waiting.states
        if scheduler_of(world, DECODE, state).open and scheduler_of(world, PREFILL, state).open
    ]


def scheduler_of(world: HandoffWorld, name: str, state: State) -> SchedulerActor[Any]:
    place = world.parties.place[name]
    actor = world.parties.actor(place, state[place])
    assert isinstance(actor, SchedulerActor)
    return actor


def is_delivered_after_resends(world: HandoffWorld, state: State) -> bool:
    """Whether a claim comes to a good end when all ask again in turn, and nobody gives up."""
    taken: Counter[Move] = Counter()
    for _ in range(200):
        if HandoffOutcome.DELIVERED in scheduler_of(world, DECODE, state).ended.values():
            return True
        usual = [move for move in world.moves(state) if move.fault == NO_FAULT]
        patient = [
            move
            for move in usual
            if not isinstance(action := world.parties.actions[move.action], do.Expire)
            or action.timer[0] in ("resend", "notice")
        ]
        move = min(patient, key=lambda move: taken[move])
        taken[move] += 1
        state = world.step(state, move)
    return False


def trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a machine minds epochs; what becomes of it is looked at all the same."""
    monkeypatch.setattr(PrefillRankActor, "_later", lambda *_: None)
    monkeypatch.setattr(PrefillSchedulerActor, "_later", lambda *_: None)
    monkeypatch.setattr(PrefillRankActor, "_check_wanted", lambda *_: None)


def test_where_nothing_is_lost_nobody_waits_for_a_timer() -> None:
    assert waiting_states(PIECEWISE.make()) == []


@pytest.mark.parametrize("plant", [stop_later_claims, answer_earlier_claims])
def test_what_a_late_stop_or_question_undoes_has_to_be_asked_for_again(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    trust(monkeypatch)
    world = PIECEWISE.make()

    waiting = waiting_states(world)

    assert waiting
    assert all(is_delivered_after_resends(world, state) for state in waiting)


def test_a_part_that_only_an_earlier_claim_has_is_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge_earlier_claims(monkeypatch)
    trust(monkeypatch)
    world = PIECEWISE.make()

    waiting = waiting_states(world)

    assert waiting
    assert not any(is_delivered_after_resends(world, state) for state in waiting)


def test_a_claim_that_comes_after_its_stop_costs_a_write_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_what_was_stopped(monkeypatch)
    trust(monkeypatch)

    assert waiting_states(PIECEWISE.make()) == []
