"""Counts and sizes of a cache, as frozen values: one source for CLI, metrics and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cache.states import OperationState, SlotState
from penstock.vocabulary.frames import Count  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from penstock.cache.rates import HopMeter
    from penstock.cache.tier import Tier
    from penstock.machine.books import Books


class StoreCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a store process says of a tier, for all engines that share it."""

    recovered: float = 1.0
    """The share of what was there at its start that can be found by now."""
    blocks: Count = 0
    """On each rank: a block of two ranks counts twice."""
    block_bytes: Count = 0
    """Bytes of those blocks, as they are stored."""
    capacity_bytes: Count = 0
    saves_dropped: Count = 0
    """Blocks that were not written because the tier was too slow."""
    blocks_corrupt: Count = 0
    blocks_reclaimed: Count = 0
    generations_lost: Count = 0
    """How often the record of what resets have voided was lost or out of date: all that was there
    before then counts as voided."""


class StoreStatistics(StoreCounts, frozen=True, kw_only=True):
    """The same, and what concerns this engine alone."""

    reset_confirmed: bool = True
    """Whether the last reset of this engine outlives it."""


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One tier."""

    name: str
    on: bool
    why_off: str = ""
    slots: int
    free: int
    filling: int
    ready: int
    leaving: int
    doomed: int
    """Slots that cannot be reused yet, because something may still write to them."""
    held: int
    """Slots that a lease or an operation relies on."""
    tokens_cached: int
    """Tokens that requests found here."""
    blocks_evicted: int
    blocks_refused: int = 0
    """Blocks that were not written here: those that lie here are worth more."""
    saves_waiting: int = 0
    """Blocks that a stored tier missed while it was off, and that are written when it is on."""
    saves_dropped: int = 0
    """Blocks that left the first tier below the device before they could be written here."""
    ready_s: float | None = None
    """How long it took until its memory could be used, on the slowest rank: made or mapped, and
    registered. `None` for the device."""
    store: StoreStatistics | None = None
    """Of a tier that a store process serves, once it has answered."""


class HopStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How fast blocks go from one tier to another."""

    source: str
    target: str
    tokens_per_s: float | None
    """The moving median; `None` where nothing was measured lately."""
    bytes_per_s: float | None
    """The same on each rank; `None` also where the size of a block is not known."""
    blocks_queued: int
    """Blocks that were asked for and have not arrived."""
    blocks_copied: int
    """Blocks that have arrived, since the beginning."""
    bytes_copied: int | None
    """Their bytes on each rank; `None` where the size of a block is not known."""


class HubCounts(NamedTuple):
    """The first tier below the device in numbers: what is cheap enough to ask in every step."""

    slots: int = 0
    """Blocks that fit; 0 where the tier is off."""
    ready: int = 0
    """Blocks that can be loaded."""
    evicted: int = 0
    """Blocks that made room for others, since the beginning."""
    corrupt: int = 0
    """Blocks that failed their checksum, in whatever tier, since the beginning."""


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one engine."""

    epoch: int
    healthy: bool
    lost_ranks: tuple[int, ...]
    blocks_known: int
    blocks_hollow: int
    """Known blocks without a copy, kept because blocks after them are cached."""
    leases: int
    pins: int
    operations_running: int
    operations_ending: int
    """Given up, but some rank may still touch their slots."""
    operations_started: int
    operations_ended: dict[str, int]
    requests: int
    requests_refused: int
    tokens_asked: int
    tokens_not_delivered: int
    """Tokens that were found, but whose blocks could not be brought to the device."""
    misses: dict[str, int]
    """Requests by the reason why they found no more when they asked."""
    blocks_published: int
    blocks_twinned: int
    blocks_dropped_unsaved: int
    blocks_corrupt: int
    blocks_missing: int
    """Blocks that were asked for and that the tier did not have."""
    saves_refused: int
    saves_skipped: int
    """Blocks not written into a stored tier because too many were on their way."""
    reports_late: int
    reports_lost: int = 0
    """Reports of ranks elsewhere that never came, although later ones did."""
    leases_lost: int
    tokens_computed_instead: int
    """Tokens that were found below the device, but were quicker to compute than to load."""
    blocks_let_go: int = 0
    """Blocks that their request did not expect to be used again, when it ended."""
    hints_refused: int = 0
    """Copies whose priority was not raised: their tenant's share of the tier was full of such."""
    prefill_tokens_per_s: float | None
    """The moving median of what the engine reported; `None` without a recent report."""
    hops: tuple[HopStatistics, ...]
    tiers: tuple[TierStatistics, ...]

    @property
    def tokens_cached(self) -> int:
        """Tokens that requests found, in whatever tier."""
        return sum(tier.tokens_cached for tier in self.tiers)

    @property
    def blocks_evicted(self) -> int:
        """Copies that made room for others, in whatever tier."""
        return sum(tier.blocks_evicted for tier in self.tiers)

    @property
    def blocks_refused(self) -> int:
        """Blocks that a full tier did not take, as what lies there is worth more."""
        return sum(tier.blocks_refused for tier in self.tiers)


