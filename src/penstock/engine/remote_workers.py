"""Ranks in processes of their own: how they connect to the scheduler, and how steps reach them.

    rank: RankCame ──→ scheduler           each rank dials its scheduler
    rank ←── MeetAt   scheduler            where the ranks' collectives meet, new in every life
    rank: RankLoading … ──→ scheduler
    rank: RankLoaded ──→ scheduler         its layout; steps may follow from now on
    rank ←── Step     scheduler            to all ranks; rank 0 answers with a StepResult

Two rules. A rank never meets ranks of an earlier life: it dials its scheduler first, which names a
meeting place that disappears with the scheduler's process. And when one rank is lost, all are: a
step needs every rank.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec

from penstock.engine.steps import HandedCounts, Step, StepResult
from penstock.errors import PeerError, UnavailableError
from penstock.runtime.rank_facts import RankFacts
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    ChannelClosed,
    ChannelFailed,
    Empty,
    ReceivedFrame,
)
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import connect
from penstock.transport.zmq_link import ChannelSettings
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.engine.handoffs import RankHandoffs
    from penstock.engine.worker import Worker
    from penstock.runtime.rank import Rank
    from penstock.transport.base import Channel
    from penstock.transport.zeromq import Listener

IDLE_S = 3600.0
"""The longest wait of an idle rank; a message ends it earlier."""


class RemoteWorkers:
    """The scheduler's connections to the ranks of one model."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.channels = list(channels)
        """In the order of the ranks."""
        self._reports: list[bytes] = []
        """Reports of the ranks about copies, for the cache."""
        self._answers: list[deque[StepResult]] = [deque() for _ in channels]
        self._handed = [HandedCounts() for _ in channels]

    def submit(self, step: Step) -> None:
        """Sends a step to every rank.

        Raises:
            UnavailableError: a rank is lost.
        """
        frame = encode(step)
        for channel in self.channels:
            channel.send(frame)

    def collect(self, *, deadline: float) -> StepResult | None:
        """The first rank's result of the oldest step, once every rank has finished it."""
        while not all(self._answers):
            waiting = [c for c, got in zip(self.channels, self._answers, strict=True) if not got]
            if not wait_any(waiting, deadline=deadline).channels:
                return None
            self.listen()
        results = [answers.popleft() for answers in self._answers]
        return results[0]

    def take_reports(self) -> list[bytes]:
        """The ranks' reports about copies since the last call."""
        self.listen()
        reports, self._reports = self._reports, []
        return reports

    @property
    def handed(self) -> HandedCounts:
        """The handoff counters of all ranks, by their last reports."""
        return sum(self._handed, HandedCounts())

    def listen(self) -> None:
        """Receives what has arrived.

        Raises:
            UnavailableError: a rank is lost.
            PeerError: a rank sent an invalid message.
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
        """Ends the ranks gracefully."""
        for channel in self.channels:
            if not isinstance(channel.receive(), ChannelClosed | ChannelFailed):
                channel.send(encode(End()))
            channel.close()

    def abandon(self) -> None:
        """Closes the channels without `End`: the ranks fail and are restarted."""
        for channel in self.channels:
            channel.close()


def serve_rank(
    channel: Channel, worker: Worker, rank: Rank, handed: RankHandoffs | None = None
) -> str:
    """Computes steps until the scheduler sends `End`; returns why it ended.

    Raises:
        UnavailableError: the scheduler is lost.
        PeerError: it sent an invalid message.
    """
    channel.send(encode(RankLoaded(rank.facts.to_bytes())))
    reported = HandedCounts()
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
                raise UnavailableError("the scheduler closed the channel")
            case ChannelFailed(cause):
                raise UnavailableError(f"the scheduler is lost: {cause}")
            case Empty():
                report = rank.step()
                if report is not None:
                    channel.send(encode(StepResult(0, [], [report])))
                reported = _step_handoffs(channel, handed, reported)
                _wait(channel, rank, handed)


def _step_handoffs(
    channel: Channel, handed: RankHandoffs | None, reported: HandedCounts
) -> HandedCounts:
    """Advances handoffs and reports their counters if they changed; returns the last report."""
    if handed is None:
        return reported
    handed.door.step()
    counts = handed.counts
    if counts != reported and not handed.door.has_work:
        # Parts arrive between steps, and no step may follow the last of them.
        channel.send(encode(StepResult(0, [], handed=counts)))
        return counts
    return reported


def _wait(channel: Channel, rank: Rank, handed: RankHandoffs | None) -> None:
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


VERSION = 1
DIAL_S = 300.0
"""A rank may be started long before its scheduler, which may have to be restarted."""


class RankCame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has connected."""

    rank: int


