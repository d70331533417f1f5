"""`Config` → TOML: every setting with the value in effect.

A printer for our own schema, not for TOML at large: tables of strings and numbers.

The one rule that must not break: what is printed reads back as an equal `Config`, but for the
API key, which is never printed. So a setting that would be refused for having no effect (room
on a device that the engine owns, `hits` without `selective`, `blocks` beside `gib`) is left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock.cache.settings import WriteKind
from penstock.config.schema import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.settings import TierSettings
    from penstock.config.schema import Value
    from penstock.config.serving import ServeTable
    from penstock.config.values import Config, ModelSettings, TierKind


def print_toml(config: Config) -> str:
    """The text of a configuration file that says what `config` says."""
    device = config.cache.device
    parts = [
        f"version = {VERSION}\n",
        _table("[model]", _model(config.model)),
        _table("[cache]", _cache(config)),
        _quotas("[cache.quotas]", device.quotas if device else {}),
    ]
    for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True):
        parts.append(_table("[[tiers]]", _tier(tier, kind)))
        parts.append(_quotas("[tiers.quotas]", tier.quotas))
    if config.engine is not None:
        parts.append(_table("[engine]", asdict(config.engine)))
    if config.serve is not None:
        parts.append(_table("[serve]", _serve(config.serve)))
    return "\n".join(part for part in parts if part)


def _model(model: ModelSettings) -> dict[str, Value]:
    return {
        "name": model.name,
        "weights_version": model.weights_version,
        "kv_dtype": model.kv_dtype,
        "kv_scales": model.kv_scales,
        "rotary": model.rotary,
    }


def _serve(serve: ServeTable) -> dict[str, Value]:
    """What is printed ends in terminals, logs and reports of problems, where no key belongs."""
    values = asdict(serve)
    if serve.api_key:
        del values["api_key"]
    return values


def _cache(config: Config) -> dict[str, Value]:
    cache = config.cache
    values: dict[str, Value] = {
        "block_tokens": cache.block_tokens,
        "hash": config.hash,
        "ranks": cache.rank_count,
        "equal_ranks": config.equal_ranks,
        "groups": cache.group_count,
        "operation_timeout_s": cache.operation_timeout_s,
        "operation_blocks_max": cache.operation_blocks_max,
        "departed_count": cache.departed_count,
        "story_count": cache.story_count,
        "event_count": cache.event_count,
        "pin_share": cache.pin_share,
        "load_gate": cache.load_gate.value,
        "load_tokens_min": cache.load_tokens_min,
        "rate_age_s": cache.rate_age_s,
        "layer_wise": config.layer_wise,
        "device_wait_s": config.device_wait_s,
        "blocks": 0,
    }
    if cache.device is not None:
        values |= {"blocks": cache.device.slot_count, **_room(cache.device)}
    return values


def _tier(tier: TierSettings, kind: TierKind) -> dict[str, Value]:
    values: dict[str, Value] = {
        "name": tier.name,
        "kind": kind.name,
        "blocks": tier.slot_count,
        "write": tier.write.kind.value,
        "required": kind.required,
    }
    if kind.gib:
        del values["blocks"]
    if tier.write.kind is WriteKind.SELECTIVE:
        values["hits"] = tier.write.hits
    return {**values, **_room(tier), **kind.options}


def _room(tier: TierSettings) -> dict[str, Value]:
    return {
        "eviction": tier.eviction,
        "low_watermark": tier.low_watermark,
        "high_watermark": tier.high_watermark,
    }


def _quotas(heading: str, quotas: Mapping[str, float]) -> str:
    return _table(heading, quotas) if quotas else ""


def _table(heading: str, values: Mapping[str, Value]) -> str:
    lines = [f"{_name(name)} = {_value(value)}\n" for name, value in values.items()]
    return f"{heading}\n{''.join(lines)}"


def _name(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _string(value) if isinstance(value, str) else repr(value)


def _string(text: str) -> str:
    # JSON escapes a string as TOML does, but for DEL, which TOML wants escaped as well.
    # Characters beyond ASCII stay themselves: TOML has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