def count_hub(books: Books) -> HubCounts:
    """Cheap enough for every step."""
    hub, counters = books.hub, books.counters
    if hub is None:
        return HubCounts(corrupt=counters.blocks_corrupt)
    return HubCounts(
        slots=hub.pool.slot_count if hub.on else 0,
        ready=hub.pool.count(SlotState.READY) if hub.on else 0,
        evicted=counters.blocks_evicted_by_tier[hub.index],
        corrupt=counters.blocks_corrupt,
    )


def gather(books: Books) -> CacheStatistics:
    """Statistics of the books as they are now."""
    counters = books.counters
    states = [operation.state for operation in books.ledger.operations.values()]
    return CacheStatistics(
        epoch=books.era,
        healthy=books.healthy,
        lost_ranks=tuple(sorted(books.lost_ranks)),
        blocks_known=len(books.nodes),
        blocks_hollow=books.nodes.hollow_count(),
        leases=len(books.leases),
        pins=len(books.pins),
        operations_running=states.count(OperationState.RUNNING),
        operations_ending=states.count(OperationState.ENDING),
        operations_started=books.ledger.started,
        operations_ended={o.value: count for o, count in books.ledger.ended.items()},
        requests=counters.requests,
        requests_refused=counters.requests_refused,
        tokens_asked=counters.tokens_asked,
        tokens_not_delivered=counters.tokens_not_delivered,
        misses={reason.value: count for reason, count in counters.misses.items()},
        blocks_published=counters.blocks_published,
        blocks_twinned=counters.blocks_twinned,
        blocks_dropped_unsaved=counters.blocks_dropped_unsaved,
        blocks_corrupt=counters.blocks_corrupt,
        blocks_missing=counters.blocks_missing,
        saves_refused=counters.saves_refused,
        saves_skipped=counters.saves_skipped,
        reports_late=counters.reports_late,
        leases_lost=counters.leases_lost,
        tokens_computed_instead=counters.tokens_computed_instead,
        blocks_let_go=counters.blocks_let_go,
        hints_refused=sum(tier.hints_refused for tier in books.owned_tiers()),
        prefill_tokens_per_s=books.rates.prefill.value(books.now),
        hops=tuple(
            _hop(books, source, target, meter)
            for (source, target), meter in books.rates.hops.items()
        ),
        tiers=tuple(_tier(books, tier) for tier in books.owned_tiers()),
    )


def _hop(books: Books, source: int, target: int, meter: HopMeter) -> HopStatistics:
    settings = books.settings
    blocks_per_s = meter.seen.value(books.now)
    block_bytes = settings.block_bytes
    return HopStatistics(
        source=_name(books, source),
        target=_name(books, target),
        tokens_per_s=None if blocks_per_s is None else blocks_per_s * settings.block_tokens,
        bytes_per_s=blocks_per_s * block_bytes if blocks_per_s and block_bytes else None,
        blocks_queued=meter.queued,
        blocks_copied=meter.copied,
        bytes_copied=meter.copied * block_bytes if block_bytes else None,
    )


def _name(books: Books, index: int) -> str:
    tier = books.tiers[index]
    return "device" if tier is None else tier.name


def _tier(books: Books, tier: Tier) -> TierStatistics:
    pool = tier.pool
    backlog = books.backlogs.get(tier.index)
    return TierStatistics(
        name=tier.name,
        on=tier.on,
        slots=pool.slot_count,
        free=pool.free_count,
        filling=pool.count(SlotState.FILLING),
        ready=pool.count(SlotState.READY),
        leaving=pool.leaving_count,
        doomed=pool.count(SlotState.DOOMED),
        held=pool.held_count,
        tokens_cached=books.counters.tokens_cached_by_tier[tier.index],
        blocks_evicted=books.counters.blocks_evicted_by_tier[tier.index],
        blocks_refused=books.counters.blocks_refused_by_tier[tier.index],
        saves_waiting=0 if backlog is None else len(backlog),
        saves_dropped=0 if backlog is None else backlog.dropped,
    )
