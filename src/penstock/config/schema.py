"""Which keys a configuration file may have: each with its range and the setting it becomes.

The defaults are those of the settings themselves, which are stated there and nowhere else. `toml`
reads and prints through these tables, so a new key is a field of its settings and a row here.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from penstock.cache.settings import (
    EVICTION_POLICIES,
    CacheSettings,
    Gate,
    TierSettings,
    WriteKind,
    WritePolicy,
)
from penstock.config.keys import Bytes, EnumChoice, Flag, Number, Shares, String, Whole
from penstock.config.routing import RoutingTable
from penstock.config.values import (
    AUTO,
    BLOCKS_MAX,
    LAYER_WISE,
    NIXL,
    SHARED_MEMORY,
    Config,
    EngineTable,
    HandoffTable,
    ModelSettings,
    ServeTable,
    TierKind,
)
from penstock.extensions import OTHER_POLICIES, OTHER_TRANSPORTS
from penstock.vocabulary.dtypes import DTYPE_NAMES
from penstock.vocabulary.keys import ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.config.keys import Key

VERSION = 1
TABLES = ("version", "model", "cache", "tiers", "handoff", "engine", "serve", "routing")

COUNT_MAX = 2**24
"""Departures, happenings and events are remembered in memory: more than this is a mistake."""

LOG_LEVELS = ("debug", "info", "warning", "error")

_FIELDS = {
    "blocks": "slot_count",
    "groups": "group_count",
    "kind": "name",
    "ranks": "rank_count",
    "write": "kind",
}
"""Keys whose setting has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A key of the file, and the field that it becomes."""

    key: Key
    owner: type
    """The settings that have the field."""
    field: str
    default: object
    """As the file would spell it; `None`: the key must be given."""


def _settings(owner: type, **keys: Key) -> dict[str, Setting]:
    known = {each.name: each for each in fields(owner)}
    rows = {}
    for name, key in keys.items():
        field = known[_FIELDS.get(name, name) if name not in known else name]
        default: object = None if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        default = default.value if isinstance(default, Enum) else default
        rows[name] = Setting(key=key, owner=owner, field=field.name, default=default)
    return rows


MODEL_KEYS: Mapping[str, Setting] = _settings(
    ModelSettings,
    name=String(),
    weights_version=String(),
    kv_dtype=String(choices=("", *DTYPE_NAMES)),
    kv_scales=String(),
    rotary=String(),
)

ROOM_KEYS: Mapping[str, Setting] = _settings(
    TierSettings,
    eviction=String(choices=EVICTION_POLICIES, others=OTHER_POLICIES),
    low_watermark=Number(minimum=0, maximum=0.99),
    high_watermark=Number(minimum=0, maximum=0.99),
    quotas=Shares(),
)
"""How a tier's slots are given away: in `[cache]` for the device, in `[[tiers]]` for each."""

CACHE_KEYS: Mapping[str, Setting] = {
    **_settings(CacheSettings, block_tokens=Whole(minimum=1, maximum=65_536)),
    **_settings(Config, hash=String(choices=tuple(ALGORITHMS)), salt=String()),
    **_settings(CacheSettings, ranks=Whole(minimum=1, maximum=4_096)),
    **_settings(Config, equal_ranks=Flag()),
    **_settings(
        CacheSettings,
        groups=Whole(minimum=1, maximum=256),
        operation_timeout_s=Number(minimum=0.001, maximum=86_400),
        operation_blocks_max=Whole(minimum=1, maximum=65_536),
        departed_count=Whole(minimum=1, maximum=COUNT_MAX),
        story_count=Whole(minimum=1, maximum=COUNT_MAX),
        event_count=Whole(minimum=1, maximum=COUNT_MAX),
        pin_share=Number(minimum=0, maximum=1),
        hint_share=Number(minimum=0, maximum=1),
        load_gate=EnumChoice(Gate),
        load_tokens_min=Whole(minimum=0, maximum=COUNT_MAX),
        rate_age_s=Number(minimum=0.001, maximum=86_400),
    ),
    **_settings(
        Config,
        layer_wise=String(choices=LAYER_WISE),
        device_wait_s=Number(minimum=0.001, maximum=3_600),
    ),
    # 0 stands for a device whose blocks the engine manages: then there are no `TierSettings`.
    "blocks": Setting(
        key=Whole(minimum=0, maximum=BLOCKS_MAX), owner=TierSettings, field="slot_count", default=0
    ),
    **ROOM_KEYS,
}

TIER_KEYS: Mapping[str, Setting] = {
    **_settings(TierSettings, name=String()),
    **_settings(TierKind, kind=String()),
    **_settings(TierSettings, blocks=Whole(minimum=1, maximum=BLOCKS_MAX)),
    **_settings(WritePolicy, write=EnumChoice(WriteKind)),
    **_settings(TierKind, required=Flag()),
    **_settings(WritePolicy, hits=Whole(minimum=1, maximum=65_535)),
    **ROOM_KEYS,
}

