"""What became of the prompts of one cache: `print(cache.report())`.

    prompts: 12, 9 with a hit
    tokens: 4,096 of 5,210 were not computed (79%)
    bytes: 12.61 MB loaded, 3.10 MB saved
    misses: 9 complete, 2 never seen, 1 corrupt
    tier host: 96 blocks, room for 1,024
    tier disk: off: the disk is full
    without the cache: 2: the weights were changed since the cache was opened: …

A prompt is one row of a batch. Its miss is why no more of it was found: a hit has one, too.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock import CacheStatistics

log = logging.getLogger("penstock.connectors")


@dataclass(slots=True, kw_only=True)
class PromptReport:
    """The prompts of one cache so far; as text, it is a few lines for a reader."""

    prompts: int = 0
    hits: int = 0
    """Prompts of which at least one token was not computed."""
    tokens: int = 0
    tokens_cached: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    """Prompts by the reason why no more of them was found; `complete`: nothing was missing."""
    unused: Counter[str] = field(default_factory=Counter)
    """Prompts that were computed without the cache, or not saved, by the line that says why."""
    tiers: tuple[str, ...] = ()
    """A line for each tier."""

    def __str__(self) -> str:
        share = 100 * self.tokens_cached / max(1, self.tokens)
        loaded, saved = self.bytes_loaded / 1e6, self.bytes_saved / 1e6
        misses = ", ".join(f"{count} {why}" for why, count in self.misses.items())
        lines = [
            f"prompts: {self.prompts}, {self.hits} with a hit",
            f"tokens: {self.tokens_cached:,} of {self.tokens:,} were not computed ({share:.0f}%)",
            f"bytes: {loaded:,.2f} MB loaded, {saved:,.2f} MB saved",
            f"misses: {misses or 'none'}",
            *self.tiers,
            *(f"without the cache: {count}: {why}" for why, count in self.unused.items()),
        ]
        return "\n".join(lines)

    def found(self, *, tokens: int, cached: int, miss: str) -> None:
        """Counts a prompt that was looked up."""
        self.prompts += 1
        self.hits += cached > 0
        self.tokens += tokens
        self.tokens_cached += cached
        self.misses[miss] += 1

    def leave_out(self, why: str, *, prompts: int) -> None:
        """Counts prompts that the cache is not used for; a reason is logged when it is new."""
        if why not in self.unused:
            log.warning("prompts are computed without the cache: %s", why)
        self.unused[why] += prompts


def tier_lines(statistics: CacheStatistics) -> tuple[str, ...]:
    """A line for each tier below the model."""
    lines = []
    for tier in statistics.tiers:
        if not tier.on:
            lines.append(f"tier {tier.name}: off: {tier.why_off}")
        elif tier.store is None:
            lines.append(f"tier {tier.name}: {tier.ready:,} blocks, room for {tier.slots:,}")
        else:
            room = tier.store.capacity_bytes / 1e6
            lines.append(f"tier {tier.name}: {tier.store.blocks:,} blocks, room for {room:,.1f} MB")
    return tuple(lines)
