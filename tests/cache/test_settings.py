"""Settings that make sense are accepted; others are refused with a message that says why."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cache.eviction import POLICIES
from penstock.cache.settings import (
    EVICTION_POLICIES,
    CacheSettings,
    TierSettings,
    WriteKind,
    WritePolicy,
)
from penstock.errors import ConfigError


def tier(name: str, write: WriteKind = WriteKind.WRITE_THROUGH, **settings: Any) -> TierSettings:
    settings.setdefault("slot_count", 8)
    return TierSettings(name=name, write=WritePolicy(kind=write), **settings)


DEVICE = tier("device")
LOW: dict[str, Any] = {"low_watermark": 0.25, "high_watermark": 0.5}


def test_a_device_alone_is_a_cache() -> None:
    settings = CacheSettings(device=DEVICE)

    assert settings.tiers == ()


def test_any_number_of_tiers_can_lie_below_the_device() -> None:
    lower = tuple(tier(f"tier-{number}") for number in range(5))

    settings = CacheSettings(device=DEVICE, tiers=lower)

    assert settings.tiers == lower


def test_an_engine_can_manage_its_own_device() -> None:
    settings = CacheSettings(device=None, tiers=(tier("host"),))

    assert settings.device is None


def test_watermarks_are_shares_of_the_slots() -> None:
    settings = tier("host", slot_count=10, low_watermark=0.25, high_watermark=0.5)

    assert (settings.low_slots, settings.high_slots) == (2, 5)


def test_every_named_eviction_policy_exists() -> None:
    assert set(EVICTION_POLICIES) == set(POLICIES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": ""}, "name: is ''"),
        ({"name": "a/b"}, "name: is 'a/b', must be letters, digits"),
        ({"slot_count": 0}, "slot_count: is 0: the tier could never hold a block"),
        ({"slot_count": -3}, "slot_count: is -3"),
        ({"eviction": "fifo"}, "eviction: is 'fifo', must be one of lru, adaptive"),
        ({"eviction": "s3fifo"}, "is 's3fifo', must be 'adaptive', which took its place"),
        ({"low_watermark": -0.1}, "low_watermark: is -0.1"),
        ({"low_watermark": 0.5, "high_watermark": 0.4}, "low_watermark <= high_watermark"),
        ({"high_watermark": 1.0}, "high_watermark 1.0"),
        ({"quotas": {"ann": 1.5}}, r"quotas.ann: is 1.5, must be from 0 to 1"),
        ({"quotas": {"ann": -0.5}}, r"quotas.ann: is -0.5"),
    ],
)
def test_a_tier_that_makes_no_sense_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TierSettings(**{"name": "host", "slot_count": 8, **settings})


@pytest.mark.parametrize("hits", [0, -1, 65_536])
def test_selective_writing_needs_a_number_of_hits_that_can_be_counted(hits: int) -> None:
    with pytest.raises(ConfigError, match=f"hits: is {hits}, must be from 1 to 65535"):
        WritePolicy(kind=WriteKind.SELECTIVE, hits=hits)


def test_the_number_of_hits_does_not_matter_to_other_write_policies() -> None:
    policy = WritePolicy(kind=WriteKind.WRITE_THROUGH, hits=0)

    assert policy.kind is WriteKind.WRITE_THROUGH


@pytest.mark.parametrize(
    "field",
    [
        "block_tokens",
        "rank_count",
        "group_count",
        "operation_blocks_max",
        "departed_count",
        "story_count",
        "event_count",
    ],
)
def test_a_number_that_must_be_positive_is_refused_when_it_is_not(field: str) -> None:
    settings: dict[str, Any] = {"device": DEVICE, field: 0}

    with pytest.raises(ConfigError, match=f"{field}: is 0, must be at least 1") as refused:
        CacheSettings(**settings)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"operation_timeout_s": 0.0}, "operation_timeout_s: is 0.0, must be > 0"),
        ({"operation_timeout_s": float("nan")}, "operation_timeout_s: is nan"),
        ({"pin_share": 1.1}, "pin_share: is 1.1, must be from 0 to 1"),
        ({"pin_share": -0.1}, "pin_share: is -0.1"),
        ({"tiers": (tier("device"),)}, "'device' is the name of more than one tier"),
        ({"tiers": (tier("a"), tier("a"))}, "'a' is the name of more than one tier"),
        ({"device": None}, "tiers: is empty and no device tier is managed"),
    ],
)
def test_a_cache_that_makes_no_sense_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CacheSettings(**({"device": DEVICE} | settings))


# -------------------------------------------------------------------- tiers that can never fill


def test_a_tier_that_nothing_is_written_into_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'host': write: is 'none'.*it can never fill"):
        CacheSettings(device=DEVICE, tiers=(tier("host", WriteKind.NONE),))


def test_a_tier_below_the_hub_that_nothing_is_written_into_is_refused() -> None:
    with pytest.raises(ConfigError, match="'disk': write: is 'none'"):
        CacheSettings(device=DEVICE, tiers=(tier("host"), tier("disk", WriteKind.NONE)))


def test_write_back_is_refused_where_the_engine_evicts_its_own_blocks() -> None:
    with pytest.raises(ConfigError, match="the engine evicts its own device blocks"):
        CacheSettings(device=None, tiers=(tier("host", WriteKind.WRITE_BACK),))


def test_write_back_is_refused_when_the_feeding_tier_has_no_low_watermark() -> None:
    with pytest.raises(ConfigError, match=r"low_watermark of tier 'device' is 0.0.*never fill"):
        CacheSettings(device=DEVICE, tiers=(tier("host", WriteKind.WRITE_BACK),))


def test_write_back_is_refused_when_the_low_watermark_is_less_than_one_slot() -> None:
    device = tier("device", low_watermark=0.1, high_watermark=0.1)

    with pytest.raises(ConfigError, match=r"0.1 of 8 slots, less than one slot"):
        CacheSettings(device=device, tiers=(tier("host", WriteKind.WRITE_BACK),))


def test_write_back_below_the_hub_looks_at_the_watermark_of_the_hub() -> None:
    device, disk = tier("device", **LOW), tier("disk", WriteKind.WRITE_BACK)

    with pytest.raises(ConfigError, match="low_watermark of tier 'host'"):
        CacheSettings(device=device, tiers=(tier("host"), disk))


def test_write_back_is_accepted_with_a_low_watermark() -> None:
    host = tier("host", WriteKind.WRITE_BACK, **LOW)
    disk = tier("disk", WriteKind.WRITE_BACK)

    settings = CacheSettings(device=tier("device", **LOW), tiers=(host, disk))

    assert settings.tiers == (host, disk)


def test_several_tiers_can_wait_for_the_same_write_back() -> None:
    lower = (tier("disk", WriteKind.WRITE_BACK), tier("shared", WriteKind.WRITE_BACK))

    settings = CacheSettings(device=DEVICE, tiers=(tier("host", **LOW), *lower))

    assert settings.tiers[1:] == lower


def test_quotas_that_give_nobody_a_slot_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="less than one of 8 slots for every tenant, so it can never fill"
    ):
        CacheSettings(device=DEVICE, tiers=(tier("host", quotas={"*": 0.0}),))


def test_quotas_that_round_to_no_slot_for_anybody_are_refused() -> None:
    with pytest.raises(ConfigError, match="less than one of 8 slots for every tenant"):
        CacheSettings(device=DEVICE, tiers=(tier("host", quotas={"*": 0.1}),))


@pytest.mark.parametrize("quotas", [{"ann": 0.0}, {"*": 0.0, "ann": 0.5}, {"*": 0.5}])
def test_quotas_that_give_somebody_a_slot_are_accepted(quotas: dict[str, float]) -> None:
    settings = CacheSettings(device=DEVICE, tiers=(tier("host", quotas=quotas),))

    assert settings.tiers[0].quotas == quotas


def test_a_stored_tier_needs_a_hub_of_memory_above_it() -> None:
    host = TierSettings(name="host", slot_count=8)
    disk = TierSettings(name="disk", slot_count=8, stored=True)

    CacheSettings(device=None, tiers=(host, disk))
    with pytest.raises(ConfigError, match="tier 'disk': stored: is true, but it is the first tier"):
        CacheSettings(device=None, tiers=(disk,))
    with pytest.raises(ConfigError, match="tier 'disk': stored: is true, but it is the device"):
        CacheSettings(device=disk, tiers=(host,))


def test_some_blocks_may_be_on_their_way_into_a_stored_tier() -> None:
    with pytest.raises(ConfigError, match="stored_saves_max: is 0, must be at least 1"):
        CacheSettings(
            device=None, tiers=(TierSettings(name="a", slot_count=1),), stored_saves_max=0
        )
