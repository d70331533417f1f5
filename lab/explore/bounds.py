"""How far a search may go before it stops unfinished, and how it knows its memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

MEMORY_BYTES_MAX = 10 << 30

_LOOK_EVERY = 1 << 12
"""States between two looks at clock and memory: some milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where a search stops, exhausted or not."""

    seconds: float = 900.0
    state_count: int = 100_000_000
    memory_bytes: int = MEMORY_BYTES_MAX
    """Of this process, as the kernel counts it."""

    def __post_init__(self) -> None:
        for name in ("seconds", "state_count", "memory_bytes"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} must be more than 0, got {value}")


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass(slots=True)
class Watch:
    """Tells a search when to stop."""

    bounds: Bounds
    began: float = field(default_factory=time.perf_counter)
    memory_before_bytes: int = field(default_factory=resident_bytes)
    _looked_at: int = 0

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.perf_counter() - self.began

    def must_stop(self, state_count: int) -> str:
        """Why the search has to stop now; empty when it may go on."""
        if state_count >= self.bounds.state_count:
            return f"{self.bounds.state_count} states"
        if 0 <= state_count - self._looked_at < _LOOK_EVERY:
            return ""
        self._looked_at = state_count
        if self.seconds > self.bounds.seconds:
            return f"{self.bounds.seconds:.0f} seconds"
        if resident_bytes() > self.bounds.memory_bytes:
            return f"{self.bounds.memory_bytes} bytes of memory"
        return ""

    def grown_bytes(self) -> int:
        """How much memory the process has taken since the search began."""
        return max(0, resident_bytes() - self.memory_before_bytes)
