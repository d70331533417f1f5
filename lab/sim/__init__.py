"""The simulator: whole worlds around the cache, each from one seed. See docs/simulator.md."""

from __future__ import annotations

from lab.sim.checkers import SimulationError
from lab.sim.world import World

__all__ = ["SimulationError", "World"]
