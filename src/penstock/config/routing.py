"""The tables of `penstock serve` about who gets a request: our router, and news for other ones.

The defaults are stated here; `schema` has the ranges, `reference` what each key means.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """`[routing]`: how the router chooses instances; weights are in cached blocks of a prompt."""

    cached_weight: float = 1.0
    """What a leading block of the prompt is worth that an instance has in any tier."""
    load_weight: float = 8.0
    """What each request under way counts against an instance: a long queue outweighs a hit."""
    computing_weight: float = 32.0
    """What counts against a decode instance while no prefill instance can compute for it."""
    failed_weight: float = 32.0
    """What counts against a prefill instance for each prompt that it failed to hand over lately."""
    failed_s: float = 10.0
    """How long such a failure counts."""
    equal_blocks: float = 1.0
    """Instances that differ by no more than this in worth get requests in turn. All conversations
    share a start, such as the first lines of a chat template, which would otherwise send all of
    them to one instance."""
    handoff_tokens_min: int = 0
    """A prompt of which decode has all but so many tokens, or fewer, is not started on a prefill
    instance; 0: a block."""
    attempts_max: int = 3
    """How many instances a request is sent to, one after the other, if they are lost."""
