"""What a look at a small world brings, as the tests of several kinds of memory want it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lab.explore import FindingKind
from lab.worlds.faults import Budget

if TYPE_CHECKING:
    from lab.worlds.worlds import Small


def in_turn(one: Small) -> Small:
    """A world in which a later claim uses a berth that an earlier one has used."""
    return replace(
        one,
        name="in turn",
        request_count=2,
        berth_count=1,
        budget=Budget(crash=1),
        crashing=("P",),
        suspicious=False,
    )


def require_nothing_found(world: Small) -> None:
    """All states were visited, in some of them all work was done, and no promise was broken."""
    result = world.look()

    assert result.finding is None
    assert result.exhausted
    assert result.finished_count > 0


def problem_of(world: Small) -> str:
    """The promise that is broken in a world."""
    finding = world.look().finding
    assert finding is not None
    assert finding.kind is FindingKind.VIOLATION
    return finding.problem
