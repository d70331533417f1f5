"""Ranks in processes of their own: a step goes to all of them, and one answers with tokens.

    scheduler's process:   channels, facts = meet_ranks(listener, ranks=2, deadline=…)
                           workers = RemoteWorkers(channels)
    each rank's process:   serve_rank(channel, worker, rank)

Copies travel with the steps: a step carries the plan, its results carry the reports. A step
without tokens carries a plan alone.

The one rule: a rank that is lost ends the instance. Half a model computes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from penstock.engine.rendezvous import End, RankLoaded, encode, read_by_rank, read_by_scheduler
from penstock.engine.steps import HandedCounts, Step, StepResult
from penstock.errors import PeerError, UnavailableError
from penstock.transport.base import ChannelClosed, ChannelFailed, Empty, ReceivedFrame
from penstock.transport.waiting import wait_any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.handoffs import RankHandoffs
    from penstock.engine.worker import Worker
    from penstock.runtime.rank import Rank
    from penstock.transport.base import Channel

IDLE_S = 3600.0
"""The longest wait of an idle rank; a message wakes it before."""


class RemoteWorkers:
    """The ranks of one model, as their scheduler sees them."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = list(channels)
        """In the order of the ranks."""
        self._reports: list[bytes] = []
        """What the ranks said about copies, for the owner of the cache."""
        self._answers: list[deque[StepResult]] = [deque() for _ in channels]
        self._handed = [HandedCounts() for _ in channels]

    def submit(self, step: Step) -> None:
        """Hands a step to every rank.

        Raises:
            UnavailableError: a rank is lost.
        """
        frame = encode(step)
        for channel in self.channels:
            channel.send(frame)

    def collect(self, *, deadline: float) -> StepResult | None:
        """The first rank's answer to the oldest step, once every rank has answered it."""
        while not all(self._answers):
            waiting = [c for c, got in zip(self.channels, self._answers, strict=True) if not got]
            if not wait_any(waiting, deadline=deadline).channels:
                return None
            self.listen()
        results = [answers.popleft() for answers in self._answers]
        return results[0]

    def take_reports(self) -> list[bytes]:
        """What the ranks said about copies since the last call."""
        self.listen()
        reports, self._reports = self._reports, []
        return reports

    @property
    def handed(self) -> HandedCounts:
        """What all ranks have handed over, or taken in, as they last told."""
        return sum(self._handed, HandedCounts())

    def listen(self) -> None:
        """Takes in what has arrived.

        Raises:
            UnavailableError: a rank is lost.
            PeerError: a rank said what makes no sense.
        """
        for rank, channel in enumerate(self.channels):
            while not isinstance(said := channel.receive(), Empty):
                if isinstance(said, ChannelClosed | ChannelFailed):
                    raise UnavailableError(f"rank {rank} is lost: {said}")
                result = read_by_scheduler(said.frame)
                if not isinstance(result, StepResult):
                    raise PeerError(f"rank {rank} said {result}, must be the result of a step")
                self._reports += result.reports
                if result.handed is not None:
                    self._handed[rank] = result.handed
                if result.number:
                    self._answers[rank].append(result)

    def close(self) -> None:
        """Tells the ranks that nothing more will come, and that all is well."""
        for channel in self.channels:
            if not isinstance(channel.receive(), ChannelClosed | ChannelFailed):
                channel.send(encode(End()))
            channel.close()

    def abandon(self) -> None:
        """Leaves the ranks without a word: they end as failed, and are started anew."""
        for channel in self.channels:
            channel.close()


def serve_rank(
    channel: Channel, worker: Worker, rank: Rank, handed: RankHandoffs | None = None
) -> str:
    """Computes what arrives until the scheduler says that this is the end.

    Raises:
        UnavailableError: the scheduler is lost.
        PeerError: it said what makes no sense.
    """
    channel.send(encode(RankLoaded(rank.facts.to_bytes())))
    told = HandedCounts()
    while True:
        match channel.receive():
            case ReceivedFrame(frame):
                message = read_by_rank(frame)
                if isinstance(message, End):
                    return "the scheduler ended"
                if not isinstance(message, Step):
                    raise PeerError(f"the scheduler said {message}, must be a step or the end")
                channel.send(encode(_computed(message, worker, rank, handed)))
            case ChannelClosed():
                raise UnavailableError("the scheduler left without a word")
            case ChannelFailed(cause):
                raise UnavailableError(f"the scheduler is lost: {cause}")
            case Empty():
                report = rank.step()
                if report is not None:
                    channel.send(encode(StepResult(0, [], [report])))
                told = _hand_over(channel, handed, told)
                _wait(channel, rank, handed)


def _hand_over(channel: Channel, handed: RankHandoffs | None, told: HandedCounts) -> HandedCounts:
    """Lets handoffs advance; tells what was handed over, and returns it, if that has changed."""
    if handed is None:
        return told
    handed.door.step()
    counts = handed.counts
    if counts != told and not handed.door.has_work:
        # Parts come between steps: no step may follow the last of them.
        channel.send(encode(StepResult(0, [], handed=counts)))
        return counts
    return told


def _wait(channel: Channel, rank: Rank, handed: RankHandoffs | None) -> None:
    """Waits for something to do."""
    deadline = time.monotonic() + IDLE_S
    if handed is None:
        rank.wait(deadline, channels=[channel])
        return
    door = handed.door
    if door.has_work:
        return
    due = door.next_deadline()
    channels = cast("list[Channel]", [channel, *door.waitables])
    rank.wait(
        deadline if due is None else min(due, deadline),
        channels=channels,
        descriptors=door.descriptors,
    )


def _computed(step: Step, worker: Worker, rank: Rank, handed: RankHandoffs | None) -> StepResult:
    if step.plan is not None:
        rank.take(step.plan)
    result = worker.execute(step) if step.spans else StepResult(step.number, [])
    report = rank.step()
    reports = [] if report is None else [report]
    counts = None if handed is None else handed.counts
    return msgspec.structs.replace(result, reports=reports, handed=counts)
