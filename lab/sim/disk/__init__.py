"""Worlds of one disk tier above a simulated disk. See docs/simulator.md."""

from __future__ import annotations

from lab.sim.disk.world import DiskWorld

__all__ = ["DiskWorld"]
