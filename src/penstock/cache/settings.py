"""Settings of the cache, as values that cannot be built wrong.

| value           | says                                                                 |
|-----------------|----------------------------------------------------------------------|
| `WritePolicy`   | when a block is written into a tier from the tier that feeds it       |
| `TierSettings`  | one tier: how many slots, what is kept, what leaves first             |
| `CacheSettings` | the whole: block size, ranks, the device tier and the tiers below it  |

Tier 0 is the device. Tier 1, the first below it, is the *hub*: it alone exchanges blocks
with the device, and every further tier exchanges blocks with the hub. So a copy from disk
travels disk → hub → device, and a block reaches disk from the hub, not from the device.

A *stored* tier is served by a store process: a disk, or a store that engines share. That process
owns the index of the tier and decides where a block lies; the tier's slots are entries of a
directory of what is known to be there, numbers without meaning to the store.

A tier that could never hold a block is refused here, with the reason, rather than
reserving memory that stays empty.
"""

from __future__ import annotations

# msgspec resolves the annotations when it decodes settings, so this import must be real.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field
from enum import Enum

from penstock.cache.eviction import POLICIES, policy_named
from penstock.errors import ConfigError

DEVICE = 0
"""Index of the device tier."""
HUB = 1
"""Index of the first tier below the device."""

EVICTION_POLICIES = tuple(POLICIES)


class Gate(Enum):
    """How the cache decides whether blocks below the device are loaded or computed again."""

    MEASURED = "measured"
    """By measured rates: whatever is quicker. Without any, blocks are loaded."""
    OFF = "off"
    """Not at all: everything that is found is loaded."""


