"""What kind of world a seed is: the cache's settings, the engine's habits, the faults.

Everything is drawn from the seed, the rates of faults too: a fixed mix would leave corners
of the state space unseen, such as many resets without any slow rank.

The one rule that must not break: a world with `plenty` has no faults, because there the
cache must find exactly what a simple model says it knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from penstock.cache.settings import (
    EVICTION_POLICIES,
    CacheSettings,
    Gate,
    TierSettings,
    WriteKind,
    WritePolicy,
)

TENANTS = ("", "a", "b")
TIER_NAMES = ("host", "disk", "shared")

_STORE_DRAWS = 0x70E5
_MEMORY_DRAWS = 0x3C_91_5B_E7_08_D2_46_AF
_WEIGHTS_DRAWS = 0x9A_17_C4_62_EB_30_5D_81
"""Whether tiers are stored is drawn apart: worlds of old seeds without them stay what they were."""

AMPLE_SLOTS = 96
"""More than all blocks that one world ever computes."""


class Plenty(Enum):
    """Where a healthy world has more room than it needs, so that nothing is ever forgotten."""

    NOWHERE = "nowhere"
    """An ordinary world: small tiers, and whatever faults were drawn."""
    DEVICE = "device"
    """On the device: nothing has to leave it."""
    HUB = "hub"
    """In the hub, written through: what leaves the small device lies there."""
    BOTTOM = "bottom"
    """Below a small hub. Copies are quick there: they end before the engine's next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConditions:
    """What the store processes of one world are like, and their disks."""

    segment_count: int
    segment_places: int
    pace_s: float
    """A step of a job takes up to this."""
    delay_s: float
    """A message to the driver takes up to this."""
    hang: float
    """A job, or its answer, takes longer than its deadline may allow."""
    repeat: float
    """An answer comes twice."""
    unreadable: float
    death: float
    """Per step of the engine: a process dies."""
    power: float
    """A death is one by loss of power."""
    full: float
    """Per step of the engine: a disk is full for a while."""
    neighbour: float
    """Per step of the engine: another one reads from a store, or writes to it."""
    late_s: float = 0.0
    """How long after its engine the process is started for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """All parameters of one world. Rates are probabilities, times are seconds."""

    settings: CacheSettings
    plenty: Plenty
    event_budget: int
    """After so many events the engine stops and the world drains."""
    watchful: bool
    """Whether what the cache refuses is checked to have changed nothing; costs time."""
    warm: bool
    """Whether the tiers hold blocks of an earlier life when the world begins."""
    recovery: bool
    """Whether the world ends with a request that must hit what it just computed."""

    # The engine's habits.
    requests_max: int
    """Requests that are open at the same time."""
    blocks_max: int
    """Length of a text."""
    alphabet: int
    """How many different tokens there are: few make texts meet."""
    engine_slots: int
    """Device slots per KV group of an engine that manages them itself."""
    step_s: float
    """Mean time between two steps of the engine."""
    timers: bool
    """Whether deadlines are met to the second, or only when the engine ticks."""
    abort: float
    preempt: float
    fork: float
    opt_out: float
    hint: float
    """A request has a priority or a time to live."""
    haste: float
    """A request has a deadline of its own, and a short one."""
    pin: float
    prefetch: float
    cancel: float
    discover: float
    tell_speed: float
    """The engine tells how long it computed."""
    tokens_per_s: float
    """How fast it computes; a copy of a few blocks takes some tenths of a second."""

    # What the ranks are like.
    pace_s: tuple[float, ...]
    """For each rank, the mean time from one stage of a copy to the next."""
    fail: float
    unreadable: float
    hang: float
    duplicate: float

    # What befalls the world, per step of the engine.
    stray: float
    """A report arrives that belongs to no operation of this life."""
    rot: float
    """Bytes of a lower tier change."""
    death: float
    tier_trouble: float
    reset: float
    misuse: float
    """The engine sends an event that makes no sense."""
    store: StoreConditions | None = None
    """Where some tiers are stored."""
    sleep: float = 0.0
    """The device's memory is given back, if nobody uses it."""
    weights: float = 0.0
    """The model gets other weights, or those that it had before."""

    @property
    def managed(self) -> bool:
        """Whether Penstock manages the device slots."""
        return self.settings.device is not None

    @property
    def healthy(self) -> bool:
        """Whether nothing goes wrong in this world."""
        return self.plenty is not Plenty.NOWHERE


def draw_conditions(rng: Random) -> Conditions:
    """The conditions of one seed."""
    own = branch(rng).getrandbits(64)
    drawn = Random(own ^ _STORE_DRAWS)
    conditions = _draw_memory(Random(own ^ _MEMORY_DRAWS), _draw_without_stores(rng))
    conditions = _draw_weights(Random(own ^ _WEIGHTS_DRAWS), conditions)
    if conditions.healthy or len(conditions.settings.tiers) < 2 or drawn.random() < 0.5:
        return conditions
    settings = _with_stored_tiers(drawn, conditions.settings)
    # Ranks that die and resets that come while a store is at work: rare, if each is drawn alone.
    return replace(
        conditions,
        settings=settings,
        store=_draw_store(drawn, settings),
        death=max(conditions.death, drawn.choice((0.0, 0.0, 0.06))),
        reset=max(conditions.reset, drawn.choice((0.0, 0.0, 0.06))),
    )


