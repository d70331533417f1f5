"""Which reports of ranks have arrived, which are missing, and what the owner asks about them.

| the owner notices                           | by                                             |
|---------------------------------------------|------------------------------------------------|
| a report was lost                           | a gap in the rank's numbers, after `GRACE_S`   |
| the last report was lost                    | an operation that is past its deadline         |
| a report comes from an earlier life         | the life of the rank that the report names     |

In the first two cases the ranks are asked about the operations concerned. A rank that still has
one in hand reports on it when it ends; one that has not says so, and the operation fails and
gives its slots back. Silence never frees a slot: an operation settles because its ranks reported.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PeerError
from penstock.machine.events import CopyReport
from penstock.runtime.messages import decode_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.cache.operations import Operation
    from penstock.runtime.rank_facts import RankFacts
    from penstock.vocabulary.ids import OperationId

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""An engine's messages may overtake each other by a step or two. A report that has not come after
this time counts as lost."""
ASK_S = 5.0
"""How often ranks are asked about operations past their deadlines: a rank may be slow, and a
question costs a few bytes."""
GAPS_MAX = 4096
"""With more missing numbers than this, all of them count as lost at once."""
LIVES_REMEMBERED = 64
"""Earlier lives of a rank whose late reports are ignored; an unknown life means a restart."""


class LostRank(NamedTuple):
    """A rank that cannot be relied on any more."""

    rank: int
    why: str


class SequenceNumbers:
    """Which of the messages numbered 1, 2, 3, … have arrived."""

    __slots__ = ("_ahead", "_last", "_next")

    def __init__(self) -> None:
        self._next = 1
        self._last = 0
        self._ahead: set[int] = set()

    @property
    def missing(self) -> int:
        """How many have not arrived although a later one has."""
        return self._last - self._next + 1 - len(self._ahead)

    def add(self, number: int) -> None:
        """A message has arrived; the same one may arrive again."""
        if number < self._next:
            return
        self._last = max(self._last, number)
        self._ahead.add(number)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1

    def skip_missing(self) -> int:
        """Stops waiting for the missing ones; returns how many they were."""
        missing = self.missing
        self._next = self._last + 1
        self._ahead.clear()
        return missing


class Acknowledgements:
    """Reads the reports of ranks, and knows which life of each rank counts."""

    def __init__(self, ranks: Iterable[RankFacts], incarnation: int) -> None:
        self.incarnation = incarnation
        """The life of the owner."""
        self._life = {facts.rank: facts.life for facts in ranks}
        self.received = {rank: SequenceNumbers() for rank in self._life}
        """The reports that arrived from the current life of each rank."""
        self._earlier: dict[int, deque[int]] = {
            rank: deque(maxlen=LIVES_REMEMBERED) for rank in self._life
        }
        self.lives = self._in_order()
        """The current life of each rank, in the order of ranks."""

    def begin_life(self, facts: RankFacts) -> None:
        """From now on this life of the rank counts.

        Raises:
            PeerError: it is a life that was lost: copies of that life may still be under way.
        """
        rank, life = facts.rank, facts.life
        if life == self._life[rank] or life in self._earlier[rank]:
            raise PeerError(
                f"rank {rank} is back as life {life:016x}, must be another than the one that was "
                "lost: open the rank anew, which fences what the old one had to do"
            )
        self._earlier[rank].append(self._life[rank])
        self._life[rank] = life
        self.received[rank] = SequenceNumbers()
        self.lives = self._in_order()

    def read(self, message: bytes) -> list[CopyReport | LostRank]:
        """What a report means for the owner.

        Raises:
            PeerError: it is not a report, or is meant for another owner, or names an unknown rank.
        """
        report = decode_report(message)
        if report.incarnation != self.incarnation:
            raise PeerError(
                f"a report is for owner {report.incarnation:016x}, must be for "
                f"{self.incarnation:016x}"
            )
        life = self._life.get(report.rank)
        if life is None:
            raise PeerError(f"a report is from rank {report.rank}, must be below {len(self._life)}")
        if report.life == life:
            self.received[report.rank].add(report.sequence)
            return [
                CopyReport(
                    operation=each.operation,
                    rank=report.rank,
                    faults=each.faults,
                    failure=each.failure,
                )
                for each in report.moved
            ]
        if report.life in self._earlier[report.rank]:
            # The operations of a lost life failed when it was lost.
            return []
        return [LostRank(report.rank, "it restarted without saying so")]

    def _in_order(self) -> tuple[int, ...]:
        return tuple(life for _, life in sorted(self._life.items()))


class MissingReports:
    """Finds the operations that ranks have to be asked about."""

    def __init__(self, received: Mapping[int, SequenceNumbers]) -> None:
        self.reports_lost = 0
        """Reports that have been missing long enough to count as lost."""
        self._received = received
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
        """The ranks that lost a report; each gap is returned once."""
        silent: set[int] = set()
        for rank, received in self._received.items():
            missing = received.missing
            if not missing:
                self._since.pop(rank, None)
                continue
            since = self._since.setdefault(rank, now)
            if now - since >= GRACE_S or missing > GAPS_MAX:
                lost = received.skip_missing()
                self.reports_lost += lost
                logger.warning("reports lost: rank=%d count=%d", rank, lost)
                del self._since[rank]
                silent.add(rank)
        return silent
