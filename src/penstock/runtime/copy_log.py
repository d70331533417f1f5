"""When copies began and ended: the last ones, for pictures and for people who look for time.

The cache itself knows no clock, so this is kept beside it. The one rule: it only watches. What
it forgets, or never saw, changes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.machine.effects import Copy
    from penstock.vocabulary.ids import OperationId

COPIES_KEPT = 4096
"""About half a megabyte."""


class CopyTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of some blocks between two tiers, on all ranks."""

    purpose: str
    """`load`, `stage`, `save`, `demote` or `duplicate`."""
    source: str
    target: str
    blocks: int
    cause: str
    """The request or event behind it."""
    began: float
    """On the monotonic clock, which all processes of a machine share."""
    ended: float


class CopyLog:
    """The copies under way, and the last that have ended."""

    def __init__(self, tiers: tuple[str, ...]) -> None:
        self._tiers = tiers
        self._running: dict[OperationId, CopyTimes] = {}
        self._ended: deque[CopyTimes] = deque(maxlen=COPIES_KEPT)

    def begin(self, copy: Copy, now: float) -> None:
        """A copy was ordered."""
        self._running[copy.operation] = CopyTimes(
            purpose=copy.purpose.value,
            source=self._tiers[copy.source],
            target=self._tiers[copy.target],
            blocks=len(copy.keys),
            cause=copy.cause,
            began=now,
            ended=now,
        )

    def look(self, under_way: Collection[OperationId], now: float) -> None:
        """Copies that are not under way any more have ended."""
        for name in [name for name in self._running if name not in under_way]:
            self._ended.append(msgspec.structs.replace(self._running.pop(name), ended=now))

    @property
    def has_running(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._running)

    def ended(self) -> list[CopyTimes]:
        """The last that have ended, oldest first."""
        return list(self._ended)
