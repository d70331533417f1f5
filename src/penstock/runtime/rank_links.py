"""How the owner of a cache reaches the ranks of its engine.

| links          | ranks                | plans and reports travel                     |
|----------------|----------------------|----------------------------------------------|
| `LocalLink`    | one, in this process | not at all: its movers are called            |
| `MessageLinks` | any number, anywhere | with the engine's own messages, as bytes     |

The one rule: a rank that is silent, lost or talks nonsense is reported as such, never taken for
one that has nothing to report.

`Acknowledgements` knows which reports have arrived and which are missing:

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
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import PeerError
from penstock.machine.effects import Copy
from penstock.machine.events import CopyReport
from penstock.runtime.messages import NAME_BYTES_MAX, Plan, copy_bytes, decode_report, encode_plan
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.cache.operations import Operation
    from penstock.machine.effects import Abandon
    from penstock.runtime.copy_executor import CopyExecutor
    from penstock.runtime.messages import RankFacts
    from penstock.vocabulary.keys import OperationId

PLAN_BYTES = 4 << 20
"""A plan ends when it has about this size; the next one goes on. A step message should not grow
without bound, but a single copy may be larger than this."""


class RankLinks:
    """The ranks of one engine."""

    acknowledgements: Acknowledgements | None = None
    """Which reports have come; `None` where copies end by calling `collect`: none can be lost."""

    def order(self, effect: Copy | Abandon) -> None:
        """Has every rank start or abandon a copy; returns at once."""
        raise NotImplementedError

    def ask(self, operation: OperationId) -> None:
        """Has every rank say whether it still has an operation in hand, where one may not."""

    def collect(self, *, budget_bytes: int) -> Iterator[CopyReport]:  # noqa: ARG002
        """Lets local copies advance; returns what has ended since the last call."""
        return iter(())

    def take_plan(self) -> bytes | None:
        """The next plan that the engine's messages have to carry, if there is one."""
        return None

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """Waits until there is something to do, or until `deadline`: then False.

        Raises `UnavailableError`: the device in this process does not end its copies.
        """
        return bool(wait_any((), descriptors, deadline=deadline).descriptors)

    def release(self) -> None:
        """Gives back memory.

        Raises `UnavailableError`: the device in this process does not end its copies, which may
        still touch the memory: nothing is given back.
        """


class LocalLink(RankLinks):
    """The one rank of an engine that runs in the owner's process: no report can be lost."""

    def __init__(self, executor: CopyExecutor) -> None:
        self.executor = executor

    def order(self, effect: Copy | Abandon) -> None:
        """Hands a copy to its mover, or abandons it there."""
        if isinstance(effect, Copy):
            self.executor.submit(effect)
        else:
            self.executor.abandon(effect.operation)

    def collect(self, *, budget_bytes: int) -> Iterator[CopyReport]:
        """Lets the movers work, and reports what has ended."""
        # Most steps of an engine find nothing under way, and should not pay for it.
        return self._work(budget_bytes) if self.executor.busy else iter(())

    def _work(self, budget_bytes: int) -> Iterator[CopyReport]:
        for ended in self.executor.collect(budget_bytes=budget_bytes):
            yield CopyReport(
                operation=ended.operation, rank=0, faults=ended.faults, failure=ended.failure
            )

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """Returns at once where the CPU has copies to make; else waits for device or descriptors.

        Raises `UnavailableError`: the device does not end its copies.
        """
        return self.executor.wait(deadline) or super().wait(deadline, descriptors=descriptors)

    def release(self) -> None:
        """Fences the movers and gives the tiers back."""
        self.executor.close()


class MessageLinks(RankLinks):
    """Ranks that the engine's own messages reach: orders, as plans of bounded size."""

    acknowledgements: Acknowledgements

    def __init__(self, ranks: Sequence[RankFacts], incarnation: int) -> None:
        self.acknowledgements = Acknowledgements(ranks, incarnation)
        self._orders: deque[tuple[Copy | Abandon, tuple[int, ...]]] = deque()
        """With the lives of the ranks at that time: later lives do not carry them out."""
        self._asked: dict[OperationId, None] = {}
        """In order, each once, however often it is asked for until the next plan is taken."""
        self._sequence = 0

    def ask(self, operation: OperationId) -> None:
        """Adds a question to the next plan."""
        self._asked[operation] = None

    def order(self, effect: Copy | Abandon) -> None:
        """Adds an order. The machine bounds what is under way, and so what waits here."""
        self._orders.append((effect, self.acknowledgements.lives))

    def take_plan(self) -> bytes | None:
        """The next plan for every rank, if there is anything to do."""
        if not self.has_plan:
            return None
        copies: list[Copy] = []
        abandoned: list[OperationId] = []
        size = 0
        lives = self._orders[0][1] if self._orders else self.acknowledgements.lives
        while self._orders and size < PLAN_BYTES:
            effect, ordered_for = self._orders[0]
            if ordered_for != lives:
                break
            if isinstance(effect, Copy):
                size += copy_bytes(effect)
                if copies and size > PLAN_BYTES:
                    break
                copies.append(effect)
            else:
                size += NAME_BYTES_MAX
                abandoned.append(effect.operation)
            self._orders.popleft()
        asked = self._take_asked(PLAN_BYTES - size)
        self._sequence += 1
        incarnation = self.acknowledgements.incarnation
        return encode_plan(Plan(incarnation, self._sequence, copies, abandoned, lives, asked))

    def _take_asked(self, room_bytes: int) -> list[OperationId]:
        """The questions, once no order is left: they come after the copies they are about."""
        if self._orders:
            return []
        taken = list(islice(self._asked, max(1, room_bytes // NAME_BYTES_MAX)))
        for operation in taken:
            del self._asked[operation]
        return taken

    @property
    def has_plan(self) -> bool:
        """Whether a plan waits to be taken."""
        return bool(self._orders or self._asked)

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """Returns at once while a plan waits to be taken."""
        return self.has_plan or super().wait(deadline, descriptors=descriptors)


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

        Raises `PeerError`: it is a life that was lost: copies of that life may still be under way.
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

        Raises `PeerError`: it is not a report, or is meant for another owner, or names an unknown
        rank.
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
