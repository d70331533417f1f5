"""What each reason of a miss means, and what to do about it, in words.

The live page, `penstock status` and `penstock top` show them; docs/why-misses.md has the same
reasons with more room. A new reason of `MissReason` needs a row here: the tests compare them.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock import MissReason


class MissAdvice(NamedTuple):
    """One reason in words."""

    means: str
    helps: str
    """What to do about it; empty: nothing."""


MISS_ADVICE = {
    MissReason.NONE: MissAdvice("everything that could be reused was there", ""),
    MissReason.NEVER_SEEN: MissAdvice(
        "new text, or text that differs early",
        "Put what changes (dates, names, retrieved text) at the end of the prompt.",
    ),
    MissReason.EVICTED: MissAdvice(
        "it made room for others",
        "Give a tier more room, or add one below it.",
    ),
    MissReason.REFUSED: MissAdvice(
        "a full tier did not take it, as what lies there was used more",
        "Give that tier more room.",
    ),
    MissReason.FILLING: MissAdvice(
        "another request was computing the same text at that moment",
        "Send one request of a group first, the others after its first token.",
    ),
    MissReason.FORM: MissAdvice(
        "the copy was written by an engine with another layout",
        "Use the same block_tokens and dtype in all engines that share a tier.",
    ),
    MissReason.NAMESPACE: MissAdvice(
        "the same text is cached for another tenant, adapter or version of the weights",
        "If they may share it, give them the same tenant and weights_version.",
    ),
    MissReason.WEIGHTS: MissAdvice(
        "the same text was cached for weights that the model had before",
        "Nothing: KV of other weights cannot be used. It is found again if they come back.",
    ),
    MissReason.TIER_OFF: MissAdvice(
        "the copy lies in a tier that is off", "See under health why the tier is off."
    ),
    MissReason.OVER_QUOTA: MissAdvice(
        "the tenant used up its share of a tier", "Raise its share in quotas, or take it away."
    ),
    MissReason.CORRUPT: MissAdvice(
        "the last copy failed its checksum, so it was computed again",
        "Check the memory or disk of the tier; penstock store inspect --verify reads a disk.",
    ),
    MissReason.RESET: MissAdvice("the cache was reset", ""),
    MissReason.LOST: MissAdvice(
        "a rank died, or a tier came back empty", "Look into the log for why it ended."
    ),
    MissReason.NO_ROOM: MissAdvice(
        "a copy lies below host memory, and all slots of host memory were in use",
        "Make the host tier larger.",
    ),
    MissReason.FAILED: MissAdvice(
        "a copy failed, or did not arrive in time",
        "Look into the log for failed copies, or raise load_timeout_s.",
    ),
    MissReason.RECOMPUTE: MissAdvice(
        "to compute it was quicker than to load it",
        "Nothing, if the measured rates of the tiers look right.",
    ),
    MissReason.OPTED_OUT: MissAdvice("the request asked not to reuse anything", ""),
}
