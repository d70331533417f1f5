"""Plans and reports over channels, where they do not travel with the engine's own messages.

    rank's process:      serve(channel, rank, until=…)
    owner's process:     facts = [meet(channel, deadline=…) for channel in channels]
                         cache = penstock.open_owner(config, ranks=facts, channels=channels)

The rank speaks first: its facts. Then plans come, and reports go. The one rule: the end of a
channel is the end of a rank. Whatever the cause, the owner fails what the rank had to do, says
so, and takes nothing more from that life of it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from penstock.errors import PeerError, UnavailableError
from penstock.runtime.crew import Lost, Outbox, RollCall
from penstock.runtime.facts import RankFacts
from penstock.transport.base import BacklogError, Closed, Empty, Failed, Item
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.machine.effects import Abandon, Copy
    from penstock.machine.events import Report
    from penstock.runtime.rank import Rank
    from penstock.transport.base import Channel
    from penstock.vocabulary.ids import OperationId

BACKLOG_PLANS_MAX = 4096
"""So many plans may wait for a rank that takes none, beside those that its channel holds: minutes
of an engine's steps. Then the rank counts as lost."""
FRAMES_MAX = 1024
"""A step takes at most so many frames from one channel, so that it ends."""
RETRY_S = 0.05
"""When a channel is full, another attempt is made so soon: no descriptor tells when there is room
again. It takes an end that has not listened for a thousand messages."""


LAST_WORDS_S = 1.0
"""So long a rank that ends tries to have its last report taken, beside what it may drain."""


def meet(channel: Channel, *, deadline: float) -> RankFacts:
    """The facts of the rank at the other end of a channel, which it tells first.

    Raises:
        PeerError: it says something else.
        UnavailableError: it says nothing before `deadline`, or is gone.
    """
    match channel.receive(deadline=deadline):
        case Item(frame):
            return RankFacts.from_bytes(frame)
        case Empty():
            raise UnavailableError(
                f"the rank behind channel {channel.name!r} told no facts in time"
            )
        case Closed():
            raise UnavailableError(f"the rank behind channel {channel.name!r} closed it")
        case Failed(cause):
            raise UnavailableError(f"the rank behind channel {channel.name!r} is lost: {cause}")


def serve(
    channel: Channel,
    rank: Rank,
    *,
    until: float,
    descriptors: Sequence[int] = (),
    drain_s: float = 0.0,
) -> str:
    """Executes what arrives on a channel, in the process of a rank; returns why it ended.

    It ends when the owner closes the channel or is lost, at `until` on the monotonic clock, or
    when one of `descriptors` can be read, such as that of a `StopSignal`. Where the owner is
    still there it hears the end: copies may end for `drain_s`, the rest is cut short, and the
    last report is sent. The rank stays open, but is not served again: close it, and the channel.

    Raises:
        PeerError: the owner said what makes no sense to this rank. As with any other error here,
            the channel is closed: the owner must not wait for a rank that does nothing more.
        UnavailableError: the device does not end its copies.
        ValueError: the rank was served before.
    """
    if rank.served:
        raise ValueError(
            f"rank {rank.facts.rank} was served before, must be opened anew: its owner has given "
            "up on this life of it"
        )
    rank.served = True
    with ExitStack() as undo:
        undo.callback(channel.close)
        why, reports = _serve(channel, rank, until, descriptors)
        if why in _OWN_ENDS:
            _tell_the_end(channel, rank, reports, drain_s)
        undo.pop_all()
    return why


STOPPED = "it was asked to stop"
OVER = "its time was over"
_OWN_ENDS = frozenset({STOPPED, OVER})
"""After these the owner is still there, and hears what became of its copies."""


def _serve(
    channel: Channel, rank: Rank, until: float, descriptors: Sequence[int]
) -> tuple[str, deque[bytes]]:
    """Why it ended, and the reports that were not sent yet."""
    reports = deque([rank.facts.to_bytes()])
    while True:
        ended = take_plans(channel, rank)
        if ended:
            return ended, reports
        report = rank.step()
        if report is not None:
            reports.append(report)
        try:
            retry_at = until if send_all(channel, reports) else time.monotonic() + RETRY_S
        except UnavailableError:
            continue  # What has happened to the owner, the next `receive` tells.
        rank.wait(min(until, retry_at), channels=[channel], descriptors=descriptors)
        if wait_any((), descriptors, deadline=None).descriptors:
            return STOPPED, reports
        if time.monotonic() >= until:
            return OVER, reports


def _tell_the_end(channel: Channel, rank: Rank, reports: deque[bytes], drain_s: float) -> None:
    """Drains and fences, and sends what there is to say within the same deadline, and a while."""
    deadline = time.monotonic() + drain_s + LAST_WORDS_S
    last = rank.finish(drain_s)
    if last is not None:
        reports.append(last)
    with suppress(UnavailableError):  # The owner is lost, and needs to hear nothing.
        while not send_all(channel, reports) and time.monotonic() < deadline:
            # No descriptor tells when there is room; the channel's own may, and costs nothing.
            wait_any([channel], (), deadline=min(deadline, time.monotonic() + RETRY_S))


