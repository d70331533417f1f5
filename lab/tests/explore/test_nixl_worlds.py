"""NIXL's fence in small worlds, and what becomes of memory when something else is taken for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.tests.explore.looking import in_turn, problem_of, require_nothing_found
from lab.worlds import actions as do
from lab.worlds import moves
from lab.worlds.faults import Budget
from lab.worlds.moves import MoveKind
from lab.worlds.prefill import Phase
from lab.worlds.scene import NIXL
from lab.worlds.worlds import Small
from penstock.handoff.protocol.decode_rank import DecodeRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.worlds.prefill import PrefillRankActor
    from lab.worlds.scene import Transport

ONE = Small(name="one", prefill_count=1, decode_count=1, transport=NIXL)
IN_TURN = in_turn(ONE)

RELEASED_HANDLES = replace(NIXL, name="released handles", waits_for_posted=True, ends_writes=False)
"""The fence of an area is that its writer has released the handles of its writes."""
DEREGISTERED = replace(NIXL, name="deregistered memory", ends_writes=False)
"""The fence of an area is that the target has deregistered it, or removed the writer's agent."""


@pytest.mark.parametrize(
    "world",
    [
        replace(ONE, name="a write that fails", budget=Budget(write=1)),
        replace(ONE, name="false suspicion", budget=Budget(suspect=1)),
        replace(ONE, name="a rank dies", budget=Budget(crash=1), crashing=("P0",)),
        replace(ONE, name="a relay dies", budget=Budget(relay=1)),
        pytest.param(
            replace(
                ONE,
                name="a relay with areas of two sources",
                prefill_count=2,
                berth_count=1,
                budget=Budget(relay=1),
                bulk=False,
                delays=2,
            ),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda world: world.name,
)
def test_where_the_agent_is_destroyed_nothing_is_found(world: Small) -> None:
    require_nothing_found(world)


@pytest.mark.parametrize(
    ("bulk", "reduced"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.long),
        pytest.param(True, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("fault", ["write", "suspect", "crash", "relay"])
@pytest.mark.parametrize("fence", [RELEASED_HANDLES, DEREGISTERED], ids=lambda fence: fence.name)
def test_what_is_no_fence_is_found_by_a_write_into_memory_given_back(
    fence: Transport, fault: str, *, bulk: bool, reduced: bool
) -> None:
    budget = Budget(**{fault: 1})

    problem = problem_of(replace(ONE, budget=budget, transport=fence, bulk=bulk, reduced=reduced))

    assert problem.startswith("given back: D0: P0#")
    assert problem.endswith("writes into area 1, given back")


def test_a_write_whose_handle_is_released_is_found_in_a_berth_that_has_another_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes_of = moves._writes_of

    def drop_posted(actor: PrefillRankActor) -> Iterator[tuple[MoveKind, do.Action]]:
        yield from writes_of(actor)
        for write, posting in sorted(actor.writes.items()):
            if posting.abandoned and posting.phase is Phase.POSTED:
                yield MoveKind.DO, do.GiveUp(write)

    monkeypatch.setattr(moves, "_writes_of", drop_posted)

    problem = problem_of(IN_TURN)

    assert problem == "berth: D0: berth 0 is written to while it is read"


def test_a_notice_from_behind_the_fence_that_is_believed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DecodeRank, "_is_open_area", lambda *_: True)

    problem = problem_of(replace(ONE, budget=Budget(relay=1, suspect=1)))

    assert problem == "given back: D0 takes part 0 from a freed area"
