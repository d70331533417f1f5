"""From a configuration and the engine's memory to a running cache.

| opens                | here                                     | elsewhere          |
|----------------------|------------------------------------------|--------------------|
| `open`               | the owner and its one rank               |                    |
| `open_offload`       | the same, for an engine that offloads    |                    |
| `open_rank`          | one rank of several                      | the owner          |
| `open_owner`         | the owner                                | its ranks          |
| `open_offload_owner` | the same, for an engine that offloads    | its ranks          |
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config, load_config
from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.agreement import agree
from penstock.runtime.carrier import Carrier
from penstock.runtime.crew import LocalCrew, RemoteCrew
from penstock.runtime.device import device_tier, kv_dtype_of
from penstock.runtime.driver import Driver, draw_incarnation
from penstock.runtime.facts import RankFacts, TierFacts, slowest_ready_s
from penstock.runtime.kept_arenas import KeptArenas
from penstock.runtime.links import LinkedCrew
from penstock.runtime.lower_tiers import build_lower_tiers
from penstock.runtime.managed import Cache
from penstock.runtime.offload import Offload
from penstock.runtime.rank import Rank
from penstock.runtime.returning import Muster
from penstock.tiers.host import HostTier
from penstock.vocabulary.arguments import (
    FD_MAX,
    INT_MAX,
    as_channels,
    as_int,
    as_text,
    as_tuple,
    require_methods,
)
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.agreement import Agreement
    from penstock.runtime.device import Kv
    from penstock.runtime.lower_tiers import LowerTiers
    from penstock.supervisor.keeper import Keeper
    from penstock.tiers.base import SlotStore
    from penstock.transport.base import Channel

WRITER = 0
"""The rank that writes the memory which ranks with equal bytes share."""


def open(  # noqa: A001 - read as penstock.open, which is what it does
    config: Config | Path | str,
    *,
    kv: Kv,
    layout: Layout | None = None,
    keeper: Keeper | None = None,
) -> Cache:
    """Opens a cache that manages the device blocks in `kv`.

    Args:
        config: A configuration, or the path of a TOML file with one.
        kv: The engine's KV: arrays or tensors, one or one a layer, blocks along the first axis;
            or a `TensorTier`.
        layout: How the blocks lie in `kv`; without it a block is opaque bytes.
        keeper: Who keeps the memory of host tiers for the next life of this process, where a
            supervisor does: `keeping.keeper()`. What they hold is not known in that life; the
            time to make them is saved.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the memory or the machine.
        UnavailableError: the machine does not give a required tier the memory it needs.
        ValueError: the memory cannot be used, or does not fit the layout.
    """
    config = _read(config)
    _require_managed(config, "penstock.open_offload")
    _require_parts(layout, None, keeper)
    _require_one_rank(config)
    if not config.model.kv_dtype:
        model = replace(config.model, kv_dtype=kv_dtype_of(kv, layout))
        config = replace(config, model=model)
    rank = open_rank(config, rank=0, kv=kv, layout=layout, keeper=keeper)
    return Cache(config, _drive_here(agree(config, [rank.facts]), rank))


def open_offload(
    config: Config | Path | str,
    *,
    kv: Kv,
    layout: Layout | None = None,
    keeper: Keeper | None = None,
) -> Offload:
    """Opens the tiers below the device blocks in `kv`, which the engine manages itself.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the memory or the machine.
        UnavailableError: the machine does not give a required tier the memory it needs.
        ValueError: the memory cannot be used, or does not fit the layout.
    """
    config = _read(config)
    _require_offload(config, "penstock.open")
    _require_one_rank(config)
    rank = open_rank(config, rank=0, kv=kv, layout=layout, keeper=keeper)
    agreement = agree(config, [rank.facts])
    return Offload(_drive_here(agreement, rank), agreement.device_slots)


def open_rank(
    config: Config | Path | str,
    *,
    rank: int,
    kv: Kv,
    layout: Layout | None = None,
    arenas: Mapping[str, int] | None = None,
    keeper: Keeper | None = None,
) -> Rank:
    """Opens one rank: its part of the device blocks, and its tiers below them.

    Args:
        config: The same as the owner's.
        rank: Which one it is, counted from 0.
        kv: The rank's KV, as for `open`.
        layout: How the blocks lie in `kv`; without it a block is opaque bytes.
        arenas: Descriptors of host tiers that exist already, by name. With `cache.equal_ranks`
            every rank but the first needs them: they are `arenas` of the first rank.
        keeper: Who keeps the memory of host tiers for the next life of this rank, where a
            supervisor does: `keeping.keeper()`. An owner that lived on finds its blocks again.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the memory or the machine.
        UnavailableError: the machine does not give a required tier the memory it needs.
        ValueError: the memory cannot be used, does not fit the layout, or is not what a
            descriptor was said to be.
    """
    config = _read(config)
    rank = as_int("rank", rank, low=-INT_MAX)
    _require_parts(layout, arenas, keeper)
    _require_rank(config, rank, arenas)
    device, algorithm = device_tier(config, kv, layout)
    writes = not config.equal_ranks or rank == WRITER
    kept = KeptArenas(keeper, rank) if keeper is not None and writes else None
    lower = build_lower_tiers(config, device.layout, arenas=arenas, writes=writes, kept=kept)
    stores = [device, *lower.stores]
    carrier = Carrier(stores, algorithm, device_wait_s=config.device_wait_s)
    try:
        _require_required(config, carrier.refused)
    except UnavailableError:
        carrier.close()
        raise
    facts = _facts(config, rank, device.layout, lower, carrier)
    shared = {tier.name for tier in facts.tiers if not tier.off}
    made = {name: fd for name, fd in lower.arenas.items() if name in shared}
    return Rank(carrier, facts, arenas=made, writes=writes)


def _facts(
    config: Config, rank: int, layout: Layout, lower: LowerTiers, carrier: Carrier
) -> RankFacts:
    """What the owner must know of a rank that was just opened."""
    life = draw_incarnation()
    algorithm = carrier.algorithm
    off = {**carrier.refused, **lower.off}
    return RankFacts(
        rank=rank,
        life=life,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        cell_count=len(layout.cells),
        device_slots=tuple(group.block_count for group in layout.groups),
        tiers=_tier_facts(lower, off, life, carrier.connect_s),
        algorithm=algorithm.value,
        form=Form(layout=layout, checksum=algorithm).fingerprint,
        shares=config.equal_ranks,
    )


def _tier_facts(
    lower: LowerTiers, off: Mapping[int, str], life: int, connect_s: Mapping[int, float]
) -> tuple[TierFacts, ...]:
    tiers = zip(lower.settings.tiers, lower.stores, strict=True)
    return tuple(
        TierFacts(
            name=tier.name,
            slot_count=tier.slot_count,
            memory="" if index in off else _memory_of(store, life),
            off=off.get(index, ""),
            ready_s=lower.ready_s.get(index, 0.0) + connect_s.get(index, 0.0),
        )
        for index, (tier, store) in enumerate(tiers, start=1)
    )


def open_owner(
    config: Config | Path | str,
    *,
    ranks: Sequence[RankFacts],
    channels: Sequence[Channel] | None = None,
) -> Cache:
    """Opens a cache that manages the device blocks of ranks elsewhere.

    Args:
        config: The same as the ranks'.
        ranks: The facts of every rank, in any order.
        channels: The way to each of them, in the same order. Without, plans and reports travel
            with the engine's own messages: `take_plan` and `hear`.

    Raises:
        ConfigError: the ranks do not fit the configuration or each other.
    """
    config = _read(config)
    _require_managed(config, "penstock.open_offload_owner")
    ranks = _as_ranks(ranks)
    agreement = agree(config, ranks)
    driver, muster = _drive_elsewhere(config, agreement, ranks, channels)
    return Cache(config, driver, muster)


def open_offload_owner(
    config: Config | Path | str,
    *,
    ranks: Sequence[RankFacts],
    channels: Sequence[Channel] | None = None,
) -> Offload:
    """Opens the tiers below the device blocks of ranks elsewhere, which the engine manages.

    Args:
        config: The same as the ranks'.
        ranks: The facts of every rank, in any order.
        channels: The way to each of them, as for `open_owner`.

    Raises:
        ConfigError: the ranks do not fit the configuration or each other.
    """
    config = _read(config)
    _require_offload(config, "penstock.open_owner")
    ranks = _as_ranks(ranks)
    agreement = agree(config, ranks)
    driver, muster = _drive_elsewhere(config, agreement, ranks, channels)
    return Offload(driver, agreement.device_slots, muster)


def _drive_here(agreement: Agreement, rank: Rank) -> Driver:
    driver = Driver(agreement.settings, LocalCrew(rank.carrier))
    driver.ready_s = slowest_ready_s([rank.facts])
    _switch_off(driver, agreement)
    return driver


def _drive_elsewhere(
    config: Config,
    agreement: Agreement,
    ranks: Sequence[RankFacts],
    channels: Sequence[Channel] | None,
) -> tuple[Driver, Muster]:
    if channels is not None:
        channels = as_channels("channels", channels)
    if channels is not None and len(channels) != len(ranks):
        raise ValueError(f"channels are {len(channels)}, must be {len(ranks)}, one for each rank")
    incarnation = draw_incarnation()
    crew: RemoteCrew | LinkedCrew
    if channels is None:
        crew = RemoteCrew(ranks, incarnation)
    else:
        crew = LinkedCrew(ranks, channels, incarnation)
    driver = Driver(agreement.settings, crew, incarnation=incarnation)
    driver.ready_s = slowest_ready_s(ranks)
    _switch_off(driver, agreement)
    return driver, Muster(config, agreement, driver, crew, ranks)


def _switch_off(driver: Driver, agreement: Agreement) -> None:
    for tier, why in agreement.off:
        driver.switch_tier_off(tier, why)


def _memory_of(store: SlotStore | None, life: int) -> str:
    """A name for the memory of a tier, which lasts as long as its bytes do."""
    if store is None:
        return ""
    if isinstance(store, HostTier):
        status = os.fstat(store.arena.fd)
        return f"memfd {status.st_dev}:{status.st_ino}"
    return f"process {life:016x}"


def _read(config: Config | Path | str) -> Config:
    if isinstance(config, Config):
        return config
    if not isinstance(config, str | Path):
        raise ConfigError(
            "config",
            f"is a {type(config).__name__}, must be a Config or the path of a TOML file",
        )
    if isinstance(config, str) and ("\n" in config or not config.strip()):
        raise ConfigError(
            "config",
            "is a text, must be the path of a TOML file; for a configuration as text use "
            "penstock.parse_config(text)",
        )
    return load_config(Path(config))


def _require_parts(layout: object, arenas: object, keeper: object) -> None:
    if layout is not None and type(layout) is not Layout:
        raise ValueError(f"layout is {reprlib.repr(layout)}, must be a Layout or None")
    if keeper is not None:
        require_methods("keeper", keeper, "Keeper", "kept", "keep")
    if arenas is None:
        return
    if not isinstance(arenas, Mapping):
        problem = f"arenas is {reprlib.repr(arenas)}, must map names of tiers to descriptors"
        raise ValueError(problem)  # noqa: TRY004
    for name, fd in arenas.items():
        as_int(f"arenas[{as_text('name of an arena', name)!r}]", fd, 0, FD_MAX)


def _as_ranks(ranks: Sequence[RankFacts]) -> tuple[RankFacts, ...]:
    found = as_tuple("ranks", ranks)
    for index, facts in enumerate(found):
        if not isinstance(facts, RankFacts):
            raise ValueError(f"ranks[{index}] is {reprlib.repr(facts)}, must be RankFacts")  # noqa: TRY004
    return found


def _require_one_rank(config: Config) -> None:
    if config.cache.rank_count != 1:
        raise ConfigError(
            "cache.ranks",
            f"is {config.cache.rank_count}, must be 1 where owner and rank are one process; for "
            "several use penstock.open_rank and penstock.open_owner",
        )


def _require_managed(config: Config, other: str) -> None:
    if config.cache.device is None:
        raise ConfigError("cache.blocks", f"is 0: the engine manages its own blocks; use {other}")


def _require_offload(config: Config, other: str) -> None:
    if config.cache.device is not None:
        raise ConfigError(
            "cache.blocks",
            f"is {config.cache.device.slot_count}: these blocks would be managed; leave it out, "
            f"or use {other}",
        )


def _require_rank(config: Config, rank: int, arenas: Mapping[str, int] | None) -> None:
    if not 0 <= rank < config.cache.rank_count:
        raise ValueError(
            f"rank is {rank}, must be from 0 to {config.cache.rank_count - 1}: cache.ranks is "
            f"{config.cache.rank_count}"
        )
    if config.equal_ranks and rank != WRITER and arenas is None:
        raise ValueError(
            f"arenas is missing, must be given to rank {rank}: with cache.equal_ranks they are "
            f"those of rank {WRITER}"
        )


def _require_required(config: Config, refused: Mapping[int, str]) -> None:
    for tier, why in refused.items():
        if config.tier_kinds[tier - 1].required:
            raise UnavailableError(f"tier {config.cache.tiers[tier - 1].name!r}: {why}")
