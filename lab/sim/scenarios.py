"""What can be simulated: for each scenario, its worlds and what is to be seen in them.

The one rule that must not break: a scenario is known by its name alone, so that a process of
its own can make the same worlds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from lab.sim.coverage import CACHE_KINDS
from lab.sim.disk import DiskWorld
from lab.sim.disk.world import DISK_KINDS
from lab.sim.handoff import HandoffSimulation
from lab.sim.handoff_kinds import HANDOFF_KINDS
from lab.sim.pairs import PairsSimulation
from lab.sim.pairs_kinds import PAIRS_KINDS
from lab.sim.runtime import RuntimeWorld
from lab.sim.runtime.kinds import RUNTIME_KINDS
from lab.sim.shared import SharedWorld
from lab.sim.shared.world import SHARED_KINDS
from lab.sim.world import World

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from lab.sim.coverage import Kinds


class Scenario(StrEnum):
    """What is simulated."""

    CACHE = "cache"
    DISK = "disk"
    HANDOFF = "handoff"
    PAIRS = "pairs"
    RUNTIME = "runtime"
    SHARED = "shared"


class SimulatedWorld(Protocol):
    """One seed's world, of any scenario."""

    events: Counter[str]
    faults: Counter[str]
    copies: Counter[str]

    def run(self) -> None:
        """Lives the world to its end."""
        ...


_WORLDS: dict[Scenario, tuple[Callable[..., SimulatedWorld], Kinds]] = {
    Scenario.CACHE: (World, CACHE_KINDS),
    Scenario.DISK: (DiskWorld, DISK_KINDS),
    Scenario.HANDOFF: (HandoffSimulation, HANDOFF_KINDS),
    Scenario.PAIRS: (PairsSimulation, PAIRS_KINDS),
    Scenario.RUNTIME: (RuntimeWorld, RUNTIME_KINDS),
    Scenario.SHARED: (SharedWorld, SHARED_KINDS),
}


def world_of(
    scenario: Scenario, seed: int, *, log: Callable[[str], None] | None = None
) -> SimulatedWorld:
    """The world of a seed."""
    make, _ = _WORLDS[scenario]
    return make(seed, log=log)


def kinds_of(scenario: Scenario) -> Kinds:
    """What is to be seen in the worlds of a scenario."""
    _, kinds = _WORLDS[scenario]
    return kinds
