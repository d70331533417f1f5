"""Reports that did not arrive: how the owner notices, and what it asks then.

    a gap in the numbers of a rank's reports    after `GRACE_S` nobody waits for what is missing
    an operation past its deadline              some rank has not said that it is through

Either way the ranks are asked about the operations concerned. A rank that has one in hand reports
on it when it ends; one that has not says so, and the operation fails and gives its slots back.

The one rule: silence never frees a slot. An operation settles because its ranks said something.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.cache.ledger import Operation
    from penstock.vocabulary.ids import OperationId

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""Messages of an engine may overtake each other by a step or two. What has not come after so long
is taken for lost."""
ASK_S = 5.0
"""Operations past their deadlines are asked about so often: a rank may be slow, and a question
costs a few bytes."""
GAPS_MAX = 4096
"""More numbers than this are not waited for: they are lost at once."""


class Numbers:
    """Those that have come, of messages that are numbered from 1 on."""

    __slots__ = ("_ahead", "_last", "_next")

    def __init__(self) -> None:
        self._next = 1
        self._last = 0
        self._ahead: set[int] = set()

    @property
    def missing(self) -> int:
        """How many have not come, although a later one has."""
        return self._last - self._next + 1 - len(self._ahead)

    def add(self, number: int) -> None:
        """One has come; again, perhaps."""
        if number < self._next:
            return
        self._last = max(self._last, number)
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1

    def forgive(self) -> int:
        """What is missing is not waited for any more; returns how many that are."""
        missing = self.missing
        self._next = self._last + 1
        self._ahead.clear()
        return missing


class Inquiry:
    """What the owner of one cache has to ask its ranks."""

    def __init__(self, heard: Mapping[int, Numbers]) -> None:
        self.reports_lost = 0
        """So many reports were missing for so long that they were taken for lost."""
        self._heard = heard
        self._since: dict[int, float] = {}
        self._ask_at = -math.inf

    def due(self, operations: Mapping[OperationId, Operation], now: float) -> Iterable[OperationId]:
        """The operations that ranks are to be asked about now."""
        silent = self._take_silent(now)
        overdue = now >= self._ask_at and bool(operations)
        if not silent and not overdue:
            return ()
        asked = [
            name
            for name, operation in operations.items()
            if silent & operation.waiting_ranks or operation.deadline + GRACE_S <= now
        ]
        if overdue:
            self._ask_at = now + ASK_S
        return asked

    def next_due(self, operations: Mapping[OperationId, Operation]) -> float:
        """When a gap will have lasted long enough, or an operation will be overdue."""
        gap_at = min(self._since.values(), default=math.inf)
        over_at = min((each.deadline for each in operations.values()), default=math.inf)
        return min(gap_at + GRACE_S, max(over_at + GRACE_S, self._ask_at))

    def _take_silent(self, now: float) -> set[int]:
        """The ranks of which a report is lost; they are told once for what is missing now."""
        silent: set[int] = set()
        for rank, heard in self._heard.items():
            missing = heard.missing
            if not missing:
                self._since.pop(rank, None)
                continue
            since = self._since.setdefault(rank, now)
            if now - since >= GRACE_S or missing > GAPS_MAX:
                lost = heard.forgive()
                self.reports_lost += lost
                logger.warning("reports lost: rank=%d count=%d", rank, lost)
                del self._since[rank]
                silent.add(rank)
        return silent