HANDOFF_KEYS: Mapping[str, Setting] = _settings(
    HandoffTable,
    transport=String(choices=(AUTO, SHARED_MEMORY, NIXL), others=OTHER_TRANSPORTS),
    handoff_s=Number(minimum=0.1, maximum=86_400),
    lease_s=Number(minimum=0.1, maximum=86_400),
    park_s=Number(minimum=0.1, maximum=86_400),
    resend_s=Number(minimum=0.01, maximum=3_600),
    resend_cap_s=Number(minimum=0.1, maximum=3_600),
    resend_limit_s=Number(minimum=0.1, maximum=3_600),
    ping_s=Number(minimum=0.1, maximum=3_600),
    suspect_s=Number(minimum=0.1, maximum=3_600),
    berth_bytes=Bytes(minimum=4_096, maximum=1 << 30),
    berth_count=Whole(minimum=0, maximum=1_024),
    landing_bytes_max=Bytes(minimum=1 << 20, maximum=1 << 44),
    retired_bytes_max=Bytes(minimum=1 << 20, maximum=1 << 44),
    peers_max=Whole(minimum=1, maximum=1_024),
    idle_s=Number(minimum=0.1, maximum=86_400),
)

ENGINE_KEYS: Mapping[str, Setting] = _settings(
    EngineTable,
    model=String(),
    role=String(choices=("both", "prefill", "decode", "router")),
    prefill_tp=Whole(minimum=0, maximum=1_024),
    decode_tp=Whole(minimum=0, maximum=1_024),
    handoff_host=String(),
    dtype=String(choices=("float32", "bfloat16", "float16")),
    device=String(),
    graphs=Flag(),
    threads=Whole(minimum=0, maximum=1_024),
    step_tokens=Whole(minimum=0, maximum=65_536),
    step_requests=Whole(minimum=1, maximum=4_096),
    waiting_max=Whole(minimum=1, maximum=COUNT_MAX),
)

_ON_ONE_MACHINE = (
    "must be left out: all ranks of an instance are on one machine, and each machine has instances "
    "of its own"
)
REMOVED_KEYS = {"engine.ranks_at": _ON_ONE_MACHINE, "engine.ranks_here": _ON_ONE_MACHINE}
"""Keys of earlier versions, with what to do instead."""

SERVE_KEYS: Mapping[str, Setting] = _settings(
    ServeTable,
    host=String(),
    port=Whole(minimum=0, maximum=65_535),
    ports=String(),
    api_key=String(),
    api_key_file=String(),
    allowed_hosts=String(),
    instances=Whole(minimum=1, maximum=16),
    prefill=Whole(minimum=0, maximum=16),
    decode=Whole(minimum=0, maximum=16),
    body_bytes_max=Bytes(minimum=1_024, maximum=1 << 30),
    requests_max=Whole(minimum=1, maximum=65_536),
    connections_max=Whole(minimum=1, maximum=65_536),
    header_s=Number(minimum=0.1, maximum=3_600),
    body_s=Number(minimum=0.1, maximum=3_600),
    drain_s=Number(minimum=0, maximum=86_400),
    silence_s=Number(minimum=1, maximum=3_600),
    when_paused=String(choices=("refuse", "wait")),
    paused_wait_s=Number(minimum=0.1, maximum=86_400),
    log_level=String(choices=LOG_LEVELS),
    log_json=Flag(),
    router=String(),
    number=Whole(minimum=0, maximum=1_023),
    keys_file=String(),
    record=String(),
    record_mib=Whole(minimum=1, maximum=1 << 20),
    tracing=Flag(),
)

ROUTING_KEYS: Mapping[str, Setting] = _settings(
    RoutingTable,
    cached_weight=Number(minimum=0, maximum=1_000_000),
    load_weight=Number(minimum=0, maximum=1_000_000),
    computing_weight=Number(minimum=0, maximum=1_000_000),
    failed_weight=Number(minimum=0, maximum=1_000_000),
    failed_s=Number(minimum=0, maximum=86_400),
    equal_blocks=Number(minimum=0, maximum=1_000_000),
    handoff_tokens_min=Whole(minimum=0, maximum=COUNT_MAX),
    attempts_max=Whole(minimum=1, maximum=16),
)

STARTER_TOML = """\
version = 1

[model]
name = "example/model"

[cache]
blocks = 1024
low_watermark = 0.05
high_watermark = 0.1

[[tiers]]
name = "host"
kind = "memory"  # To try it. To serve: "host", shared memory that a GPU copies from directly.
blocks = 8192
"""
"""A configuration to begin with: managed device blocks over one memory tier."""
