"""The arithmetic of interference: how many of its steps an engine keeps beside copies.

A *window* is a short stretch of steps of one side. In every round each side has one window,
and so has the loop alone; a share of steps kept compares two windows of the same round.

The one rule: the share and the rate that a target asks for come from one and the same row.
A side may not show its steps at one budget and its bytes at another.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one side did in one stretch of steps."""

    step_s: tuple[float, ...]
    """From the end of one step to the end of the next, whole steps alone."""
    steps: float
    """Steps done, with the share of one that was given up at the end of a slow window."""
    seconds: float
    moved_bytes: int
    boundary_s: float = 0.0
    """What the engine's thread spent on the copies, in all steps together."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"seconds is {self.seconds}, must be more than 0")
        if not len(self.step_s) <= self.steps:
            raise ValueError(f"steps is {self.steps}, must be at least the {len(self.step_s)} told")

    @property
    def steps_per_s(self) -> float:
        """How fast the loop ran."""
        return self.steps / self.seconds

    @property
    def boundary_ns(self) -> float:
        """What the engine's thread spent on the copies, per step."""
        return self.boundary_s / max(self.steps, 1.0) * 1e9

    @property
    def gb_per_s(self) -> float:
        """How fast blocks were moved beside it."""
        return self.moved_bytes / self.seconds / 1e9


def shares_kept(alone: Sequence[Window], beside: Sequence[Window]) -> list[float]:
    """Round by round: steps a second beside the copies, of those alone."""
    if len(alone) != len(beside) or not alone:
        raise ValueError(f"rounds: need as many of both, got {len(alone)} and {len(beside)}")
    return [
        with_copies.steps_per_s / without.steps_per_s
        for without, with_copies in zip(alone, beside, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One side beside one kind of copies, over all rounds."""

    side: str
    kept: tuple[float, ...]
    gb_per_s: tuple[float, ...]

    @classmethod
    def of(cls, side: str, alone: Sequence[Window], beside: Sequence[Window]) -> Outcome:
        """What a side's windows come to."""
        return cls(
            side=side,
            kept=tuple(shares_kept(alone, beside)),
            gb_per_s=tuple(window.gb_per_s for window in beside),
        )

    @property
    def share(self) -> float:
        """The share of steps kept: the median of the rounds."""
        return statistics.median(self.kept)

    @property
    def rate(self) -> float:
        """GB/s moved: the median of the rounds."""
        return statistics.median(self.gb_per_s)


def slowest_that_moves(outcomes: Sequence[Outcome], gb_per_s: float) -> Outcome:
    """The row that moves at least so much and no more than it must; else the fastest there is."""
    if not outcomes:
        raise ValueError("outcomes: at least one is needed, got none")
    enough = [outcome for outcome in outcomes if outcome.rate >= gb_per_s]
    if not enough:
        return max(outcomes, key=lambda outcome: outcome.rate)
    return min(enough, key=lambda outcome: outcome.rate)


def times_as_many_kept(ours: Sequence[Outcome], theirs: Outcome) -> tuple[float, Outcome]:
    """How many times the steps we keep, at no lower rate than theirs where we have such a row.

    Returns the ratio (the median over the rounds of each round's own) and our row in it.
    """
    ours_then = slowest_that_moves(ours, theirs.rate)
    # A thread that starves the engine may end no whole layer of a step in a window.
    least = 1e-6
    pairs = zip(ours_then.kept, theirs.kept, strict=True)
    return statistics.median(our / max(their, least) for our, their in pairs), ours_then


def budget_bytes(gb_per_s: float, step_s: float, ways: int) -> int:
    """What one mover of `ways` may submit per step to move `gb_per_s` in all."""
    if gb_per_s <= 0 or step_s <= 0 or ways < 1:
        raise ValueError(
            f"need a positive rate, step and number of ways, got {gb_per_s}, {step_s} and {ways}"
        )
    return max(1, round(gb_per_s * 1e9 * step_s / ways))
