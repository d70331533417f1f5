"""What a rank is: told once, when it starts, to the owner of its cache.

    facts = rank.facts                       # in the process of the rank
    message = facts.to_bytes()               # over whatever way the engine has
    RankFacts.from_bytes(message)            # where the owner is

The one rule: facts describe one life of a rank. A rank that starts anew has another `life`, and
what it holds is told anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.runtime.framing import frames_of

if TYPE_CHECKING:
    from collections.abc import Iterable

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class TierFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below the device, on one rank."""

    name: str
    slot_count: Positive
    memory: str = ""
    """Names the memory that the slots lie in: equal for as long as the bytes are kept, even if
    the rank starts anew, and for all ranks that share them."""
    off: str = ""
    """Why it cannot be used here; empty if it can."""
    ready_s: Seconds = 0.0
    """From its beginning until blocks could be copied to it: made or mapped, and registered."""


class RankFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank has, as far as the owner must know it."""

    rank: Count
    life: Count
    """64 random bits, drawn when the rank was opened."""
    block_tokens: Positive
    block_bytes: Positive
    """Bytes of a block on this rank."""
    cell_count: Positive
    """Sums that a block on this rank carries."""
    device_slots: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    """Device blocks of each KV group."""
    tiers: tuple[TierFacts, ...]
    """The tiers below the device, nearest first."""
    algorithm: str
    """How cells are summed."""
    form: bytes
    """The fingerprint of the form in which copies lie: equal where ranks hold equal bytes."""
    shares: bool = False
    """Whether it shares its host memory with the other ranks, which hold equal bytes."""

    def to_bytes(self) -> bytes:
        """The facts as a message."""
        return _frames.encode(self)

    @classmethod
    def from_bytes(cls, message: bytes) -> RankFacts:
        """The facts that a message tells.

        Raises:
            PeerError: the message is something else, of another version, or damaged.
        """
        return _frames.decode(message)


def slowest_ready_s(ranks: Iterable[RankFacts]) -> dict[str, float]:
    """How long each tier took until it could be used, on the rank that took longest."""
    found: dict[str, float] = {}
    for facts in ranks:
        for tier in facts.tiers:
            found[tier.name] = max(tier.ready_s, found.get(tier.name, 0.0))
    return found


_frames = frames_of(b"F", "a message with facts", msgspec.msgpack.Decoder(RankFacts))
