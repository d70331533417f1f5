"""The explorer: small worlds, looked at in every order in which things can happen.

See docs/explorer.md.
"""

from __future__ import annotations

from penstock.testing.explore.bounds import Bounds
from penstock.testing.explore.bulk import explore_in_bulk
from penstock.testing.explore.result import Finding, FindingKind, Result
from penstock.testing.explore.search import explore
from penstock.testing.explore.world import PlainWorld, Violation, World, packed

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
