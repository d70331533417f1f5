"""The tiers below the device, built as the configuration says.

A new kind of tier adds a row to `BUILDERS`. The one rule: a refusal names the setting as the
file spells it, such as `tiers[0].gib`, whichever layer found the fault.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from penstock.config.schema import BLOCKS_MAX
from penstock.errors import ConfigError
from penstock.tiers.host import HostTier, slots_within, tier_bytes
from penstock.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.settings import CacheSettings, TierSettings
    from penstock.config import Config, TierKind
    from penstock.tiers.arena import Kernel
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.layout import Layout

logger = logging.getLogger(__name__)

GIB = 1 << 30


def build_lower_tiers(
    config: Config, layout: Layout, *, kernel: Kernel | None = None
) -> tuple[CacheSettings, list[SlotStore]]:
    """Makes the tiers below a device with this layout, on the machine that `kernel` speaks for.

    Returns:
        The settings of the cache, in which every tier knows its slots, and the tiers.

    Raises:
        ConfigError: a tier does not fit the blocks or the machine.
        UnavailableError: the machine does not give a tier the memory it needs.
    """
    orders = [
        _sized(_Order(f"tiers[{index}]", tier, kind, layout, kernel))
        for index, (tier, kind) in enumerate(
            zip(config.cache.tiers, config.tier_kinds, strict=True)
        )
    ]
    # Built anew, so that what depends on the number of slots is checked once more.
    settings = replace(config.cache, tiers=tuple(order.tier for order in orders))
    return settings, [BUILDERS[order.kind.name](order) for order in orders]


class _Order(NamedTuple):
    """A tier that is to be made."""

    place: str
    """Its table in the file."""
    tier: TierSettings
    kind: TierKind
    layout: Layout
    kernel: Kernel | None


def _sized(order: _Order) -> _Order:
    """The same order, with the slots that its GiB come to."""
    size_gib = order.kind.gib
    if not size_gib:
        return order
    slots = slots_within(order.layout, int(size_gib * GIB))
    if slots < 1:
        raise ConfigError(
            f"{order.place}.gib",
            f"is {size_gib}, must have room for one block, which takes "
            f"{tier_bytes(order.layout, 1)} bytes with its sums",
        )
    if slots > BLOCKS_MAX:
        raise ConfigError(
            f"{order.place}.gib",
            f"is {size_gib}, must have room for at most {BLOCKS_MAX} blocks; it has for {slots}",
        )
    return order._replace(tier=replace(order.tier, slot_count=slots))


def _memory(order: _Order) -> SlotStore:
    return MemoryTier(order.layout, order.tier.slot_count)


def _host(order: _Order) -> SlotStore:
    options = order.kind.options
    node = options["numa_node"]
    try:
        tier = HostTier.create(
            order.layout,
            order.tier.slot_count,
            name=order.tier.name,
            huge_pages=options["huge_pages"] == "auto",
            numa_node=None if node == -1 else int(node),
            kernel=order.kernel,
        )
    except ConfigError as error:
        raise _spelled_as_in_the_file(error, order) from error
    arena = tier.arena
    logger.info(
        "host tier ready: name=%s blocks=%d gib=%.2f pages=%s numa_node=%s ready_s=%.2f "
        "fallbacks=%s",
        order.tier.name,
        tier.slot_count,
        arena.size / GIB,
        arena.pages.value,
        "any" if arena.numa_node is None else arena.numa_node,
        arena.ready_s,
        "; ".join(arena.fallbacks) or "none",
    )
    return tier


def _spelled_as_in_the_file(error: ConfigError, order: _Order) -> ConfigError:
    if error.field != "size":
        return ConfigError(f"{order.place}.{error.field}", error.problem)
    if order.kind.gib:
        return ConfigError(f"{order.place}.gib", f"is {order.kind.gib}, {error.problem}")
    blocks = order.tier.slot_count
    return ConfigError(f"{order.place}.blocks", f"is {blocks}, {error.problem}")


BUILDERS: dict[str, Callable[[_Order], SlotStore]] = {"memory": _memory, "host": _host}
"""How a tier of each kind is made."""
