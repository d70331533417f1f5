"""The simulator: whole worlds around the cache, each from one seed. See docs/simulator.md."""

from __future__ import annotations

from lab.explore.world import Violation
from lab.sim.world import World

__all__ = ["Violation", "World"]