def _draw_memory(rng: Random, conditions: Conditions) -> Conditions:
    """The same conditions, where the device may be given back."""
    if conditions.healthy or rng.random() < 0.6:
        return conditions
    return replace(conditions, sleep=rng.choice((0.0, 0.2)))


def _draw_weights(rng: Random, conditions: Conditions) -> Conditions:
    """The same conditions, where Penstock makes the keys and the weights may change."""
    if conditions.healthy or not conditions.managed or rng.random() < 0.8:
        return conditions
    return replace(conditions, weights=rng.choice((0.02, 0.06)))


def _draw_without_stores(rng: Random) -> Conditions:
    managed = rng.random() < 0.7
    plenty = Plenty.NOWHERE
    if rng.random() < 0.2:
        plenty = rng.choice(
            (Plenty.DEVICE, Plenty.HUB, Plenty.BOTTOM) if managed else (Plenty.HUB,)
        )
    healthy = plenty is not Plenty.NOWHERE
    blocks_max = rng.randint(3, 7)
    settings = _draw_settings(rng, plenty, managed=managed, blocks_max=blocks_max)
    gate = branch(rng)
    gated = not healthy and gate.random() < 0.35
    if gated:
        settings = _with_gate(gate, settings)

    def fault(chance: float, most: float) -> float:
        drawn = rng.uniform(0.0, most) if rng.random() < chance else 0.0
        return 0.0 if healthy else drawn

    def habit(chance: float, most: float) -> float:
        return rng.uniform(0.0, most) if rng.random() < chance else 0.0

    return Conditions(
        settings=settings,
        plenty=plenty,
        event_budget=rng.randint(46, 72),
        watchful=rng.random() < 0.15,
        warm=rng.random() < 0.65,
        recovery=rng.random() < 0.4,
        requests_max=rng.randint(1, 5),
        blocks_max=blocks_max,
        alphabet=rng.choice((1, 2, 3, 50, 50)),
        engine_slots=rng.randint(blocks_max, 3 * blocks_max),
        step_s=rng.choice((0.02, 0.1, 0.3)),
        timers=rng.random() < 0.6,
        abort=habit(0.6, 0.2),
        preempt=habit(0.5, 0.2),
        fork=habit(0.5, 0.3),
        opt_out=habit(0.3, 0.4),
        hint=habit(0.4, 0.5),
        haste=fault(0.3, 0.5),
        pin=habit(0.3, 0.15),
        prefetch=habit(0.5, 0.7),
        cancel=fault(0.4, 0.15),
        discover=habit(0.3, 0.08),
        tell_speed=gate.choice((0.0, 0.1, 0.4)) if gated else 0.0,
        tokens_per_s=gate.choice((3.0, 30.0, 300.0)),
        pace_s=_draw_paces(rng, settings, healthy=healthy),
        fail=fault(0.4, 0.3),
        unreadable=fault(0.4, 0.3),
        hang=fault(0.4, 0.3),
        duplicate=fault(0.4, 0.4),
        stray=fault(0.3, 0.06),
        rot=fault(0.4, 0.3),
        death=fault(0.3, 0.04),
        tier_trouble=fault(0.35, 0.06),
        reset=fault(0.3, 0.05),
        misuse=fault(0.25, 0.05),
    )


def branch(rng: Random) -> Random:
    """Draws of its own from here on: worlds of old seeds stay what they were without them."""
    drawn = Random()
    drawn.setstate(rng.getstate())
    drawn.random()
    return drawn


def _with_gate(rng: Random, settings: CacheSettings) -> CacheSettings:
    return replace(
        settings,
        load_gate=rng.choice((Gate.MEASURED, Gate.MEASURED, Gate.MEASURED, Gate.OFF)),
        load_tokens_min=rng.choice((0, 0, 1, 3, 6)),
        rate_age_s=rng.choice((0.5, 60.0)),
    )


def _with_stored_tiers(rng: Random, settings: CacheSettings) -> CacheSettings:
    """The last tier is stored, and sometimes the one before it."""
    first = 2 if len(settings.tiers) > 2 and rng.random() < 0.7 else 1
    return replace(
        settings,
        tiers=tuple(
            replace(tier, stored=index >= first) for index, tier in enumerate(settings.tiers)
        ),
        stored_saves_max=rng.choice((1, 2, 1024)),
    )


def without_stores(conditions: Conditions) -> Conditions:
    """The same conditions where every tier is memory of the ranks."""
    tiers = tuple(replace(tier, stored=False) for tier in conditions.settings.tiers)
    return replace(conditions, settings=replace(conditions.settings, tiers=tiers), store=None)


