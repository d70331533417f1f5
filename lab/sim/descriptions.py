"""Events, effects and conditions in words short enough for one line each.

Keys are shown by their first four hexadecimal digits, operations by epoch and sequence, and
fields that are empty or have their default value not at all.
"""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec

    from lab.sim.conditions import Conditions


def describe(value: msgspec.Struct) -> str:
    """An event or an effect as one line."""
    names = value.__struct_fields__
    defaults = dict(zip(reversed(names), reversed(value.__struct_defaults__), strict=False))
    parts = []
    for name in names:
        content = getattr(value, name)
        if not _empty(content) and not (name in defaults and _same(content, defaults[name])):
            parts.append(f"{name}={_short(content)}")
    return f"{type(value).__name__} {' '.join(parts)}".rstrip()


def describe_conditions(conditions: Conditions) -> Iterator[str]:
    """A world's parameters, as lines."""
    settings = conditions.settings
    yield (
        f"plenty={conditions.plenty.value} ranks={settings.rank_count} "
        f"groups={settings.group_count} block_tokens={settings.block_tokens} "
        f"operation_blocks_max={settings.operation_blocks_max} "
        f"operation_timeout_s={settings.operation_timeout_s}"
    )
    if settings.device is None:
        yield f"device: {conditions.engine_slots} slots a group, managed by the engine"
    for tier in (*filter(None, [settings.device]), *settings.tiers):
        yield (
            f"{tier.name}: {tier.slot_count} slots, {tier.eviction}, "
            f"{tier.write.kind.value}({tier.write.hits}), free from {tier.low_slots} to "
            f"{tier.high_slots}, quotas {dict(tier.quotas)}"
        )
    drawn = {field.name: getattr(conditions, field.name) for field in fields(conditions)}
    rates = {name: value for name, value in drawn.items() if isinstance(value, float) and value}
    yield "rates: " + " ".join(f"{name}={value:.3f}" for name, value in rates.items())


def _empty(content: object) -> bool:
    return isinstance(content, str | list | tuple) and not content


def _same(content: object, default: object) -> bool:
    return type(content) is type(default) and content == default


def _short(content: object) -> str:
    if isinstance(content, OperationId):
        return f"{content.epoch}.{content.sequence}"
    if isinstance(content, bytes):
        return content.hex()[:4] or "-"
    if isinstance(content, float):
        return f"{content:.3f}"
    if isinstance(content, Enum):
        return content.name.lower()
    if isinstance(content, np.ndarray):
        return str(content.tolist()).replace(" ", "")
    if isinstance(content, list | tuple):
        return f"[{','.join(map(_short, content))}]"
    return str(content)
