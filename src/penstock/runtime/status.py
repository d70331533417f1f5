"""What a cache can report of itself: its health, its last copies, and how it was closed.

A cache that lost a rank or a tier goes on: requests are computed, what is left is used. Each
reason is logged once when it appears and once when it is gone. A tier that starts is not well yet,
but nothing has gone wrong: that is no warning.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection

    from penstock.machine.effects import Copy
    from penstock.vocabulary.keys import OperationId


logger = logging.getLogger(__name__)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cache, for readiness probes and operators."""

    ok: bool
    reasons: tuple[str, ...] = ()
    """What is lost or off, and why."""

    def and_also(self, reason: str) -> Health:
        """The same with one more reason."""
        return Health(ok=False, reasons=(*self.reasons, reason))


class _Trouble(NamedTuple):
    """What is wrong with a thing."""

    state: str
    why: str
    logged: str
    """The reason that was logged last; empty if the thing only starts."""


class HealthLog:
    """What is wrong now, by the thing that it is wrong with: "tier disk", for instance."""

    def __init__(self) -> None:
        self._troubles: dict[str, _Trouble] = {}

    @property
    def health(self) -> Health:
        """The state now, with all reasons."""
        reasons = tuple(
            f"{thing} {trouble.state}: {trouble.why}" for thing, trouble in self._troubles.items()
        )
        return Health(ok=not reasons, reasons=reasons)

    def why(self, thing: str) -> str:
        """What is wrong with a thing; empty if nothing is."""
        trouble = self._troubles.get(thing)
        return "" if trouble is None else trouble.why

    def fail(self, thing: str, state: str, why: str) -> None:
        """A thing is lost or off; a reason that was logged already is not logged again."""
        before = self._troubles.get(thing)
        if before is None or before.logged != why:
            logger.warning("degraded: %s %s cause=%s", thing, state, why)
        self._troubles[thing] = _Trouble(state, why, why)

    def start(self, thing: str, state: str, why: str) -> None:
        """A thing is not there yet; what it waits for is logged once."""
        before = self._troubles.get(thing)
        if before is None:
            logger.info("starting: %s cause=%s", thing, why)
        self._troubles[thing] = _Trouble(state, why, "" if before is None else before.logged)

    def mend(self, thing: str, state: str) -> None:
        """Nothing is wrong with a thing any more: what its state is now."""
        before = self._troubles.pop(thing, None)
        if before is None:
            return
        if before.logged:
            logger.warning("recovered: %s %s", thing, state)
        else:
            logger.info("%s %s", thing, state)


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
    """When the last copies began and ended. It only watches: nothing depends on it."""

    def __init__(self, tiers: tuple[str, ...]) -> None:
        self._tiers = tiers
        self._running: dict[OperationId, CopyTimes] = {}
        self._ended: deque[CopyTimes] = deque(maxlen=COPIES_KEPT)

    def begin(self, copy: Copy, now: float) -> None:
        """Notes a copy that was ordered."""
        self._running[copy.operation] = CopyTimes(
            purpose=copy.purpose.value,
            source=self._tiers[copy.source],
            target=self._tiers[copy.target],
            blocks=len(copy.keys),
            cause=copy.cause,
            began=now,
            ended=now,
        )

    def end_all_but(self, under_way: Collection[OperationId], now: float) -> None:
        """Notes the end of all copies that are not under way any more."""
        for name in [name for name in self._running if name not in under_way]:
            self._ended.append(msgspec.structs.replace(self._running.pop(name), ended=now))

    @property
    def has_running(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._running)

    def ended(self) -> list[CopyTimes]:
        """The last that have ended, oldest first."""
        return list(self._ended)


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the copies that were under way when a cache or rank was closed."""

    finished: int
    """Ended by themselves in time."""
    cancelled: int
    """Were cut short, or failed: what they were to write down is lost."""
    unsettled: int
    """Were not reported by every rank at the end; each rank fences its own."""

    @property
    def clean(self) -> bool:
        """Whether everything ended by itself."""
        return not self.cancelled