class WriteKind(Enum):
    """When a block is copied into a tier from the tier that feeds it."""

    NONE = "none"
    """Never: what the feeding tier evicts is gone."""
    WRITE_THROUGH = "write_through"
    """As soon as the block is filled above."""
    SELECTIVE = "selective"
    """Once the block was hit `hits` times."""
    WRITE_BACK = "write_back"
    """When the feeding tier runs low on free slots, before it evicts the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePolicy:
    """When blocks are written into a tier; `hits` counts for `selective` alone."""

    kind: WriteKind = WriteKind.WRITE_THROUGH
    hits: int = 2

    def __post_init__(self) -> None:
        if self.kind is WriteKind.SELECTIVE and not 1 <= self.hits <= 65_535:
            raise ConfigError("hits", f"is {self.hits}, must be from 1 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """One tier: its size, what enters it and what leaves it first."""

    name: str
    slot_count: int
    write: WritePolicy = field(default_factory=WritePolicy)
    """How blocks enter this tier. The device tier is filled by the engine and ignores it."""
    eviction: str = "lru"
    low_watermark: float = 0.0
    """Share of free slots under which blocks leave in the background."""
    high_watermark: float = 0.0
    """Share of free slots at which they stop leaving."""
    stored: bool = False
    """Whether a store process serves it. It copies between the hub and the tier for every rank,
    other engines may write to it, and it gives blocks up by itself. `slot_count` is then how many
    of its blocks are known at a time."""
    quotas: Mapping[str, float] = field(default_factory=dict)
    """Share of the slots that a tenant's blocks may take; `*` stands for every tenant that is
    not named. Without either there is no limit."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("_", "").replace("-", "").isalnum():
            raise ConfigError("name", f"is {self.name!r}, must be letters, digits, '-' and '_'")
        if self.slot_count < 1:
            raise ConfigError(
                f"tier {self.name!r}: slot_count",
                f"is {self.slot_count}: the tier could never hold a block; must be at least 1",
            )
        policy_named(self.eviction, place=f"tier {self.name!r}: eviction")
        if not 0.0 <= self.low_watermark <= self.high_watermark < 1.0:
            raise ConfigError(
                f"tier {self.name!r}: low_watermark",
                f"is {self.low_watermark} with high_watermark {self.high_watermark}; "
                "need 0 <= low_watermark <= high_watermark < 1",
            )
        for tenant, share in self.quotas.items():
            if not 0.0 <= share <= 1.0:
                raise ConfigError(
                    f"tier {self.name!r}: quotas.{tenant}", f"is {share}, must be from 0 to 1"
                )

    @property
    def low_slots(self) -> int:
        """Free slots under which blocks leave in the background."""
        return int(self.low_watermark * self.slot_count)

    @property
    def high_slots(self) -> int:
        """Free slots at which blocks stop leaving."""
        return int(self.high_watermark * self.slot_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Everything that decides what the cache of one engine does."""

    device: TierSettings | None
    """The engine's own slots when Penstock manages them; `None` when the engine does."""
    tiers: tuple[TierSettings, ...] = ()
    """The tiers below the device, nearest first; the first one is the hub."""
    block_tokens: int = 16
    rank_count: int = 1
    group_count: int = 1
    operation_blocks_max: int = 256
    """How many blocks an operation moves at most, so that it ends soon."""
    stored_saves_max: int = 1024
    """How many blocks may be on their way into one stored tier; what comes meanwhile is not
    written, and counted. Four operations of the largest size keep a disk busy. Never more than a
    half of the hub: its slots are held until they are written."""
    operation_timeout_s: float = 30.0
    """An operation without a deadline of its own expires after this."""
    departed_count: int = 65_536
    """Of how many blocks that left the reason is remembered."""
    story_count: int = 4_096
    """How many entries the history keeps."""
    event_count: int = 8_192
    """How many KV events wait for a reader; with more, the oldest go and a snapshot is due."""
    pin_share: float = 0.5
    """Pinned prefixes may take this share of a tier; beyond it, pinning is refused."""
    hint_share: float = 0.5
    """Blocks whose priority a tenant raised may take this share of a tier; beyond it, its blocks
    are like any other's."""
    load_gate: Gate = Gate.MEASURED
    """Whether a load must be quicker than computing."""
    load_tokens_min: int = 0
    """A load that saves fewer tokens than this is not worth its wait for the next step. 0: as
    many as the engine prefills in `LOAD_WAIT_S`, and any number while its speed is not known."""
    rate_age_s: float = 60.0
    """A rate is used for this long after its last sample. Long enough for a lull between
    requests, short enough that a tier which was slow for a while is soon tried again."""
    block_bytes: int = 0
    """Bytes of a block on one rank, to give rates in bytes; 0 where they are not known."""

    def __post_init__(self) -> None:
        if self.device is None and not self.tiers:
            raise ConfigError("tiers", "is empty and no device tier is managed: nothing to keep")
        _require_at_least_one("block_tokens", self.block_tokens)
        _require_at_least_one("rank_count", self.rank_count)
        _require_at_least_one("group_count", self.group_count)
        _require_at_least_one("operation_blocks_max", self.operation_blocks_max)
        _require_at_least_one("stored_saves_max", self.stored_saves_max)
        _require_at_least_one("departed_count", self.departed_count)
        _require_at_least_one("story_count", self.story_count)
        _require_at_least_one("event_count", self.event_count)
        if not self.operation_timeout_s > 0:
            raise ConfigError("operation_timeout_s", f"is {self.operation_timeout_s}, must be > 0")
        if not 0.0 <= self.pin_share <= 1.0:
            raise ConfigError("pin_share", f"is {self.pin_share}, must be from 0 to 1")
        if not 0.0 <= self.hint_share <= 1.0:
            raise ConfigError("hint_share", f"is {self.hint_share}, must be from 0 to 1")
        if self.load_tokens_min < 0:
            raise ConfigError("load_tokens_min", f"is {self.load_tokens_min}, must be at least 0")
        if not self.rate_age_s > 0:
            raise ConfigError("rate_age_s", f"is {self.rate_age_s}, must be > 0")
        if self.block_bytes < 0:
            raise ConfigError("block_bytes", f"is {self.block_bytes}, must be at least 0")
        names = [tier.name for tier in (*filter(None, [self.device]), *self.tiers)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("name", f"{name!r} is the name of more than one tier")
        self._refuse_stored_tiers_without_hub()
        self._refuse_tiers_that_can_never_fill()

    def _refuse_stored_tiers_without_hub(self) -> None:
        for tier in (self.device, *self.tiers[:1]):
            if tier is not None and tier.stored:
                where = "the device" if tier is self.device else "the first tier below the device"
                raise ConfigError(
                    f"tier {tier.name!r}: stored",
                    f"is true, but it is {where}, which must be memory: a stored tier needs a "
                    "hub above it; put a tier of host memory before it",
                )

    def _refuse_tiers_that_can_never_fill(self) -> None:
        for position, tier in enumerate(self.tiers):
            feeder = self.device if position == 0 else self.tiers[0]
            place = f"tier {tier.name!r}: write"
            if tier.write.kind is WriteKind.NONE:
                raise ConfigError(
                    place,
                    "is 'none': nothing would ever be written into it, so it can never fill; "
                    "use write_through, selective or write_back, or leave the tier out",
                )
            if tier.write.kind is WriteKind.WRITE_BACK:
                if feeder is None:
                    raise ConfigError(
                        place,
                        "is 'write_back', but the engine evicts its own device blocks and never "
                        "asks for them to be written back, so it can never fill; use "
                        "write_through or selective",
                    )
                if feeder.low_slots < 1:
                    raise ConfigError(
                        place,
                        f"is 'write_back', but low_watermark of tier {feeder.name!r} is "
                        f"{feeder.low_watermark} of {feeder.slot_count} slots, less than one "
                        "slot, so writing back never starts and the tier can never fill; "
                        "raise low_watermark",
                    )
            slots = [int(share * tier.slot_count) for share in tier.quotas.values()]
            if "*" in tier.quotas and not any(slots):
                raise ConfigError(
                    f"tier {tier.name!r}: quotas",
                    f"are {dict(tier.quotas)}: less than one of {tier.slot_count} slots for "
                    "every tenant, so it can never fill; raise one of them",
                )


def _require_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(name, f"is {value}, must be at least 1")
