"""What each rank has, and what the ranks of one engine must have in common.

    facts = rank.facts                       # in the process of the rank
    message = facts.to_bytes()               # by whatever way the engine has
    RankFacts.from_bytes(message)            # where the owner is

Facts describe one life of a rank: a rank that restarts has another `life`, and new facts.

| must agree                                   | the least counts             |
|----------------------------------------------|------------------------------|
| tokens a block, KV groups, how cells are     | device slots of each group,  |
| summed, the tiers and their order; the form, | slots of each tier           |
| where ranks share memory                     |                              |

A refusal names both ranks and both values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.errors import ConfigError
from penstock.runtime.messages import MESSAGE_BYTES_MAX, ROW_BYTES_MAX, frames_of
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cache.settings import CacheSettings
    from penstock.config import Config


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
        """Encodes the facts as a message."""
        return _frames.encode(self)

    @classmethod
    def from_bytes(cls, message: bytes) -> RankFacts:
        """Reads the facts from a message.

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

LIFE_BYTES = 9
"""What the life of a rank takes in a plan, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What holds for every rank of an engine."""

    settings: CacheSettings
    """With the slots that every rank has."""
    device_slots: tuple[int, ...]
    """Device blocks of each KV group."""
    off: tuple[tuple[int, str], ...]
    """Tiers that some rank does not have, by index, and why."""


def agree(config: Config, ranks: Sequence[RankFacts]) -> Agreement:
    """What the cache over these ranks can count on.

    Raises:
        ConfigError: facts are missing, do not fit the configuration, or contradict each other.
    """
    _require_all(config, ranks)
    for facts in ranks:
        require_fit(config, facts, ranks[0])
    _require_plans_fit(config)
    device_slots = tuple(map(min, zip(*(facts.device_slots for facts in ranks), strict=True)))
    tiers = tuple(
        replace(tier, slot_count=min(facts.tiers[index].slot_count for facts in ranks))
        for index, tier in enumerate(config.cache.tiers)
    )
    off = [
        (index + 1, f"rank {facts.rank}: {facts.tiers[index].off}")
        for index in range(len(tiers))
        for facts in ranks
        if facts.tiers[index].off
    ]
    block_bytes = max(facts.block_bytes for facts in ranks)
    settings = replace(config.cache, tiers=tiers, block_bytes=block_bytes)
    return Agreement(settings=settings, device_slots=device_slots, off=tuple(off))


def require_fit(config: Config, facts: RankFacts, first: RankFacts) -> None:
    """Checks a rank against the configuration and against another rank.

    Raises:
        ConfigError: something that must agree does not.
    """
    cache = config.cache
    here = f"on rank {facts.rank}"
    _require("cache.block_tokens", cache.block_tokens, facts.block_tokens, here)
    _require("cache.groups", cache.group_count, len(facts.device_slots), here)
    names = tuple(tier.name for tier in cache.tiers)
    _require("tiers", names, tuple(tier.name for tier in facts.tiers), here)
    _require("cache.equal_ranks", config.equal_ranks, facts.shares, here)
    if cache.device is not None and min(facts.device_slots) < cache.device.slot_count:
        raise ConfigError(
            "cache.blocks",
            f"is {cache.device.slot_count}, must be at most {min(facts.device_slots)}, the device "
            f"blocks of rank {facts.rank}",
        )
    if facts.algorithm != first.algorithm:
        raise ConfigError(
            "ranks",
            f"sum their cells by {first.algorithm} (rank {first.rank}) and {facts.algorithm} "
            f"(rank {facts.rank}), must do it in one way",
        )
    if config.equal_ranks and facts.form != first.form:
        raise ConfigError(
            "cache.equal_ranks",
            f"is true, but the forms of rank {first.rank} ({first.form.hex()}) and rank "
            f"{facts.rank} ({facts.form.hex()}) differ: they do not hold equal bytes",
        )
    if config.equal_ranks and _lie_apart(facts, first):
        raise ConfigError(
            "cache.equal_ranks",
            f"is true, but tier {facts.tiers[0].name!r} lies in {first.tiers[0].memory!r} on rank "
            f"{first.rank} and in {facts.tiers[0].memory!r} on rank {facts.rank}: they do not "
            "share it; open one with the arenas of the other",
        )


def _lie_apart(facts: RankFacts, first: RankFacts) -> bool:
    """Whether two ranks that have a hub have two of them."""
    here, there = facts.tiers[0], first.tiers[0]
    return not (here.off or there.off) and here.memory != there.memory


def _require(field: str, configured: object, found: object, where: str) -> None:
    if configured != found:
        raise ConfigError(field, f"is {configured!r}, but {found!r} {where}")


def _require_all(config: Config, ranks: Sequence[RankFacts]) -> None:
    numbers = sorted(facts.rank for facts in ranks)
    if numbers != list(range(config.cache.rank_count)):
        raise ConfigError(
            "cache.ranks",
            f"is {config.cache.rank_count}, but there are facts of ranks "
            f"{', '.join(map(str, numbers)) or 'none'}; each of 0 to "
            f"{config.cache.rank_count - 1} must be there once",
        )


def _require_plans_fit(config: Config) -> None:
    """Refuses operations that no plan could carry."""
    cache = config.cache
    block_bytes = KEY_BYTES + 4 * (1 + cache.group_count)
    rest = 2 * ROW_BYTES_MAX + LIFE_BYTES * cache.rank_count
    most = (MESSAGE_BYTES_MAX - rest) // block_bytes
    if cache.operation_blocks_max > most:
        raise ConfigError(
            "cache.operation_blocks_max",
            f"is {cache.operation_blocks_max}, must be at most {most} with {cache.group_count} KV "
            f"groups: a plan has at most {MESSAGE_BYTES_MAX} bytes",
        )
