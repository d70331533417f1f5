"""Whether a cache can do all that it was opened for, and why not.

A cache that lost a rank or a tier goes on: requests are computed, what is left is used. Each
reason is logged once when it appears and once when it is gone.
"""

from __future__ import annotations

import logging

import msgspec

logger = logging.getLogger(__name__)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cache, for readiness probes and operators."""

    ok: bool
    reasons: tuple[str, ...] = ()
    """What is lost or off, and why."""

    def and_also(self, reason: str) -> Health:
        """The same with one more reason."""
        return Health(ok=False, reasons=(*self.reasons, reason))


class HealthLog:
    """What is wrong now, by the thing that it is wrong with."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def health(self) -> Health:
        """The state as it is."""
        reasons = tuple(f"{thing}: {why}" for thing, why in self._reasons.items())
        return Health(ok=not reasons, reasons=reasons)

    def fail(self, thing: str, why: str) -> None:
        """Something is lost or off; what is known already is not logged again."""
        if thing not in self._reasons:
            logger.warning("degraded: %s cause=%s", thing, why)
            self._reasons[thing] = why

    def mend(self, thing: str) -> None:
        """It is in order again."""
        if self._reasons.pop(thing, None) is not None:
            logger.warning("recovered: %s", thing)