class MeetAt(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks have connected: meet the others and load your share of the model."""

    place: str
    """The file over which `torch.distributed` finds the other ranks."""


class RankLoading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank has loaded `layers` of its `of` layers."""

    rank: int
    layers: int
    of: int


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank can compute."""

    facts: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scheduler ends gracefully: no more steps."""


FromRank = RankCame | RankLoading | RankLoaded | StepResult
ToRank = MeetAt | Step | End

_from_rank: FrameCodec[FromRank] = FrameCodec(
    msgspec.msgpack.Decoder(FromRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)
_to_rank: FrameCodec[ToRank] = FrameCodec(
    msgspec.msgpack.Decoder(ToRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)


def encode(message: FromRank | ToRank) -> bytes:
    return _to_rank.encode(message)


def read_by_scheduler(frame: bytes) -> FromRank:
    """Decodes a frame from a rank.

    Raises:
        PeerError: it is not a message of a rank.
    """
    return _from_rank.decode(frame)


def read_by_rank(frame: bytes) -> ToRank:
    """Decodes a frame from a scheduler.

    Raises:
        PeerError: it is not a message of a scheduler.
    """
    return _to_rank.decode(frame)


def ignore_progress(_rank: int, _layers: int, _of: int) -> None:
    """The default of `progress`."""


def meet_ranks(
    listener: Listener,
    *,
    ranks: int,
    deadline: float,
    progress: Callable[[int, int, int], None] = ignore_progress,
) -> tuple[list[Channel], list[RankFacts]]:
    """Accepts all ranks, lets them meet each other, and waits until they have loaded.

    Raises:
        UnavailableError: they did not all connect in time, or one was lost.
        PeerError: one sent an invalid message.
    """
    came: dict[int, Channel] = {}
    try:
        _await_all(listener, came, ranks, deadline)
        # A memory file of this process: nothing is left on disk, and no later life finds it.
        place = os.memfd_create("penstock-meeting")
        try:
            for channel in came.values():
                channel.send(encode(MeetAt(f"/proc/{os.getpid()}/fd/{place}")))
            facts = _await_facts(came, deadline, progress)
        finally:
            os.close(place)
    except (UnavailableError, PeerError):
        for channel in came.values():
            channel.close()
        raise
    return [came[rank] for rank in range(ranks)], [facts[rank] for rank in range(ranks)]


def _await_all(listener: Listener, came: dict[int, Channel], ranks: int, deadline: float) -> None:
    while len(came) < ranks:
        channel = listener.accept(deadline=deadline)
        if channel is None:
            missing = sorted(set(range(ranks)) - set(came))
            raise UnavailableError(f"ranks {missing} of {ranks} did not connect in time")
        said = channel.receive(deadline=deadline)
        message = read_by_scheduler(said.frame) if isinstance(said, ReceivedFrame) else None
        if not isinstance(message, RankCame):
            # A rank that died while it connected; it is restarted and connects again.
            channel.close()
            continue
        if not 0 <= message.rank < ranks:
            raise PeerError(f"rank {message.rank} came, must be from 0 to {ranks - 1}")
        earlier = came.pop(message.rank, None)
        if earlier is not None:
            earlier.close()
        came[message.rank] = channel


def _await_facts(
    came: Mapping[int, Channel], deadline: float, progress: Callable[[int, int, int], None]
) -> dict[int, RankFacts]:
    found: dict[int, RankFacts] = {}
    while len(found) < len(came):
        waiting = [channel for rank, channel in came.items() if rank not in found]
        if not wait_any(waiting, deadline=deadline).channels:
            missing = sorted(set(came) - set(found))
            raise UnavailableError(f"ranks {missing} did not load their weights in time")
        for rank, channel in came.items():
            while rank not in found and channel.ready:
                said = channel.receive()
                if not isinstance(said, ReceivedFrame):
                    raise UnavailableError(f"rank {rank} was lost while it loaded: {said}")
                match read_by_scheduler(said.frame):
                    case RankLoading(_, layers, of):
                        progress(rank, layers, of)
                    case RankLoaded(facts):
                        found[rank] = RankFacts.from_bytes(facts)
                    case unexpected:
                        raise PeerError(f"rank {rank} said {unexpected} before it had loaded")
    return found


def join(address: str, *, name: str, rank: int, secret: bytes) -> tuple[Channel, str]:
    """Connects a rank to its scheduler; returns the channel, and where to meet the other ranks.

    Raises:
        UnavailableError: the scheduler did not answer in time, or is gone.
    """
    deadline = time.monotonic() + DIAL_S
    settings = ChannelSettings(open_s=DIAL_S)
    channel = connect(address, name=name, deadline=deadline, secret=secret, settings=settings)
    channel.send(encode(RankCame(rank)))
    said = channel.receive(deadline=deadline)
    message = read_by_rank(said.frame) if isinstance(said, ReceivedFrame) else None
    if not isinstance(message, MeetAt):
        channel.close()
        raise UnavailableError(f"rank {rank} got no meeting place: {message or said}")
    return channel, message.place
