"""Brings blocks of waiting requests up from the store process, and says how long a request waits.

    a request is queued           ─→ bring_up     its blocks travel from disk to host memory
    the engine wants to start it  ─→ begin_turn, bring_up
                                  ─→ defers       not yet: they are on their way

A long queue must not fill host memory with blocks that push each other out before they are used:
what is brought up for requests whose turn has not come is bounded (`AHEAD_SHARE`). The others are
brought up when it is their turn.

A request waits for blocks that are on their way, and for nothing else:

| the blocks                                         | the request                                 |
|----------------------------------------------------|---------------------------------------------|
| are being copied into host memory                  | waits                                       |
| may be in a store that has not read all its tables | waits for the store's answer                |
| may be in a store that was just started            | waits until it is known which tiers are on  |
| are quicker to compute, by the measured rates      | does not wait                               |
| lie below a host memory that has no room for them  | does not wait                               |
| lie in a store that was lost                       | does not wait                               |

The one rule: no request waits longer than `WAIT_S`, counted from the moment that the engine wants
to start it. Then it takes what has arrived, and computes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.connectors.base.statistics import TransferCounts
    from penstock.machine.effects import Found, Started
    from penstock.runtime.offload import Offload
    from penstock.runtime.stored_tiers import StoreStatus
    from penstock.vocabulary.ids import Key

WAIT_S = 2.0
"""How long a request waits at most: a disk reads 2 GB meanwhile. It must not look like a hang."""
START_S = 10.0
"""How long an engine with nothing to do keeps stepping for a store that starts, or starts again:
it takes about a second, or several on a machine that is busy starting engines."""

AHEAD_SHARE = 0.5
"""The part of host memory that blocks of queued requests may take."""


@dataclass(slots=True)
class StoreWait:
    """What a request has asked of the store, and how long it waits for it."""

    asked: int = 0
    """How many leading blocks were asked for, since it is the request's turn or before."""
    ahead: int = 0
    """Blocks that were brought up before it was the request's turn."""
    began: float | None = None
    until: float = 0.0
    is_waiting: bool = False
    over: bool = False
    """Whether it was started, or has waited long enough: it waits no more."""


class StorePrefetch:
    """The prefetches of one engine."""

    def __init__(self, offload: Offload, counts: TransferCounts, *, wait_s: float = WAIT_S) -> None:
        """Waits for a store that was just started."""
        self._offload = offload
        self._counts = counts
        self._wait_s = wait_s
        self._settled = False
        self._first_time = True
        """Whether the store has not been there yet."""
        self._comes_until = counts.clock() + START_S
        self._ahead = 0
        """Blocks that were brought up for requests whose turn has not come."""
        # Starts the process: the engine has yet to warm up.
        offload.step()

    @property
    def pending(self) -> bool:
        """Whether an engine with nothing else to do should step for the store to come."""
        return not self._settled and self._counts.clock() < self._comes_until

    @property
    def due(self) -> bool:
        """Whether the tiers must be stepped for the store."""
        return self._status("").due

    def watch(self) -> None:
        """Looks at the store after the tiers were stepped."""
        status = self._status("")
        if status.settled:
            self._first_time = False
        elif self._settled:
            # It was lost just now, and is started again.
            self._comes_until = self._counts.clock() + START_S
        self._settled = status.settled
        self._counts.store(status)

    def begin_turn(self, wait: StoreWait) -> None:
        """The engine wants to start a request, or has no more to do with it."""
        if wait.began is None:
            self._ahead -= wait.ahead
            # It may ask once more: what was brought up ahead may have made room for others.
            wait.ahead = wait.asked = 0
            now = self._counts.clock()
            wait.began, wait.until = now, now + self._wait_s

    def bring_up(
        self, wait: StoreWait, keys: Sequence[Key], found: Found, *, held: int, cause: str
    ) -> Started | None:
        """Asks for blocks of a request that are worth it, once; returns what was started.

        Before the turn of the request that is done only as far as the bound allows.
        """
        known = found.ready + found.pending
        wanted = len(keys) if found.worth >= known else found.worth
        if wanted <= max(found.ready, held, wait.asked):
            return None
        if not self._status(cause).on:
            return None
        if wait.began is None:
            if self._ahead + found.below > AHEAD_SHARE * self._offload.hub_counts().slots:
                return None
            wait.ahead = found.below
            self._ahead += found.below
        wait.asked = wanted
        return self._offload.prefetch(keys[:wanted], cause=cause)

    def defers(
        self, wait: StoreWait, keys: Sequence[Key], found: Found, *, held: int, cause: str
    ) -> bool:
        """Whether a request is not started yet; the arguments are those of `bring_up`.

        It is the request's turn: `begin_turn` was called.
        """
        if wait.over or wait.began is None:
            return False
        now = self._counts.clock()
        if now < wait.until and self._expects(keys, found, held, cause):
            wait.is_waiting = True
            return True
        if wait.is_waiting:
            self._counts.waited(now - wait.began)
        wait.is_waiting, wait.over = False, True
        return False

    def _expects(self, keys: Sequence[Key], found: Found, held: int, cause: str) -> bool:
        known = found.ready + found.pending
        if found.rising and min(found.worth, known) > max(found.ready, held):
            return True
        if known >= len(keys) or found.worth < known:
            return False
        status = self._status(cause)
        return status.searching or (self._first_time and self.pending and not status.settled)

    def _status(self, cause: str) -> StoreStatus:
        status = self._offload.store_status(cause)
        assert status is not None, "only an engine with a store has prefetches"
        return status
