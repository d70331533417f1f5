"""Prefixes that an operator pinned in one instance, each with a name and for a limited time.

    pins.pin("museum", tokens, tenant="", seconds=3600, now=now)
    pins.expire(now)                    # at `next_deadline`, or later

Pins are held by name, so that a server that comes back can renew or end them.

The one rule: every pin ends, by its name or by its time; whoever set it may be gone by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import CapacityError, UnavailableError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock import Cache, Pin

PINS_MAX = 64
"""Names in use at a time; how many blocks they hold together is bounded by `pin_share`."""


class PinnedBlocks(NamedTuple):
    """What came of a wish to pin a prefix."""

    problem: str
    """Why it was not pinned; empty if it was."""
    blocks: int = 0
    present: int = 0
    """How many of them are cached now."""


class _NamedPin(NamedTuple):
    pin: Pin
    deadline: float


class NamedPins:
    """The pins of one instance."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._pins: dict[str, _NamedPin] = {}

    @property
    def next_deadline(self) -> float:
        """When the next one ends."""
        return min((each.deadline for each in self._pins.values()), default=math.inf)

    def pin(
        self, name: str, tokens: Sequence[int], *, tenant: str, seconds: float, now: float
    ) -> PinnedBlocks:
        """Pins a prefix, or pins it anew under its old name: for a longer time, or another one."""
        if name not in self._pins and len(self._pins) >= PINS_MAX:
            return PinnedBlocks(f"name: {PINS_MAX} prefixes are pinned, at most that many may be")
        try:
            # First the new one: whatever both have in common stays pinned, and counts once.
            pin = self._cache.pin(tokens, tenant=tenant)
        except CapacityError as error:
            return PinnedBlocks(f"prompt: {error}; pin_share bounds what may be pinned")
        except UnavailableError as error:
            return PinnedBlocks(str(error))
        self._end(name)
        self._pins[name] = _NamedPin(pin, now + seconds)
        return PinnedBlocks("", pin.block_count, pin.present)

    def unpin(self, name: str) -> PinnedBlocks:
        """Ends a pin."""
        if name not in self._pins:
            return PinnedBlocks(f"name: {shown(name)} is not pinned")
        return PinnedBlocks("", self._end(name))

    def expire(self, now: float) -> None:
        """Ends the pins whose time is over."""
        for name in [name for name, each in self._pins.items() if each.deadline <= now]:
            self._end(name)

    def end_all(self) -> None:
        """Ends all pins: with other weights, their keys name nothing any more."""
        for name in [*self._pins]:
            self._end(name)

    def _end(self, name: str) -> int:
        """Ends a pin, if there is one of this name; returns its blocks."""
        found = self._pins.pop(name, None)
        if found is None:
            return 0
        found.pin.unpin()
        return found.pin.block_count
