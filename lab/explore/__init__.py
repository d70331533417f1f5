"""The explorer: small worlds, looked at in every order in which things can happen.

See docs/simulator.md.
"""

from __future__ import annotations

from lab.explore.bounds import Bounds
from lab.explore.bulk import explore_in_bulk
from lab.explore.result import Finding, FindingKind, Result
from lab.explore.search import explore
from lab.explore.world import PlainWorld, Violation, World, packed

__all__ = [
    "Bounds",
    "Finding",
    "FindingKind",
    "PlainWorld",
    "Result",
    "Violation",
    "World",
    "explore",
    "explore_in_bulk",
    "packed",
]
