"""What the connector counts, for vLLM's own metrics and its periodic log line.

Counters travel as what was added since they were last taken, times as each of them, gauges as they
are. The names below are what Prometheus shows, behind `vllm:penstock_`.

The one rule: a gauge is told in the step in which it changed. vLLM asks at the end of every step,
and only then, so a change outside of a step (a reset) makes one more step necessary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "vllm:penstock_"
Taken: TypeAlias = "dict[str, int | list[float]]"

COUNTERS: Mapping[str, str] = {
    "lookups": "Requests looked up below the device.",
    "tokens_found": "Tokens that were found below the device and promised to vLLM.",
    "tokens_loaded": "Tokens that vLLM did not compute because they were loaded and verified.",
    "bytes_loaded": "Bytes copied to the device and verified, on all ranks.",
    "loads_failed": "Loads of which at least one block was computed instead.",
    "checksum_failures": "Blocks whose checksum did not match when they were loaded.",
    "timeouts": "Loads and saves that did not end within operation_timeout_s.",
    "blocks_saved": "Blocks written below the device.",
    "bytes_saved": "Bytes of these blocks, on all ranks.",
    "saves_failed": "Copies to below the device that failed or ran out of time.",
    "blocks_dropped_pinned": "Blocks not saved because too many of vLLM's were pinned already.",
    "blocks_dropped_window": "Blocks not saved because a sliding window had passed them.",
    "blocks_dropped_room": "Blocks not saved because there was no room, or they were refused.",
    "blocks_evicted": "Blocks that left the first tier below the device to make room for others.",
    "requests_refused": "Requests kept out because their kv_transfer_params were wrong.",
    "resets": "Times that everything below the device was voided.",
}
GAUGES: Mapping[str, str] = {
    "host_slots": "Blocks that fit into the first tier below the device.",
    "host_slots_ready": "Blocks in it that can be loaded.",
    "pinned_blocks": "Device blocks that are kept from reuse until their save has settled.",
}
TIMES: Mapping[str, str] = {
    "load_seconds": "From the moment that vLLM gave a request blocks to load into, to its end.",
}
BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""From a load of one block in a step to the longest that operation_timeout_s usually allows."""


class Tally:
    """Counts of one scheduler's half since they were last taken."""

    def __init__(self) -> None:
        self._added: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}
        self._totals: dict[str, int] = {}
        self._gauges: dict[str, int] = {}
        self._changed: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Counts something of `COUNTERS`."""
        if count:
            self._added[name] = self._added.get(name, 0) + count

    def time(self, name: str, seconds: float) -> None:
        """Notes one of `TIMES`."""
        self._times.setdefault(name, []).append(seconds)

    def total(self, name: str, value: int) -> None:
        """Something of `COUNTERS` that is counted elsewhere, since the beginning."""
        self.add(name, value - self._totals.get(name, 0))
        self._totals[name] = value

    def gauge(self, name: str, value: int) -> None:
        """One of `GAUGES` as it is now; it is told if it has changed."""
        if self._gauges.get(name) != value:
            self._gauges[name] = self._changed[name] = value

    def take(self) -> Taken:
        """What was added or has changed since the last call."""
        taken: Taken = {**self._added, **self._changed, **self._times}
        self._added, self._changed, self._times = {}, {}, {}
        return taken


def combined(one: Mapping[str, int | list[float]], other: Mapping[str, int | list[float]]) -> Taken:
    """Two takings as one: counters add up, times stand side by side, the later gauge counts."""
    both = dict(one)
    for name, value in other.items():
        before = both.get(name)
        both[name] = value if before is None or name in GAUGES else before + value  # type: ignore[operator]
    return both


def reduced(taken: Mapping[str, int | list[float]]) -> dict[str, int | float]:
    """The same for a log line: of times their number, their mean and the longest."""
    told: dict[str, int | float] = {}
    for name, value in taken.items():
        if not isinstance(value, list):
            told[name] = value
        elif value:
            told[f"{name}_count"] = len(value)
            told[f"{name}_mean"] = round(sum(value) / len(value), 6)
            told[f"{name}_max"] = round(max(value), 6)
    return told
