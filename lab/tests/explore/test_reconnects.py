"""Connections that are lost and opened again: every request ends, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lab.explore import FindingKind
from lab.worlds import actions as do
from lab.worlds.faults import Budget
from lab.worlds.moves import MoveKind
from lab.worlds.worlds import Small
from penstock.handoff.protocol.messages import Hello
from penstock.handoff.protocol.prefill_rank import PrefillRank

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

ONE = Small(name="one", prefill_count=1, decode_count=1, budget=Budget(reconnect=1))


def test_a_connection_that_is_opened_again_leaves_no_request_open() -> None:
    whole, reduced = replace(ONE, reduced=False).look(), ONE.look()

    for result in (whole, reduced):
        assert result.finding is None
        assert result.exhausted
    assert reduced.state_count < whole.state_count
    assert reduced.finished_count == whole.finished_count > 0


def test_what_was_on_its_way_is_lost_and_both_sides_greet() -> None:
    world = ONE.make()
    state = world.begin()
    for move in world.moves(state):
        if world.parties.actions[move.action] == do.Claim("a", 1):
            state = world.step(state, move)
    along = world.parties.routes.index(("D", "P"))
    assert state[world.channels[along]]
    (lost,) = (
        move
        for move in world.moves(state)
        if move.kind is MoveKind.RECONNECT and world.link_of(move.place) == ("P", "D")
    )

    state = world.step(state, lost)
    assert not state[world.channels[along]]
    while greets := [move for move in world.moves(state) if move.kind is MoveKind.GREET]:
        state = world.step(state, greets[0])

    for route in (("D", "P"), ("P", "D")):
        queue = world.parties.queues[state[world.channels[world.parties.routes.index(route)]]]
        (greeting,) = (world.parties.messages[number] for number in queue)
        assert isinstance(greeting, Hello)
    assert "lose their connection" in world.tell(state, lost)


def test_berths_that_are_given_anew_with_a_connection_are_found_written_to_while_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meet_again: Callable[[PrefillRank, str], None] = PrefillRank._peer_open

    def give_berths(rank: PrefillRank, name: str) -> None:
        lane = rank.lanes.get(name)
        if lane is not None:
            rank.lanes[name] = lane._replace(free=(1 << lane.berth_count) - 1)
        meet_again(rank, name)

    monkeypatch.setattr(PrefillRank, "_peer_open", give_berths)
    world = replace(
        ONE, layer_count=2, berth_count=1, budget=Budget(reconnect=1, suspect=1), reduced=False
    )

    finding = world.look().finding

    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    assert finding.problem == "berth: D0: berth 0 is written to while it is read"
