"""The pairs of instances that the router has introduced to each other.

Two instances hand over to each other only after both got `OpenPair`, which says where the other
one is. A pair is opened when a request first needs it and closed when none has used it for
`handoff.idle_s`, or when one of the two has `handoff.peers_max` open and another pair is needed;
then the one that was used least recently goes. So instances that are not used together cost each
other nothing.

The rule: a pair that a request uses is closed only when one of the two is gone, cannot open it or
gets other weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import SHARED_MEMORY, HandoffTable
from penstock_serve.engine.messages import ClosePair, OpenPair
from penstock_serve.engine.spec import PairSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_serve.engine import messages as ms
    from penstock_serve.server.instance_link import InstanceLink

logger = logging.getLogger("penstock.serve.pairs")

Couple = tuple["InstanceLink", "InstanceLink"]
"""A prefill instance and a decode instance."""
FAILED_S = 10.0
"""How long a pair that could not be opened is not tried again."""


@dataclass(slots=True)
class _Introduced:
    """An open pair."""

    number: int
    """A pair that is opened again has another one."""
    uses: int
    """Requests under way in it."""
    used_at: float
    """When one began or ended last."""


class PairTable:
    """Which pairs are open, and who may open one."""

    def __init__(
        self, loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop
    ) -> None:
        """`loop` has the clock and the timers."""
        self._loop = loop
        self._open: dict[Couple, _Introduced] = {}
        self._of: dict[InstanceLink, dict[Couple, _Introduced]] = {}
        """The open pairs of each instance."""
        self._opened_count = 0
        self._failed: dict[Couple, float] = {}
        """Pairs that could not be opened, and when."""
        self._closing: list[Couple] = []
        """Pairs of instances that are gone: their peers are about to be told."""
        self._told: dict[tuple[str, str], str] = {}
        """Why two instances cannot hand over to each other, by their names; each is logged once."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf

    @property
    def names(self) -> list[tuple[str, str]]:
        """The open pairs."""
        return [(prefill.name, decode.name) for prefill, decode in self._open]

    def can_use(self, prefill: InstanceLink, decode: InstanceLink) -> bool:
        """Whether two instances can hand over to each other now."""
        couple = prefill, decode
        if couple in self._open:
            return True
        failed = self._failed.get(couple)
        if failed is not None and self._loop().time() < failed + FAILED_S:
            return False
        if not _reaches(prefill, decode):
            return False
        if problem := _misfit(prefill, decode):
            self._tell(prefill, decode, problem)
            return False
        return all(self._has_room(link) for link in couple)

    def _tell(self, prefill: InstanceLink, decode: InstanceLink, problem: str) -> None:
        names = prefill.name, decode.name
        if self._told.get(names) != problem:
            self._told[names] = problem
            logger.warning(
                "instances hand nothing over: prefill=%s decode=%s cause=%s", *names, problem
            )

    def use(self, prefill: InstanceLink, decode: InstanceLink) -> int:
        """A request begins in a pair, which is opened if it is not; `can_use` was asked before.

        Returns the number of the pair, which `release` wants.
        """
        couple = prefill, decode
        if couple not in self._open:
            for link in couple:
                self._make_room(link)
            self._introduce(prefill, decode)
        pair = self._open[couple]
        pair.uses += 1
        pair.used_at = self._loop().time()
        return pair.number

    def release(self, prefill: InstanceLink, decode: InstanceLink, number: int) -> None:
        """A request in a pair has ended; the pair may be gone, or opened again, by now."""
        couple = prefill, decode
        pair = self._open.get(couple)
        if pair is not None and pair.number == number:
            pair.uses -= 1
            pair.used_at = self._loop().time()
            if not pair.uses:
                self._set_alarm(self._idle_until(couple))

    def note_failure(self, link: InstanceLink, failed: ms.PairFailed) -> None:
        """An instance could not open a pair: it is closed on the other side, too."""
        for couple in list(self._open):
            names = tuple(each.name for each in couple)
            if link in couple and names == (failed.prefill, failed.decode):
                self._failed[couple] = self._loop().time()
                self._close(couple)

    def close_pairs_of(self, link: InstanceLink) -> None:
        """Closes the pairs of an instance, also those in use: what it computes has changed."""
        for couple in self._pairs_of(link):
            self._close(couple)

    def remove(self, link: InstanceLink) -> None:
        """An instance is gone: its peers close their pairs with it.

        A moment later: until then, its requests are sent elsewhere, so that a peer gets a new
        handoff for a prompt before the old one ends.
        """
        for couple in self._pairs_of(link):
            self._forget(couple)
            self._closing.append(couple)
        self._loop().call_soon(self._send_closing)
        self._failed = {each: at for each, at in self._failed.items() if link not in each}

    def close(self) -> None:
        """Stops the timer; instances close their pairs when their server is gone."""
        self._open.clear()
        self._of.clear()
        self._set_alarm(math.inf)

    def _introduce(self, prefill: InstanceLink, decode: InstanceLink) -> None:
        ready, other = prefill.ready, decode.ready
        assert ready is not None
        assert other is not None
        assert ready.engine is not None
        assert other.engine is not None
        self._opened_count += 1
        pair = _Introduced(self._opened_count, 0, self._loop().time())
        self._open[prefill, decode] = pair
        for link in (prefill, decode):
            self._of.setdefault(link, {})[prefill, decode] = pair
        message = OpenPair(
            pair=PairSpec(prefill=ready.engine, decode=other.engine, number=pair.number)
        )
        # The one that is dialled first.
        prefill.send(message)
        decode.send(message)
        logger.info("pair opened: prefill=%s decode=%s", prefill.name, decode.name)

    def _close(self, couple: Couple) -> None:
        self._forget(couple)
        self._send_close(couple)

    def _forget(self, couple: Couple) -> None:
        del self._open[couple]
        for link in couple:
            del self._of[link][couple]
            if not self._of[link]:
                del self._of[link]

    def _send_closing(self) -> None:
        couples, self._closing = self._closing, []
        for couple in couples:
            self._send_close(couple)

    def _send_close(self, couple: Couple) -> None:
        prefill, decode = couple
        lost = any(bool(link.lost) for link in couple)
        for link in couple:
            if not link.lost:
                link.send(ClosePair(prefill=prefill.name, decode=decode.name, lost=lost))
        logger.info("pair closed: prefill=%s decode=%s", prefill.name, decode.name)

    def _pairs_of(self, link: InstanceLink) -> list[Couple]:
        """The open pairs of an instance, the least recently used first."""
        return sorted(self._of.get(link, ()), key=lambda couple: self._open[couple].used_at)

    def _has_room(self, link: InstanceLink) -> bool:
        pairs = self._of.get(link, {})
        if len(pairs) < _table_of(link).peers_max:
            return True
        return any(not pair.uses for pair in pairs.values())

    def _make_room(self, link: InstanceLink) -> None:
        """Closes a pair if an instance has as many as it may have open."""
        pairs, most = self._pairs_of(link), _table_of(link).peers_max
        if len(pairs) >= most:
            self._close(next(couple for couple in pairs if not self._open[couple].uses))
        if sum(link in couple for couple in self._closing) + len(pairs) >= most:
            # It counts those, too, until it has heard of their end.
            self._send_closing()

    def _idle_until(self, couple: Couple) -> float:
        idle_s = min(_table_of(link).idle_s for link in couple)
        return self._open[couple].used_at + idle_s

    def _close_idle(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now, next_at = self._loop().time(), math.inf
        for couple, pair in list(self._open.items()):
            if not pair.uses:
                until = self._idle_until(couple)
                if until <= now:
                    self._close(couple)
                else:
                    next_at = min(next_at, until)
        self._set_alarm(next_at)

    def _set_alarm(self, at: float) -> None:
        """Looks by then which pairs are idle for long enough; infinite: there is nothing to see.

        One that is used again meanwhile leaves its alarm behind, which then finds the next.
        """
        if at < self._alarm_at or at == math.inf:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = at
            self._alarm = None if at == math.inf else self._loop().call_at(at, self._close_idle)


def _table_of(link: InstanceLink) -> HandoffTable:
    found = None if link.ready is None else link.ready.config.handoff
    return found or HandoffTable()


def _reaches(prefill: InstanceLink, decode: InstanceLink) -> bool:
    """Whether both take part in handoffs, and one is where the other can reach it."""
    ready, other = prefill.ready, decode.ready
    if prefill is decode or ready is None or other is None:
        return False
    source, target = ready.engine, other.engine
    if source is None or target is None:
        return False
    remote = source.address.startswith("tcp://") and _table_of(prefill).transport != SHARED_MEMORY
    return remote or source.machine == target.machine


def _misfit(prefill: InstanceLink, decode: InstanceLink) -> str:
    """What keeps two instances from exchanging KV, with both values; empty if nothing does."""
    ready, other = prefill.ready, decode.ready
    assert ready is not None
    assert other is not None
    for name, ours, theirs in (
        ("handoff.transport", _table_of(prefill).transport, _table_of(decode).transport),
        ("model", ready.model, other.model),
        ("model.kv_dtype", ready.config.model.kv_dtype, other.config.model.kv_dtype),
        ("cache.block_tokens", ready.config.cache.block_tokens, other.config.cache.block_tokens),
    ):
        if ours != theirs:
            return f"{name} is {ours!r} at prefill and {theirs!r} at decode, must be equal"
    return ""
