"""The ranks of an engine, as the owner of its cache reaches them.

| crew         | ranks                     | plans and reports travel                          |
|--------------|---------------------------|---------------------------------------------------|
| `LocalCrew`  | one, in this process      | not at all: its movers are called                 |
| `RemoteCrew` | any number, anywhere      | with the engine's own messages, as bytes          |
| `LinkedCrew` | any number, anywhere      | over channels of the runtime; see `links`         |

The one rule: a rank's silence, loss or garbage is told as such. It is never taken for "nothing
has ended".
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.errors import PeerError
from penstock.machine.effects import Copy
from penstock.machine.events import Report
from penstock.runtime.inquiry import Numbers
from penstock.runtime.plans import (
    NAME_BYTES_MAX,
    Plan,
    copy_bytes,
    decode_report,
    encode_plan,
)
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.machine.effects import Abandon
    from penstock.runtime.carrier import Carrier
    from penstock.runtime.facts import RankFacts
    from penstock.vocabulary.ids import OperationId

PLAN_BYTES = 4 << 20
"""A plan ends when it has about so many bytes; the rest is the next one. A step message should
not grow without bound, and a single copy may still be larger than this."""
LIVES_REMEMBERED = 64
"""Of so many earlier lives of a rank a late report is told from one of a life not known yet."""


class Lost(NamedTuple):
    """A rank that cannot be relied on any more."""

    rank: int
    why: str


class Crew(Protocol):
    """The ranks of one engine."""

    @property
    def roll(self) -> RollCall | None:
        """Whose reports have come; `None` where none can be lost."""
        ...

    def order(self, effect: Copy | Abandon) -> None:
        """Has every rank do something; returns at once."""
        ...

    def ask(self, operation: OperationId) -> None:
        """Has every rank say whether it still has an operation in hand."""
        ...

    def collect(self, *, budget_bytes: int) -> Iterator[Report | Lost]:
        """What ranks have told since the last call; local copies advance meanwhile."""
        ...

    def dispatch(self) -> None:
        """Sends what was ordered, where this is the crew's own affair."""
        ...

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """Waits until there is something to do, or until `deadline`: then False.

        Raises:
            UnavailableError: copies that this process makes do not come to their end.
        """
        ...

    def drop(self, rank: int) -> None:
        """Lets go of a rank that is lost: it is told nothing more, and not heard."""
        ...

    @property
    def own_way(self) -> bool:
        """Whether copies end by calling `collect` and `dispatch` alone."""
        ...

    def release(self) -> None:
        """Gives back what it has of memory and channels.

        Raises:
            UnavailableError: copies that this process makes do not come to their end, and may
                still touch the memory: nothing is given back.
        """
        ...


class LocalCrew:
    """The one rank of an engine that runs in the owner's own process."""

    own_way = True
    roll = None

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def order(self, effect: Copy | Abandon) -> None:
        """Hands a copy to its mover, or takes it back."""
        if isinstance(effect, Copy):
            self.carrier.submit(effect)
        else:
            self.carrier.abandon(effect.operation)

    def ask(self, operation: OperationId) -> None:
        """Nothing is told that could be lost on the way."""

    def collect(self, *, budget_bytes: int) -> Iterator[Report | Lost]:
        """Lets the movers work, and tells what has ended."""
        # Most steps of an engine find nothing under way, and should not pay for it.
        return self._work(budget_bytes) if self.carrier.busy else iter(())

    def _work(self, budget_bytes: int) -> Iterator[Report | Lost]:
        for ended in self.carrier.collect(budget_bytes=budget_bytes):
            yield Report(
                operation=ended.operation, rank=0, faults=ended.faults, failure=ended.failure
            )

    def dispatch(self) -> None:
        """Nothing has to be sent."""

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """At once where the CPU has copies to make; else for a device or a descriptor.

        Raises:
            UnavailableError: the device does not end its copies.
        """
        if self.carrier.wait(deadline):
            return True
        return bool(wait_any((), descriptors, deadline=deadline).descriptors)

    def drop(self, rank: int) -> None:
        """Nothing leads to it that could be let go."""

    def release(self) -> None:
        """Fences the movers and gives the tiers back."""
        self.carrier.close()


