"""What the ranks of one engine must have in common, and what the cache may count on.

| must agree                                   | the least counts             |
|----------------------------------------------|------------------------------|
| tokens a block, KV groups, how cells are     | device slots of each group,  |
| summed, the tiers and their order; the form, | slots of each tier           |
| where ranks share memory                     |                              |

The one rule: a refusal names both ranks and both values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.runtime.framing import MESSAGE_BYTES_MAX
from penstock.runtime.plans import ROW_BYTES_MAX
from penstock.vocabulary.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.settings import CacheSettings
    from penstock.config import Config
    from penstock.runtime.facts import RankFacts


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
