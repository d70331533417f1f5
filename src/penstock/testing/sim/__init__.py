"""The simulator: whole worlds around the cache, each from one seed. See docs/simulator.md."""

from __future__ import annotations

from penstock.testing.sim.checkers import SimulationError
from penstock.testing.sim.world import World

__all__ = ["SimulationError", "World"]
