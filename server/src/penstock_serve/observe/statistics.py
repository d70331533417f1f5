"""What one engine instance reports about itself: `/cache` shows it, `/metrics` is made from it.

The cache's part, `CacheStatistics`, is defined in `machine/statistics.py`, where it is counted.
"""

from __future__ import annotations

import msgspec

# msgspec reads the annotations when statistics arrive, so these imports must be real.
from penstock import CacheStatistics, Health  # noqa: TC001


class InstanceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One instance at one moment; counts are those since it started."""

    instance: str
    """Its name."""
    role: str
    state: str
    """`running`, `paused`, `asleep`, or `without weights` after a load that failed."""
    weights_version: str
    cache: CacheStatistics
    health: Health
    waiting: int
    """Answers by phase: these and the next three."""
    loading: int
    running: int
    claiming: int
    preemptions: int
    """Answers that gave their blocks back for a more urgent one, to continue later."""
    handoffs: dict[str, int]
    """Handoffs by how they ended."""
    handed_bytes: int
    handed_seconds: float
    """The time of handoffs that were delivered, all together."""
    handed_parts_verified: int
    """Parts of handoffs that were received and whose checksums agreed."""
    landing_bytes: int
    """Memory that other instances may write handoffs into, or may still write into."""
    token_bytes: int
    """The KV of one token, over all layers and ranks."""
