"""Several engines in small worlds: requests end, whoever dies or leaves, and pairs stay apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.explore import Bounds, FindingKind
from lab.worlds import carrying
from lab.worlds.fleet import FleetFault, FleetKind, FleetWorld
from lab.worlds.fleets import FLEETS, SmallFleet
from lab.worlds.scene import DECODE, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.worlds.fleet import FleetMove, FleetState

WORLDS = {fleet.name: fleet for fleet in FLEETS}
RETRY = WORLDS["fleet-retry"]

AMPLE = Bounds(seconds=3600.0)


@pytest.mark.parametrize(
    "fleet",
    [WORLDS[name] for name in ("fleet-retry", "fleet-death", "fleet-idle")],
    ids=lambda fleet: fleet.name,
)
def test_engines_that_come_and_go_leave_no_request_open(fleet: SmallFleet) -> None:
    result = replace(fleet, delays=0).look(AMPLE)

    assert result.finding is None
    assert result.exhausted
    assert result.finished_count > 0


def run(world: FleetWorld, choose: Callable[[FleetState, FleetMove], bool]) -> FleetState:
    """Follows the first move that is chosen, until there is none."""
    state = world.begin()
    for _ in range(1000):
        chosen = [move for move in world.moves(state) if choose(state, move)]
        if not chosen or world.finished(state):
            return state
        state = world.step(state, chosen[0])
    raise AssertionError("this does not end")


def outcomes(world: FleetWorld, state: FleetState, pair: int) -> list[str]:
    """How the handoffs of a pair ended for its decode engine."""
    place = world.inside.parties.place[DECODE]
    actor = world.inside.parties.actor(place, state.pairs[pair][place])
    return [outcome.value for outcome in actor.ended.values()]  # type: ignore[attr-defined]


def test_a_request_is_delivered_by_the_other_prefill_engine_when_the_first_dies() -> None:
    world = RETRY.make()

    def die_when_claimed(state: FleetState, move: FleetMove) -> bool:
        claimed = bool(state.left[FleetFault.DEATH]) and state.requests[0].at == 0
        return (move.kind is FleetKind.DIE) == claimed

    state = run(world, die_when_claimed)

    assert world.finished(state)
    assert outcomes(world, state, 1) == ["delivered"]


def test_an_engine_that_changes_its_role_is_handed_a_prompt_in_it() -> None:
    world = replace(WORLDS["fleet-role"], request_count=1).make()

    def choose(state: FleetState, move: FleetMove) -> bool:
        if state.left[FleetFault.LEAVE]:
            return move.kind is FleetKind.DRAIN
        return move.kind is not FleetKind.ROUTE or move.place == 2

    state = run(world, choose)

    assert world.finished(state)
    assert state.roles[1] == DECODE
    assert outcomes(world, state, 2) == ["delivered"]


def test_a_claim_in_another_pair_before_the_first_has_ended_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change_at_once(world: FleetWorld, state: FleetState, number: int, pair: int) -> FleetState:
        request = state.requests[number]
        return world._resume(state, number, request._replace(at=pair))

    monkeypatch.setattr(FleetWorld, "_change", change_at_once)

    finding = replace(RETRY, delays=1).look(AMPLE).finding

    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem == "given back: A>X writes to the slots of a, claimed elsewhere"


def test_a_side_that_is_opened_again_under_its_old_incarnation_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrying, "identity_of", lambda name, _incarnation: identity_of(name))

    finding = replace(WORLDS["fleet-death"], delays=0).look(AMPLE).finding

    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem.startswith("given back: D0: P0#")
