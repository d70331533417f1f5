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


def world_of(
    scenario: Scenario, seed: int, *, log: Callable[[str], None] | None = None
) -> SimulatedWorld:
    """The world of a seed."""
    match scenario:
        case Scenario.CACHE:
            return World(seed, log=log)
        case Scenario.DISK:
            return DiskWorld(seed, log=log)
        case Scenario.HANDOFF:
            return HandoffSimulation(seed, log=log)
        case Scenario.PAIRS:
            return PairsSimulation(seed, log=log)
        case Scenario.RUNTIME:
            return RuntimeWorld(seed, log=log)
        case Scenario.SHARED:
            return SharedWorld(seed, log=log)


def kinds_of(scenario: Scenario) -> Kinds:
    """What is to be seen in the worlds of a scenario."""
    match scenario:
        case Scenario.CACHE:
            return CACHE_KINDS
        case Scenario.DISK:
            return DISK_KINDS
        case Scenario.HANDOFF:
            return HANDOFF_KINDS
        case Scenario.PAIRS:
            return PAIRS_KINDS
        case Scenario.RUNTIME:
            return RUNTIME_KINDS
        case Scenario.SHARED:
            return SHARED_KINDS
