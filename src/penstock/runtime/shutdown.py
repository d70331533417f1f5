"""How a cache or a rank came to its end.

The order is always drain, fence, release: copies may end until a deadline, what has not is cut
short, nothing touches a slot any more, and only then memory and channels are given back.
"""

from __future__ import annotations

import msgspec


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the copies that were under way when a cache or rank was closed."""

    finished: int
    """Ended by themselves before the deadline."""
    cancelled: int
    """Were cut short, or failed: what they were to write down is lost."""
    unsettled: int
    """So many had not been reported by every rank at the end; each rank fences its own."""

    @property
    def clean(self) -> bool:
        """Whether everything ended by itself."""
        return not self.cancelled