class LinkedCrew:
    """Ranks that channels of the runtime reach."""

    own_way = True

    def __init__(
        self, ranks: Sequence[RankFacts], channels: Sequence[Channel], incarnation: int
    ) -> None:
        self.roll = RollCall(ranks, incarnation)
        self._outbox = Outbox(self.roll)
        self._links = {
            facts.rank: _Link(channel) for facts, channel in zip(ranks, channels, strict=True)
        }

    def order(self, effect: Copy | Abandon) -> None:
        """Puts it into the next plan."""
        self._outbox.put(effect)

    def ask(self, operation: OperationId) -> None:
        """Puts the question into a next plan."""
        self._outbox.ask(operation)

    def collect(self, *, budget_bytes: int) -> Iterator[Report | Lost]:  # noqa: ARG002
        """What has arrived from the ranks, without waiting."""
        for rank, link in list(self._links.items()):
            yield from self._listen(rank, link)

    def dispatch(self) -> None:
        """Sends what was ordered to every rank that is there."""
        while (plan := self._outbox.take_plan()) is not None:
            for link in self._links.values():
                link.backlog.append(plan)
        for link in self._links.values():
            link.send()

    def wait(self, deadline: float, *, descriptors: Sequence[int]) -> bool:
        """At once while a plan waits to be sent; else until a rank speaks."""
        if self._outbox:
            return True
        channels = [link.channel for link in self._links.values()]
        retry_at = time.monotonic() + RETRY_S
        full = any(link.backlog for link in self._links.values()) and retry_at < deadline
        ready = wait_any(channels, descriptors, deadline=retry_at if full else deadline)
        return full or bool(ready.channels or ready.descriptors)

    def drop(self, rank: int) -> None:
        """Lets go of a rank that is lost: it is told nothing more, and not heard."""
        link = self._links.pop(rank, None)
        if link is not None:
            link.channel.close()

    def join(self, rank: int, channel: Channel) -> None:
        """Reaches a rank that is back by this channel."""
        self.drop(rank)
        self._links[rank] = _Link(channel)

    def release(self) -> None:
        """Closes the channels: ranks see it, fence what they have, and end."""
        for rank in list(self._links):
            self.drop(rank)

    def _listen(self, rank: int, link: _Link) -> Iterator[Report | Lost]:
        heard: list[Report | Lost]
        for _ in range(FRAMES_MAX):
            match link.channel.receive():
                case Item(frame):
                    heard = self._read(rank, frame)
                case Empty():
                    break
                case Closed():
                    heard = [Lost(rank, "it closed its channel")]
                case Failed(cause):
                    heard = [Lost(rank, cause)]
            yield from self._unless_lost(heard)
            if rank not in self._links:
                return
        if len(link.backlog) > BACKLOG_PLANS_MAX:
            yield from self._unless_lost([Lost(rank, f"{len(link.backlog)} plans wait for it")])

    def _read(self, rank: int, frame: bytes) -> list[Report | Lost]:
        try:
            heard = self.roll.read(frame)
        except PeerError as error:
            return [Lost(rank, str(error))]
        for each in heard:
            if each.rank != rank:
                # Told apart now: when a channel ends, the wrong rank would be taken for dead.
                problem = f"its channel brings a report of rank {each.rank}"
                return [Lost(rank, f"{problem}, must bring those of rank {rank}")]
        return heard

    def _unless_lost(self, heard: list[Report | Lost]) -> Iterator[Report | Lost]:
        """The same, after letting go of a rank that is lost."""
        for each in heard:
            if isinstance(each, Lost):
                self.drop(each.rank)
            yield each


class _Link:
    """The way to one rank, and the plans it has not taken yet."""

    __slots__ = ("backlog", "channel")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.backlog: deque[bytes] = deque()

    def send(self) -> None:
        """Sends what the channel takes; what is wrong with it, the next `receive` tells."""
        with suppress(UnavailableError):
            send_all(self.channel, self.backlog)


def send_all(channel: Channel, frames: deque[bytes]) -> bool:
    """Sends frames for as long as the channel takes them; whether it took all."""
    while frames:
        try:
            channel.send(frames[0])
        except BacklogError:
            return False
        frames.popleft()
    return True


def take_plans(channel: Channel, rank: Rank) -> str:
    """Hands what has arrived to a rank; returns why nothing more will come, if so."""
    while True:
        match channel.receive():
            case Item(frame):
                rank.take(frame)
            case Empty():
                return ""
            case Closed():
                return "the owner closed the channel"
            case Failed(cause):
                return f"the owner is lost: {cause}"
