"""What the connector counts, for vLLM's own metrics and its periodic log line.

Counters travel as what was added since they were last taken, gauges as they are. The names
below are what Prometheus shows, behind `vllm:penstock_`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "vllm:penstock_"

COUNTERS: Mapping[str, str] = {
    "lookups": "Requests looked up below the device.",
    "tokens_found": "Tokens that were found below the device and promised to vLLM.",
    "tokens_loaded": "Tokens brought back to the device, verified.",
    "loads_failed": "Loads of which at least one block was computed instead.",
    "blocks_saved": "Blocks written below the device.",
    "saves_failed": "Copies to below the device that failed or ran out of time.",
    "blocks_dropped_pinned": "Blocks not saved because too many of vLLM's were pinned already.",
    "blocks_dropped_window": "Blocks not saved because a sliding window had passed them.",
    "blocks_dropped_room": "Blocks not saved because there was no room, or they were refused.",
    "resets": "Times that everything below the device was voided.",
}
GAUGES: Mapping[str, str] = {
    "host_slots": "Blocks that fit into the first tier below the device.",
    "host_slots_ready": "Blocks in it that can be loaded.",
    "pinned_blocks": "Device blocks that are kept from reuse until their save has settled.",
}
GAUGE_STEPS = 256
"""Gauges are looked up once in so many steps, every few seconds: tier statistics cost as much as
two dozen steps without anything to save."""


class Tally:
    """Counts of one scheduler's half since they were last taken."""

    def __init__(self) -> None:
        self._added: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Counts something of `COUNTERS`."""
        if count:
            self._added[name] = self._added.get(name, 0) + count

    def take(self) -> dict[str, int]:
        """What was added since the last call."""
        added, self._added = self._added, {}
        return added


def combined(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Two takings as one: counters add up, of gauges the later counts."""
    both = dict(one)
    for name, value in other.items():
        both[name] = both.get(name, 0) + value if name in COUNTERS else value
    return both
