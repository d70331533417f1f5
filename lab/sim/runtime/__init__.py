"""Worlds around the production runtime, on a virtual clock. See docs/simulator.md."""

from __future__ import annotations

from lab.sim.runtime.world import RuntimeWorld

__all__ = ["RuntimeWorld"]
