"""What came of a demonstration, as values: one source for the screen, for JSON and for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.explain import MissReason

if TYPE_CHECKING:
    from lab.demo.engine import Grant
    from penstock.cache.explain import Miss
    from penstock.machine.statistics import CacheStatistics

REASONS_IN_WORDS = {
    MissReason.NONE: "everything that could be reused was found",
    MissReason.NEVER_SEEN: "nobody computed this text before",
    MissReason.EVICTED: "it was there, and made room for others",
    MissReason.REFUSED: "a full tier below did not take it: what lies there was worth more",
    MissReason.FILLING: "another request is computing it at this moment",
    MissReason.FORM: "it lies in a form that this engine cannot read",
    MissReason.NAMESPACE: "these tokens are known, but to another tenant, adapter or model",
    MissReason.TIER_OFF: "it lies in a tier that is off",
    MissReason.OVER_QUOTA: "its tenant was over its quota and gave up its own blocks",
    MissReason.CORRUPT: "its last copy failed its checksum and was dropped",
    MissReason.RESET: "the cache was reset",
    MissReason.LOST: "the memory it lay in is gone",
    MissReason.NO_ROOM: "it lies below, and there was no room to bring it up through the hub",
    MissReason.OPTED_OUT: "the request asked not to reuse anything",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One part of the play: what was done, and what was seen."""

    title: str
    told: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraffic:
    """What one tier saw, counted from the KV events."""

    tier: str
    slots: int
    stored: int
    """Blocks that became ready here."""
    removed: int
    """Blocks that left: evicted, void or corrupt."""
    present: int
    """Blocks that can be matched here at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A whole play."""

    seed: int
    acts: tuple[Act, ...]
    statistics: CacheStatistics
    traffic: tuple[TierTraffic, ...]
    misses: dict[str, Grant]
    """For each reason that occurred, a request that missed for it."""
    tokens_computed: int
    """In prefill and decode."""
    tokens_recomputed: int
    """Found, but corrupt or lost on the way."""
    bytes_verified: int
    sums_made: int
    sums_checked: int
    bytes_damaged: int
    """Bytes that the demonstration itself flipped."""
    preemptions: int
    story: tuple[str, ...]
    """Of one request."""
    story_of: str
    explained: str
    """One miss, in words."""
    findings: tuple[str, ...]
    """What was not as it must be; empty if all is well."""

    def document(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        statistics = self.statistics
        return {
            "seed": self.seed,
            "fine": not self.findings,
            "findings": list(self.findings),
            "acts": [{"title": act.title, "told": list(act.told)} for act in self.acts],
            "tokens": {
                "asked": statistics.tokens_asked,
                "found": {tier.name: tier.tokens_cached for tier in statistics.tiers},
                "recomputed": self.tokens_recomputed,
                "computed": self.tokens_computed,
            },
            "requests": statistics.requests,
            "misses": {reason: count for reason, count in statistics.misses.items() if count},
            "bytes_verified": self.bytes_verified,
            "checksums": {
                "made": self.sums_made,
                "checked": self.sums_checked,
                "blocks_corrupt": statistics.blocks_corrupt,
                "bytes_damaged": self.bytes_damaged,
            },
            "tiers": [
                {
                    "name": tier.tier,
                    "slots": tier.slots,
                    "stored": tier.stored,
                    "removed": tier.removed,
                    "present": tier.present,
                }
                for tier in self.traffic
            ],
            "blocks_evicted": statistics.blocks_evicted,
            "preemptions": self.preemptions,
            "story": {"of": self.story_of, "told": list(self.story)},
            "explained": self.explained,
        }


def in_words(grant: Grant, *, block_tokens: int) -> str:
    """Why a request found no more than it did, as one would tell a colleague."""
    miss = grant.miss
    found = f"{grant.request!r} asked for {grant.prompt_tokens} tokens and found "
    found += f"{grant.cached_tokens}, that is {grant.cached_tokens // block_tokens} blocks."
    return f"{found} {_next_block(miss)}"


def _next_block(miss: Miss) -> str:
    if miss.reason is MissReason.NONE:
        return "Nothing that could be reused was missing."
    text = f"Block {miss.block} was not found: {REASONS_IN_WORDS[miss.reason]}"
    left = miss.departure
    if left is None:
        return f"{text}."
    text += f" (it left tier {left.tier} at {left.at:.2f} s"
    return f"{text}, chosen by policy {left.policy})." if left.policy else f"{text})."
