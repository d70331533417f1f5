"""Worlds of several prefill and decode instances, and bugs that are planted in them."""

from __future__ import annotations

import pytest

from lab.sim import pairs
from lab.sim.agenda import Agenda
from lab.sim.pairs import PairsSimulation
from lab.tests.sim.planting import Plant, first_failure
from lab.tests.sim.test_handoff_bugs import plant_any_rank_will_do, plant_no_fence
from penstock.handoff.protocol.decode_rank import DecodeRank
from penstock_serve.server.pairs import PairTable


def test_there_are_worlds_of_two_prefill_and_two_decode_instances_and_of_others() -> None:
    weathers = [PairsSimulation(seed).conditions for seed in range(200)]

    shapes = {(len(each.prefill_ranks), len(each.decode_ranks)) for each in weathers}
    assert shapes == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {rank for each in weathers for rank in each.decode_ranks} == {1, 2}
    assert {each.peers_max for each in weathers} == {1, 2, 4}
    assert any(each.calm and each.role_change_count and each.late_count for each in weathers)


def plant_landing_memory_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance opens a pair, whatever its other pairs take of its landing memory."""
    monkeypatch.setattr(PairsSimulation, "_share_of", lambda *_: 0)


def plant_pairs_are_never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router forgets to close pairs that are idle."""
    monkeypatch.setattr(PairTable, "_close_idle", lambda *_: None)


def plant_pairs_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the router nor an instance counts the pairs that are open."""
    monkeypatch.setattr(PairTable, "_has_room", lambda *_: True)
    monkeypatch.setattr(PairTable, "_pairs_of", lambda *_: [])
    monkeypatch.setattr(PairsSimulation, "_has_room_for", lambda *_: True)


def plant_lives_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that is opened again has the lives of before."""
    monkeypatch.setattr(pairs, "_next_life", lambda world, name: world.actors[name].identity)


def plant_stopped_claims_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode rank keeps what it was told to drop, and asks for it for ever."""
    monkeypatch.setattr(DecodeRank, "_source_stopped", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "seed_count", "finders"),
    [
        pytest.param(plant_any_rank_will_do, 20, {"content"}, id="any rank will do"),
        pytest.param(plant_no_fence, 40, {"given back"}, id="no fence"),
        pytest.param(plant_landing_memory_is_not_counted, 99, {"bounds"}, id="landing memory"),
        pytest.param(plant_pairs_are_never_closed, 10, {"drain"}, id="pairs are never closed"),
        pytest.param(plant_pairs_without_bound, 10, {"bounds"}, id="no bound on pairs"),
        pytest.param(plant_lives_without_end, 20, {"given back"}, id="lives without end"),
        pytest.param(plant_stopped_claims_are_kept, 40, {"drain"}, id="stopped claims are kept"),
    ],
)
def test_a_bug_that_was_planted_is_found(
    plant: Plant, seed_count: int, finders: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    found = first_failure(PairsSimulation, range(seed_count))

    assert found is not None
    assert found.checker in finders


def test_what_happens_at_one_time_keeps_its_order_whenever_it_was_entered() -> None:
    agenda, seen = Agenda(), []

    def enter(number: int) -> None:
        agenda.at(0.8618, seen.append, number)

    for number in range(100):
        agenda.after(0.00313 * number, enter, number)
    agenda.run(step_count_max=1000)

    assert seen == list(range(100))