def _draw_store(rng: Random, settings: CacheSettings) -> StoreConditions:
    def fault(chance: float, most: float) -> float:
        return rng.uniform(0.0, most) if rng.random() < chance else 0.0

    timeout_s = settings.operation_timeout_s
    return StoreConditions(
        segment_count=rng.randint(2, 5),
        segment_places=rng.randint(1, 4),
        pace_s=timeout_s * rng.choice((0.005, 0.02, 0.1)),
        delay_s=timeout_s * rng.choice((0.005, 0.05)),
        hang=fault(0.5, 0.4),
        repeat=fault(0.4, 0.4),
        unreadable=fault(0.3, 0.2),
        death=fault(0.6, 0.12),
        power=rng.choice((0.0, 0.0, 0.5)),
        full=fault(0.4, 0.2),
        neighbour=fault(0.6, 0.3),
    )


def _draw_paces(rng: Random, settings: CacheSettings, *, healthy: bool) -> tuple[float, ...]:
    """A healthy rank is far from any deadline; another may be ten times slower than its peers."""
    slowest = settings.operation_timeout_s / 40
    paces = []
    for _ in range(settings.rank_count):
        slow = not healthy and rng.random() < 0.15
        paces.append(rng.choice((0.2, 1.0)) * slowest * (10 if slow else 1))
    return tuple(paces)


def _draw_settings(rng: Random, plenty: Plenty, *, managed: bool, blocks_max: int) -> CacheSettings:
    tier_count = _draw_tier_count(rng, plenty, managed=managed)
    tiers = tuple(
        _draw_tier(rng, name, plenty, managed=managed, blocks_max=blocks_max)
        for name in TIER_NAMES[:tier_count]
    )
    device = None
    if managed:
        feeds = bool(tiers) and tiers[0].write.kind is WriteKind.WRITE_BACK
        slots = AMPLE_SLOTS if plenty is Plenty.DEVICE else rng.randint(blocks_max, blocks_max + 6)
        low, high = _draw_watermarks(rng, slots, needed=feeds)
        device = TierSettings(
            name="device",
            slot_count=slots,
            eviction=rng.choice(EVICTION_POLICIES),
            low_watermark=low,
            high_watermark=high,
            quotas=_draw_quotas(rng, plenty),
        )
    return CacheSettings(
        device=device,
        tiers=tiers,
        block_tokens=rng.choice((1, 2, 2, 3, 4)),
        rank_count=rng.choice((1, 1, 2, 2, 3)),
        group_count=rng.choice((1, 1, 2)),
        operation_blocks_max=rng.choice((1, 2, 3, 256)),
        operation_timeout_s=rng.choice((1.0, 4.0)),
        departed_count=rng.choice((4, 1000)),
        event_count=rng.choice((2, 1000, 1000)),
        pin_share=(share := rng.choice((0.2, 0.5))),
        hint_share=share,
    )


def _draw_tier_count(rng: Random, plenty: Plenty, *, managed: bool) -> int:
    if plenty is Plenty.BOTTOM:
        return 2
    if plenty is Plenty.HUB or not managed:
        return rng.choice((1, 2, 3))
    return rng.choice((0, 1, 1, 2, 2, 2, 2, 3, 3))


def _draw_tier(
    rng: Random, name: str, plenty: Plenty, *, managed: bool, blocks_max: int
) -> TierSettings:
    hub = name == TIER_NAMES[0]
    slots = rng.randint(5, 16)
    policies = [WriteKind.WRITE_THROUGH, WriteKind.SELECTIVE, *[WriteKind.EXCLUSIVE] * 2]
    if managed or not hub:
        policies += [WriteKind.WRITE_BACK, WriteKind.WRITE_BACK]
    if plenty is Plenty.HUB and hub:
        slots, policies = AMPLE_SLOTS, [WriteKind.WRITE_THROUGH]
    elif plenty is Plenty.BOTTOM:
        # The hub must have room for a whole text and for the block before a part of it.
        slots = blocks_max + 3 if hub else AMPLE_SLOTS
        policies = [WriteKind.WRITE_THROUGH]
    # The hub feeds whatever lies below it, and one of those may be written back.
    low, high = _draw_watermarks(rng, slots, needed=hub)
    return TierSettings(
        name=name,
        slot_count=slots,
        write=WritePolicy(kind=rng.choice(policies), hits=rng.randint(1, 3)),
        eviction=rng.choice(EVICTION_POLICIES),
        low_watermark=low,
        high_watermark=high,
        quotas=_draw_quotas(rng, plenty),
    )


def _draw_watermarks(rng: Random, slots: int, *, needed: bool) -> tuple[float, float]:
    if not needed and rng.random() < 0.5:
        return 0.0, 0.0
    low = (1 + rng.randint(0, slots // 3)) / slots + 1e-6
    return low, min(low + rng.choice((0.0, 0.1, 0.3)), 0.9)


def _draw_quotas(rng: Random, plenty: Plenty) -> dict[str, float]:
    if plenty is not Plenty.NOWHERE or rng.random() < 0.6:
        return {}
    return rng.choice(({"a": 0.5}, {"*": 0.4}, {"a": 0.2, "*": 0.7}, {"b": 0.0}))