class Outbox:
    """What ranks are to be told, in order, as plans of bounded size."""

    def __init__(self, roll: RollCall) -> None:
        self._roll = roll
        self._orders: deque[tuple[Copy | Abandon, tuple[int, ...]]] = deque()
        """With the lives of the ranks at that time: later ones are not told."""
        self._asked: dict[OperationId, None] = {}
        """In order, each once, however often it is asked for until the next plan is taken."""
        self._sequence = 0

    def __bool__(self) -> bool:
        return bool(self._orders or self._asked)

    def ask(self, operation: OperationId) -> None:
        """Has ranks say whether they still have an operation in hand."""
        self._asked[operation] = None

    def put(self, effect: Copy | Abandon) -> None:
        """Adds something; the machine bounds what is under way, and so this."""
        self._orders.append((effect, self._roll.lives))

    def take_plan(self) -> bytes | None:
        """The next plan, if there is anything to say."""
        if not self:
            return None
        copies: list[Copy] = []
        abandoned: list[OperationId] = []
        size = 0
        lives = self._orders[0][1] if self._orders else self._roll.lives
        while self._orders and size < PLAN_BYTES:
            effect, told = self._orders[0]
            if told != lives:
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
        incarnation = self._roll.incarnation
        return encode_plan(Plan(incarnation, self._sequence, copies, abandoned, lives, asked))

    def _take_asked(self, room_bytes: int) -> list[OperationId]:
        """Questions come after the copies they are about, so only when all of those are told."""
        if self._orders:
            return []
        taken = list(islice(self._asked, max(1, room_bytes // NAME_BYTES_MAX)))
        for operation in taken:
            del self._asked[operation]
        return taken


class RollCall:
    """Which life of each rank counts: what any other one says is not heard."""

    def __init__(self, ranks: Iterable[RankFacts], incarnation: int) -> None:
        self.incarnation = incarnation
        """The life of the owner."""
        self._life = {facts.rank: facts.life for facts in ranks}
        self.heard = {rank: Numbers() for rank in self._life}
        """Which reports have come from the life that counts, of each rank."""
        self._earlier: dict[int, deque[int]] = {
            rank: deque(maxlen=LIVES_REMEMBERED) for rank in self._life
        }
        self.lives = self._in_order()
        """The life that counts of each rank, in the order of ranks."""

    def welcome(self, facts: RankFacts) -> None:
        """From now on this life of the rank counts.

        Raises:
            PeerError: it is a life that was lost: what it was told may still be under way there.
        """
        rank, life = facts.rank, facts.life
        if life == self._life[rank] or life in self._earlier[rank]:
            raise PeerError(
                f"rank {rank} is back as life {life:016x}, must be another than the one that was "
                "lost: open the rank anew, which fences what the old one was told"
            )
        self._earlier[rank].append(self._life[rank])
        self._life[rank] = life
        self.heard[rank] = Numbers()
        self.lives = self._in_order()

    def read(self, message: bytes) -> list[Report | Lost]:
        """What a report means for the owner.

        Raises:
            PeerError: it is no report, or is meant for another owner, or of a rank that there is
                not.
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
            self.heard[report.rank].add(report.sequence)
            return [
                Report(
                    operation=each.operation,
                    rank=report.rank,
                    faults=each.faults,
                    failure=each.failure,
                )
                for each in report.moved
            ]
        if report.life in self._earlier[report.rank]:
            # Of a life that was lost: all it had to do has failed, and was told so.
            return []
        return [Lost(report.rank, "it started anew without a word")]

    def _in_order(self) -> tuple[int, ...]:
        return tuple(life for _, life in sorted(self._life.items()))


class RemoteCrew:
    """Ranks that the engine's own messages reach, once a step."""

    own_way = False

    def __init__(self, ranks: Sequence[RankFacts], incarnation: int) -> None:
        self.roll = RollCall(ranks, incarnation)
        self._outbox = Outbox(self.roll)

    def order(self, effect: Copy | Abandon) -> None:
        """Puts it into the next plan."""
        self._outbox.put(effect)

    def ask(self, operation: OperationId) -> None:
        """Puts the question into a next plan."""
        self._outbox.ask(operation)

    def take_plan(self) -> bytes | None:
        """The next plan for every rank, if there is anything to say."""
        return self._outbox.take_plan()

    def collect(self, *, budget_bytes: int) -> Iterator[Report | Lost]:  # noqa: ARG002
        """Nothing: the engine hands reports over itself."""
        return iter(())

    def dispatch(self) -> None:
        """Nothing: the engine takes the plan itself."""

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """At once while a plan waits to be taken."""
        return bool(self._outbox) or bool(wait_any((), descriptors, deadline=deadline).descriptors)

    def drop(self, rank: int) -> None:
        """Nothing leads to it that could be let go; its life is not heard once it is back."""

    def release(self) -> None:
        """It has nothing of its own."""
