"""What is measured: which loops, beside which work, with which targets.

The one rule: these are the only numbers one would change to measure something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Work = Literal["save", "load", "both"]
LOOPS = ("eager", "graph", "small")
WORKS: tuple[Work, ...] = ("save", "load", "both")
ROUNDS = 7
SECONDS = 0.15
IN_FLIGHT = 2
IDLE_SECONDS = 10.0
IDLE_SHARE = 0.02
"""CPU time while one request waits for a slow tier, as a share of the time: 0.2 s in 10 s."""
WANTED = (27.0, 47.0)
"""GB/s that Penstock's budget is made for, both ways together; without limit comes besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """So many steps are to be kept while so much is moved."""

    share: float
    gb_per_s: float


TARGETS = {
    "eager": Target(share=0.97, gb_per_s=25.0),
    "graph": Target(share=0.985, gb_per_s=45.0),
}
"""The small loop has none: a step of 1 ms leaves no room to hide anything, and shows it."""


def bare_rate(loop: str, wanted: Sequence[float]) -> float | None:
    """The rate at which a loop is run beside bare copies: that of the row its target is read from.

    `None` where it has no target, or no row moves enough.
    """
    target = TARGETS.get(loop)
    enough = [] if target is None else [rate for rate in wanted if rate >= target.gb_per_s]
    return min(enough, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The whole measurement."""

    loops: tuple[str, ...] = LOOPS
    works: tuple[Work, ...] = WORKS
    rounds: int = ROUNDS
    seconds: float = SECONDS
    """Of one window."""
    in_flight: int = IN_FLIGHT
    wanted: tuple[float, ...] = WANTED

    def __post_init__(self) -> None:
        if not set(self.loops) <= set(LOOPS) or not self.loops:
            raise ConfigError("only", f"is {','.join(self.loops)}, must be of {', '.join(LOOPS)}")
        if self.rounds < 1 or self.seconds <= 0:
            raise ConfigError(
                "rounds", f"and seconds are {self.rounds} and {self.seconds}, must be positive"
            )
        if any(gb_per_s <= 0 for gb_per_s in self.wanted):
            raise ConfigError("budgets", f"are {self.wanted}, must be positive GB/s")
