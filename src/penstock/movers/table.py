"""Which mover connects two media: a table, so that a new medium adds rows, not branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.movers.memcpy import MemcpyMover

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.movers.base import Mover
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm

MOVERS: dict[tuple[str, str], Callable[[SlotStore, SlotStore, Algorithm], Mover]] = {
    ("arrays", "arrays"): MemcpyMover,
    ("arrays", "memory"): MemcpyMover,
    ("memory", "arrays"): MemcpyMover,
    ("memory", "memory"): MemcpyMover,
    ("arrays", "host"): MemcpyMover,
    ("host", "arrays"): MemcpyMover,
    ("memory", "host"): MemcpyMover,
    ("host", "memory"): MemcpyMover,
    ("host", "host"): MemcpyMover,
}


def mover_between(source: SlotStore, target: SlotStore, algorithm: Algorithm) -> Mover:
    """The mover from one tier to another.

    Raises:
        ConfigError: nothing connects the two.
    """
    make = MOVERS.get((source.medium, target.medium))
    if make is None:
        raise ConfigError(
            "tiers", f"nothing moves blocks from {source.medium!r} to {target.medium!r}"
        )
    return make(source, target, algorithm)
