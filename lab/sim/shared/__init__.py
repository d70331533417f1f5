"""Worlds of engines that share a store which lies. See docs/simulator.md."""

from __future__ import annotations

from lab.sim.shared.world import SharedWorld

__all__ = ["SharedWorld"]
