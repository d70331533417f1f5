"""From a configuration and the engine's memory to a running cache.

| call                            | the device blocks are managed by | the ranks are           |
|---------------------------------|----------------------------------|-------------------------|
| `open(config, kv=…)`            | Penstock                         | one, this process       |
| `open(config, ranks=…)`         | Penstock                         | other processes         |
| `open_offload(config, kv=…)`    | the engine                       | one, this process       |
| `open_offload(config, ranks=…)` | the engine                       | other processes         |
| `open_rank(config, …)`          |                                  | this process is one     |
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.settings import HUB
from penstock.config import Config, load_config
from penstock.config.values import PEERS, SHARED_KINDS
from penstock.errors import ConfigError, UnavailableError
from penstock.runtime.base import Driven
from penstock.runtime.cache import Cache
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.driver import Driver, draw_incarnation
from penstock.runtime.messages import RankFacts, TierFacts, agree, slowest_ready_s
from penstock.runtime.offload import Offload
from penstock.runtime.rank import Rank
from penstock.runtime.rank_links import LocalLink, MessageLinks
from penstock.runtime.stored_tiers import StoredTiers, space_name, store_config
from penstock.runtime.tiers import KeptArenas, build_lower_tiers, device_tier, kv_dtype_of
from penstock.store.base import part_name
from penstock.store.process.client import STARTING, ArenaOffer
from penstock.store.process.link import StoreLink
from penstock.tiers.host import HostTier
from penstock.vocabulary.arguments import (
    FD_MAX,
    INT_MAX,
    as_int,
    as_seconds,
    as_text,
    as_tuple,
    require_methods,
)
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.runtime.messages import Agreement
    from penstock.runtime.tiers import Kv, LowerTiers
    from penstock.supervisor.descriptors import Keeper
    from penstock.tiers.base import SlotStore

CacheT = TypeVar("CacheT", Cache, Offload)

WRITER = 0
"""The rank that writes the memory which ranks with equal bytes share."""


def open(  # noqa: A001 - read as penstock.open, which is what it does
    config: Config | Path | str,
    *,
    kv: Kv | None = None,
    layout: Layout | None = None,
    keeper: Keeper | None = None,
    ranks: Sequence[RankFacts] | None = None,
    wait_for_tiers_s: float = 0.0,
) -> Cache:
    """Opens a cache that manages the engine's device blocks.

    Give `kv` where the engine has one rank, in this process, and `ranks` where its ranks are
    other processes.

    Args:
        config: A configuration, or the path of a TOML file with one; the same for all ranks.
        kv: The engine's KV: arrays or tensors, one or one a layer, blocks along the first axis;
            or a `TensorTier`.
        layout: How the blocks lie in `kv`; without it a block is opaque bytes.
        keeper: Who keeps the memory of host tiers for the next life of this process, where a
            supervisor does: `keeper.keeper()`. What they hold is not known in that life; the
            time to make them is saved.
        ranks: The facts of every rank, in any order: each rank was opened by `open_rank`. Plans
            and reports travel with the engine's own messages: `cache.ranks`.
        wait_for_tiers_s: How long to wait at most until disks and shared stores can be used, as
            `wait_for_tiers` does. By default they come on in later steps.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the memory, the machine or the
            ranks.
        UnavailableError: the machine does not give a required tier the memory it needs.
        ValueError: the memory cannot be used, or does not fit the layout; or arguments for one
            rank in this process and for ranks in others are mixed.
    """
    config = _read(config)
    wait_s = as_seconds("wait_for_tiers_s", wait_for_tiers_s, zero=True)
    _require_managed(config)
    config.namespace()  # Here, not at the first request, a salt is missed that cannot be read.
    return _with_tiers(Cache(_driven(config, kv, layout, keeper, ranks)), wait_s)


def open_offload(
    config: Config | Path | str,
    *,
    kv: Kv | None = None,
    layout: Layout | None = None,
    keeper: Keeper | None = None,
    ranks: Sequence[RankFacts] | None = None,
    wait_for_tiers_s: float = 0.0,
) -> Offload:
    """Opens the tiers below device blocks that the engine manages itself.

    The arguments, and what it raises, are those of `open`.
    """
    config = _read(config)
    wait_s = as_seconds("wait_for_tiers_s", wait_for_tiers_s, zero=True)
    _require_offload(config)
    config.namespace()  # As above.
    return _with_tiers(Offload(_driven(config, kv, layout, keeper, ranks)), wait_s)


def _driven(
    config: Config,
    kv: Kv | None,
    layout: Layout | None,
    keeper: Keeper | None,
    ranks: Sequence[RankFacts] | None,
) -> Driven:
    """A cache over the rank in this process, or over those in others."""
    if ranks is not None:
        _require_no_memory(kv, layout, keeper)
        return _drive(config, _as_ranks(ranks), None)
    _require_parts(layout, None, keeper)
    _require_one_rank(config)
    if kv is not None and config.cache.device is not None and not config.model.kv_dtype:
        model = replace(config.model, kv_dtype=kv_dtype_of(kv, layout))
        config = replace(config, model=model)
    rank = _open_rank(config, 0, kv, layout, None, keeper)
    return _drive(config, [rank.facts], rank)


def _with_tiers(cache: CacheT, wait_s: float) -> CacheT:
    """The cache, after its tiers had some time to come on."""
    if wait_s:
        with ExitStack() as undo:
            undo.callback(cache.close)
            cache.wait_for_tiers(wait_s)
            undo.pop_all()
    return cache


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
            supervisor does: `keeper.keeper()`. An owner that lived on finds its blocks again.

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
    return _open_rank(config, rank, kv, layout, arenas, keeper)


def _open_rank(
    config: Config,
    rank: int,
    kv: Kv | None,
    layout: Layout | None,
    arenas: Mapping[str, int] | None,
    keeper: Keeper | None,
) -> Rank:
    device, algorithm = device_tier(config, kv, layout)
    writes = not config.equal_ranks or rank == WRITER
    kept = KeptArenas(keeper, rank) if keeper is not None and writes else None
    lower = build_lower_tiers(config, device.layout, arenas=arenas, writes=writes, kept=kept)
    stores = [device, *lower.stores]
    executor = CopyExecutor(stores, algorithm, device_wait_s=config.device_wait_s)
    try:
        _require_required(config, executor.refused)
    except UnavailableError:
        executor.close()
        raise
    facts = _facts(config, rank, device.layout, lower, executor)
    shared = {tier.name for tier in facts.tiers if not tier.off}
    made = {name: fd for name, fd in lower.arenas.items() if name in shared}
    offer = _offer(config, rank, executor) if writes else None
    return Rank(executor, facts, arenas=made, writes=writes, offer=offer)


def _offer(config: Config, rank: int, executor: CopyExecutor) -> ArenaOffer | None:
    """Offers the hub of a rank to the store process, where there is one."""
    store = store_config(config) if config.persists else None
    if store is None or len(executor.stores) <= HUB:
        return None
    hub = executor.stores[HUB]
    if not isinstance(hub, HostTier):
        return None
    form = Form(layout=hub.layout, checksum=executor.algorithm)
    part = part_name(form, rank=rank, rank_count=config.cache.rank_count, equal=config.equal_ranks)
    return ArenaOffer(store.socket, hub, form=form, part=part)


def _facts(
    config: Config, rank: int, layout: Layout, lower: LowerTiers, executor: CopyExecutor
) -> RankFacts:
    """What the owner must know of a rank that was just opened."""
    life = draw_incarnation()
    algorithm = executor.algorithm
    off = {**executor.refused, **lower.off}
    return RankFacts(
        rank=rank,
        life=life,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        cell_count=len(layout.cells),
        device_slots=tuple(group.block_count for group in layout.groups),
        tiers=_tier_facts(lower, off, life, executor.connect_s),
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


def _drive(config: Config, ranks: Sequence[RankFacts], here: Rank | None) -> Driven:
    """The driver over these ranks, the only one of which may be in this process."""
    agreement = agree(config, ranks)
    incarnation = draw_incarnation()
    links = MessageLinks(ranks, incarnation) if here is None else LocalLink(here.executor)
    offer = None if here is None else here.offer
    stored, why_not = _stored_tiers(config, ranks, incarnation, offer)
    driver = Driver(agreement.settings, links, incarnation=incarnation, stored=stored)
    driver.ready_s = slowest_ready_s(ranks)
    _switch_off(driver, agreement, why_not)
    return Driven(config, agreement, driver, ranks if here is None else ())


def _stored_tiers(
    config: Config, ranks: Sequence[RankFacts], incarnation: int, offer: ArenaOffer | None
) -> tuple[StoredTiers | None, Mapping[int, str]]:
    """The tiers that the store process serves, which is started if nobody has done it.

    And why they are off from the beginning, by their index.
    """
    store = store_config(config) if config.persists else None
    if store is None:
        return None, {}
    in_order = sorted(ranks, key=lambda facts: facts.rank)
    tiers = {
        index: tier.name for index, tier in enumerate(config.cache.tiers, start=HUB) if tier.stored
    }
    link = StoreLink(
        store,
        life=incarnation,
        space=space_name(config),
        arenas=[facts.tiers[0].memory for facts in in_order],
        tiers=tiers,
        embedded=True,
    )
    asked = {
        index: float(kind.options["ask_ms"]) / 1000
        for index, kind in enumerate(config.tier_kinds, start=HUB)
        if kind.name in SHARED_KINDS
    }
    kinds = enumerate(config.tier_kinds, start=HUB)
    lent_in = next((index for index, kind in kinds if kind.name == PEERS), None)
    stored = StoredTiers(link, tuple(tiers), offer=offer, asked=asked, lent_in=lent_in)
    return stored, dict.fromkeys(tiers, STARTING)


def _switch_off(driver: Driver, agreement: Agreement, not_stored: Mapping[int, str]) -> None:
    # The first rank's reason: a rank that cannot share has none of its own.
    for tier, why in {**dict(reversed(agreement.off)), **not_stored}.items():
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
            "several use penstock.open_rank, and give the facts of the ranks as ranks=",
        )


def _require_no_memory(kv: object, layout: object, keeper: object) -> None:
    for name, value in (("kv", kv), ("layout", layout), ("keeper", keeper)):
        if value is not None:
            raise ValueError(f"{name} belongs to a rank: give it to open_rank, not with ranks=")


def _require_managed(config: Config) -> None:
    if config.cache.device is None:
        raise ConfigError(
            "cache.blocks", "is 0: the engine manages its own blocks; use penstock.open_offload"
        )


def _require_offload(config: Config) -> None:
    if config.cache.device is not None:
        raise ConfigError(
            "cache.blocks",
            f"is {config.cache.device.slot_count}: these blocks would be managed; leave it out, "
            "or use penstock.open",
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
