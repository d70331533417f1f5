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

Fields with a kind are keys of a configuration file; `penstock.vocabulary.schema` explains them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from penstock.cache.eviction import POLICIES, REPLACED, policy_named
from penstock.errors import ConfigError
from penstock.extensions import OTHER_POLICIES
from penstock.vocabulary.keys import BLOCK_TOKENS_MAX
from penstock.vocabulary.schema import EnumChoice, Number, Shares, String, Text, Whole, settings_of

BLOCKS_MAX = 2**31 - 1
"""Slot numbers are kept in 32-bit integers."""
COUNT_MAX = 2**24
"""Departures, happenings and events are remembered in memory: more than this is a mistake."""
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
    EXCLUSIVE = "exclusive"
    """As soon as the block is filled above if there is free room, else shortly before the feeding
    tier evicts it. Copies that the feeding tier has, too, make room first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePolicy:
    """When blocks are written into a tier; `hits` counts for `selective` alone."""

    kind: Annotated[WriteKind, EnumChoice(WriteKind), "write"] = WriteKind.WRITE_THROUGH
    """When blocks are copied in: see above."""
    hits: Annotated[int, Whole(minimum=1, maximum=65_535)] = 2
    """For `write = "selective"`: after how many hits a block is copied in."""

    def __post_init__(self) -> None:
        if self.kind is WriteKind.SELECTIVE and not 1 <= self.hits <= 65_535:
            raise ConfigError("hits", f"is {self.hits}, must be from 1 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """One tier: its size, what enters it and what leaves it first."""

    name: Text
    """Letters, digits, `-` and `_`; not `device`."""
    slot_count: Annotated[int, Whole(minimum=1, maximum=BLOCKS_MAX), "blocks"]
    """Slots; a tier with `gib` has that instead."""
    write: WritePolicy = field(default_factory=WritePolicy)
    """How blocks enter this tier. The device tier is filled by the engine and ignores it."""
    eviction: Annotated[
        str, String(choices=EVICTION_POLICIES, others=OTHER_POLICIES, replaced=REPLACED)
    ] = "lru"
    """Eviction policy; others can be installed."""
    low_watermark: Annotated[float, Number(minimum=0, maximum=0.99)] = 0.0
    """Share of free slots below which blocks are evicted in the background."""
    high_watermark: Annotated[float, Number(minimum=0, maximum=0.99)] = 0.0
    """Share of free slots at which that stops."""
    stored: bool = False
    """Whether a store process serves it. It copies between the hub and the tier for every rank,
    other engines may write to it, and it gives blocks up by itself. `slot_count` is then how many
    of its blocks are known at a time."""
    quotas: Annotated[Mapping[str, float], Shares()] = field(default_factory=dict)
    """Share of the slots for each tenant; `"*"`: each tenant that is not named. Tiers of shared
    stores have none.

    A tenant with neither has no limit."""

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
    block_tokens: Annotated[int, Whole(minimum=1, maximum=BLOCK_TOKENS_MAX)] = 16
    """Tokens in a block."""
    rank_count: Annotated[int, Whole(minimum=1, maximum=4_096), "ranks"] = 1
    """Ranks that each hold a part of every block."""
    group_count: Annotated[int, Whole(minimum=1, maximum=256), "groups"] = 1
    """KV groups of the model."""
    operation_timeout_s: Annotated[float, Number(minimum=0.001, maximum=86_400)] = 30.0
    """A copy without a deadline expires after this."""
    operation_blocks_max: Annotated[int, Whole(minimum=1, maximum=65_536)] = 256
    """Blocks in one copy operation; at most 1818 with a disk.

    An operation ends soon, whatever it copies."""
    stored_saves_max: int = 1024
    """How many blocks may be on their way into one stored tier; what comes meanwhile is not
    written, and counted. Four operations of the largest size keep a disk busy. Never more than a
    half of the hub: its slots are held until they are written."""
    departed_count: Annotated[int, Whole(minimum=1, maximum=COUNT_MAX)] = 65_536
    """Blocks whose reason for leaving is remembered."""
    story_count: Annotated[int, Whole(minimum=1, maximum=COUNT_MAX)] = 4_096
    """Events in the history."""
    event_count: Annotated[int, Whole(minimum=1, maximum=COUNT_MAX)] = 8_192
    """KV events kept for a reader; then the oldest are dropped.

    A reader that missed some needs a snapshot."""
    pin_share: Annotated[float, Number(minimum=0, maximum=1)] = 0.5
    """Share of a tier that pins may take.

    Beyond it, pinning is refused."""
    hint_share: Annotated[float, Number(minimum=0, maximum=1)] = 0.5
    """Share of a tier that blocks may take whose priority one tenant raised.

    Beyond it, its blocks are like any other's."""
    load_gate: Annotated[Gate, EnumChoice(Gate)] = Gate.MEASURED
    """`measured`: blocks are computed where that is quicker than loading them."""
    load_tokens_min: Annotated[int, Whole(minimum=0, maximum=COUNT_MAX)] = 0
    """Loads of fewer tokens are skipped; 0: what the engine prefills in 5 ms.

    Fewer are not worth their wait for the next step. 0 is any number while the speed of the
    engine is not known."""
    rate_age_s: Annotated[float, Number(minimum=0.001, maximum=86_400)] = 60.0
    """How long a measured rate is used after its last sample.

    Long enough for a lull between requests, short enough that a tier which was slow for a while
    is soon tried again."""
    block_bytes: int = 0
    """Bytes of a block on one rank, to give rates in bytes; 0 where they are not known."""

    def __post_init__(self) -> None:
        if self.device is None and not self.tiers:
            raise ConfigError("tiers", "is empty and no device tier is managed: nothing to keep")
        self._require_bounds()
        names = [tier.name for tier in (*filter(None, [self.device]), *self.tiers)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("name", f"{name!r} is the name of more than one tier")
        self._refuse_stored_tiers_without_hub()
        self._refuse_tiers_that_can_never_fill()

    def _require_bounds(self) -> None:
        """Those of the keys, but for upper ones: what is built in Python may be larger."""
        for setting in settings_of(CacheSettings).values():
            name, value = setting.field, getattr(self, setting.field)
            match setting.key:
                case Whole(minimum=least) if value < least:
                    raise ConfigError(name, f"is {value}, must be at least {least}")
                case Number(maximum=1) if not 0.0 <= value <= 1.0:
                    raise ConfigError(name, f"is {value}, must be from 0 to 1")
                case Number(maximum=most) if most > 1 and not value > 0:
                    raise ConfigError(name, f"is {value}, must be > 0")
        for name, least in (("stored_saves_max", 1), ("block_bytes", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, f"is {getattr(self, name)}, must be at least {least}")

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
            if tier.write.kind is WriteKind.NONE and not tier.stored:
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
