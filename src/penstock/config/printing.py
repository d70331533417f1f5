"""`Config` → TOML: every setting with the value in effect.

A printer for our own schema, not for TOML at large: tables of strings and numbers.

The one rule that must not break: what is printed reads back as an equal `Config`, but for the
API key, which is never printed. So a setting that would be refused for having no effect (room
on a device that the engine owns, `hits` without `selective`, `blocks` beside `gib`) is left out.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import TYPE_CHECKING

from penstock.cache.settings import WriteKind
from penstock.config.keys import Shares
from penstock.config.schema import (
    CACHE_KEYS,
    ENGINE_KEYS,
    HANDOFF_KEYS,
    MODEL_KEYS,
    SERVE_KEYS,
    TIER_KEYS,
    VERSION,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.cache.settings import TierSettings
    from penstock.config.keys import Value
    from penstock.config.schema import Setting
    from penstock.config.serving import ServeTable
    from penstock.config.values import Config, TierKind


def print_toml(config: Config) -> str:
    """The text of a configuration file that says what `config` says."""
    device = config.cache.device
    parts = [
        f"version = {VERSION}\n",
        _table("[model]", _values(MODEL_KEYS, config.model)),
        _table("[cache]", _cache(config)),
        _quotas("[cache.quotas]", device.quotas if device else {}),
    ]
    for tier, kind in zip(config.cache.tiers, config.tier_kinds, strict=True):
        parts.append(_table("[[tiers]]", _tier(tier, kind)))
        parts.append(_quotas("[tiers.quotas]", tier.quotas))
    if config.handoff is not None:
        parts.append(_table("[handoff]", _values(HANDOFF_KEYS, config.handoff)))
    if config.engine is not None:
        parts.append(_table("[engine]", _values(ENGINE_KEYS, config.engine)))
    if config.serve is not None:
        parts.append(_table("[serve]", _serve(config.serve)))
    return "\n".join(part for part in parts if part)


def _values(keys: Mapping[str, Setting], *owners: object) -> dict[str, Value]:
    """The values of those keys whose settings are given; quotas have a table of their own."""
    of_type = {type(owner): owner for owner in owners}
    found = {}
    for name, setting in keys.items():
        if setting.owner in of_type and not isinstance(setting.key, Shares):
            value = getattr(of_type[setting.owner], setting.field)
            found[name] = value.value if isinstance(value, Enum) else value
    return found


def _serve(serve: ServeTable) -> dict[str, Value]:
    """Printed text ends up in terminals, logs and bug reports, where no key belongs."""
    values = _values(SERVE_KEYS, serve)
    if serve.api_key:
        del values["api_key"]
    return values


def _cache(config: Config) -> dict[str, Value]:
    if config.cache.device is None:
        return {**_values(CACHE_KEYS, config, config.cache), "blocks": 0}
    return _values(CACHE_KEYS, config, config.cache, config.cache.device)


def _tier(tier: TierSettings, kind: TierKind) -> dict[str, Value]:
    values = _values(TIER_KEYS, tier, kind, tier.write)
    if kind.gib:
        del values["blocks"]
    if tier.write.kind is not WriteKind.SELECTIVE:
        del values["hits"]
    return {**values, **kind.options}


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
