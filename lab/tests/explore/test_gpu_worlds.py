"""Landing areas in GPU memory: late writes are not kept out; sums find what they spoil."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.tests.explore.looking import in_turn, problem_of, require_nothing_found
from lab.worlds.decode import DecodeRankActor
from lab.worlds.faults import Budget
from lab.worlds.scene import GPU_MEMORY
from lab.worlds.worlds import Small

if TYPE_CHECKING:
    from lab.worlds.actor import Effects
    from penstock.handoff.protocol.effects import Take

ONE = Small(name="one", prefill_count=1, decode_count=1, transport=GPU_MEMORY)
IN_TURN = in_turn(ONE)


@pytest.mark.parametrize(
    "world",
    [
        replace(ONE, name="a write that fails", budget=Budget(write=1)),
        replace(ONE, name="false suspicion", budget=Budget(suspect=1)),
        replace(ONE, name="a rank dies", budget=Budget(crash=1), crashing=("P0",)),
        IN_TURN,
    ],
    ids=lambda world: world.name,
)
def test_late_writes_break_no_promise(world: Small) -> None:
    require_nothing_found(world)


def test_a_late_write_that_no_sum_finds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank takes what lies in the berth for what its notice says."""

    def believe(rank: DecodeRankActor, take: Take, now: float) -> Effects:
        number = rank.takes.index(take)
        del rank.takes[number], rank.takers[number]
        lies = rank.berths[take.source, take.generation][take.berth]
        place = (take.handoff, take.epoch)
        rank.slots[place] = rank.slots.get(place, frozenset()) | {lies}
        return rank.machine.parts_taken((take,), now)

    monkeypatch.setattr(DecodeRankActor, "_finish", believe)

    assert problem_of(IN_TURN).startswith("content: ")


def test_memory_that_something_else_gets_is_found() -> None:
    """As an area of arenas would be, with a fence that keeps nothing out."""
    transport = replace(GPU_MEMORY, own_memory=False)

    problem = problem_of(replace(ONE, budget=Budget(suspect=1), transport=transport))

    assert problem.endswith("writes into area 1, given back")
