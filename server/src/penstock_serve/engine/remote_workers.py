"""Ranks in processes of their own: how they connect to the scheduler, and how steps reach them.

    rank: RankCame ──→ scheduler           each rank dials its scheduler
    rank ←── MeetAt   scheduler            where the ranks' collectives meet, new in every life
    rank: RankLoading … ──→ scheduler
    rank: RankLoaded ──→ scheduler         its layout; steps may follow from now on
    rank ←── Step     scheduler            to all ranks; rank 0 answers with a StepResult
    rank ←── LoadRank scheduler            other weights; every rank answers with RankDone
    rank ←── FreeRank scheduler            memory to give back; the same
    rank ←── WakeRank scheduler            memory to take again; the same

Two rules. A rank never meets ranks of an earlier life: it dials its scheduler first, which names a
meeting place that disappears with the scheduler's process. And when one rank is lost, all are: a
step needs every rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec

from penstock import RankFacts
from penstock.errors import CapacityError, PeerError, UnavailableError
from penstock.toolkit import (
    FRAME_BYTES_MAX,
    ChannelClosed,
    ChannelFailed,
    ChannelSettings,
    Empty,
    FrameCodec,
    ReceivedFrame,
    connect,
    wait_any,
)
from penstock_serve.engine.checkpoints import WeightsNotLoaded
from penstock_serve.engine.engine import Workers

# msgspec reads the annotations when a message arrives, so this import must be real.
from penstock_serve.engine.spec import PairSpec  # noqa: TC001
from penstock_serve.engine.steps import HandedCounts, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock import Rank
    from penstock.toolkit import Channel, Listener, Secret
    from penstock_serve.engine.peers import Peers
    from penstock_serve.engine.worker import Worker

logger = logging.getLogger("penstock.engine.remote_workers")

ORDER_S = 600.0
"""The timeout of an order to all ranks: large weights take minutes to load."""
IDLE_S = 3600.0
"""The longest wait of an idle rank; a message ends it earlier."""


class RemoteWorkers(Workers):
    """The scheduler's connections to the ranks of one model."""

    def __init__(self, channels: Sequence[Channel], handoff_addresses: Sequence[str] = ()) -> None:
        self.handoff_addresses = list(handoff_addresses)
        self.channels = list(channels)
        """In the order of the ranks."""
        self._reports: list[bytes] = []
        """Reports of the ranks about copies, for the cache."""
        self._answers: list[deque[StepResult]] = [deque() for _ in channels]
        self._handed = [HandedCounts() for _ in channels]
        self._done: dict[int, RankDone] = {}
        """The ranks' answers to the order under way."""

    def submit(self, step: Step) -> None:
        """Sends a step to every rank.

        Raises `UnavailableError`: a rank is lost.
        """
        self._send(step)

    def _send(self, message: ToRank) -> None:
        frame = encode(message)
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

    def open_pair(self, pair: PairSpec, *, weights: str) -> None:
        """Ranks open their part of a pair before their next step.

        Raises `UnavailableError`: a rank is lost.
        """
        self._send(OpenRankPair(pair, weights))

    def close_pair(self, prefill: str, decode: str) -> None:
        """Ranks close it before their next step.

        Raises `UnavailableError`: a rank is lost.
        """
        self._send(CloseRankPair(prefill, decode))

    def load_weights(self, path: str, digest: str) -> None:
        """Replaces the weights of every rank; no step may be under way.

        Raises `WeightsNotLoaded`: a rank could not load them, or not in time; `UnavailableError`: a
        rank is lost.
        """
        self._order(LoadRank(path, digest), WeightsNotLoaded)

    def give_back(self, tiers: Sequence[str], *, weights: bool = False) -> None:
        """Every rank returns memory to the system; no step or copy may use it.

        Raises `UnavailableError`: a rank could not, or is lost.
        """
        self._order(FreeRank(list(tiers), weights))

    def take_again(self) -> None:
        """Every rank takes memory of a GPU again that it gave back.

        Raises `UnavailableError`: a rank could not, or is lost.
        """
        self._order(WakeRank())

    def _order(self, order: RankOrder, failure: type[UnavailableError] = UnavailableError) -> None:
        """Gives every rank an order; raises `failure` if one could not carry it out."""
        self._done.clear()
        self._send(order)
        deadline = time.monotonic() + ORDER_S
        while len(self._done) < len(self.channels):
            waiting = [c for rank, c in enumerate(self.channels) if rank not in self._done]
            if not wait_any(waiting, deadline=deadline).channels:
                # Its answer would be taken for that to the next order.
                raise UnavailableError(f"a rank did not answer within {ORDER_S:g} s")
            self.listen()
        problems = [
            f"rank {rank}: {done.problem}"
            for rank, done in sorted(self._done.items())
            if done.problem
        ]
        if problems:
            raise failure("; ".join(problems))

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

        Raises `UnavailableError`: a rank is lost; `PeerError`: a rank sent an invalid message.
        """
        for rank, channel in enumerate(self.channels):
            while not isinstance(said := channel.receive(), Empty):
                if isinstance(said, ChannelClosed | ChannelFailed):
                    raise UnavailableError(f"rank {rank} is lost: {said}")
                result = read_by_scheduler(said.frame)
                if isinstance(result, RankDone):
                    self._done[rank] = result
                    continue
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


def serve_rank(channel: Channel, worker: Worker, rank: Rank, handed: Peers | None = None) -> str:
    """Computes steps until the scheduler sends `End`; returns why it ended.

    Raises `UnavailableError`: the scheduler is lost; `PeerError`: it sent an invalid message.
    """
    address = "" if handed is None else handed.address
    channel.send(encode(RankLoaded(rank.facts.to_bytes(), address)))
    reported = HandedCounts()
    while True:
        match channel.receive():
            case ReceivedFrame(frame):
                message = read_by_rank(frame)
                if isinstance(message, End):
                    return "the scheduler ended"
                _carry_out(message, channel, worker, rank, handed)
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


def _carry_out(
    message: ToRank, channel: Channel, worker: Worker, rank: Rank, handed: Peers | None
) -> None:
    match message:
        case Step():
            channel.send(encode(_computed(message, worker, rank, handed)))
        case OpenRankPair() | CloseRankPair():
            _change_pairs(message, handed)
        case LoadRank() | FreeRank() | WakeRank():
            channel.send(encode(RankDone(_problem_of(message, worker, rank))))
        case _:
            raise PeerError(f"the scheduler said {message}, must be a step or the end")


def _change_pairs(message: OpenRankPair | CloseRankPair, handed: Peers | None) -> None:
    """A rank that cannot open its part of a pair logs why; its scheduler waits for it in vain."""
    if handed is None:
        raise PeerError(f"the scheduler said {message}, and this rank takes part in no handoffs")
    if isinstance(message, CloseRankPair):
        handed.close_pair(message.prefill, message.decode)
        return
    try:
        handed.open(message.pair, weights=message.weights)
    except (ValueError, UnavailableError, CapacityError) as error:
        pair = message.pair
        names = (pair.prefill.name, pair.decode.name)
        logger.warning("pair not opened: prefill=%s decode=%s cause=%s", *names, error)


def _problem_of(order: RankOrder, worker: Worker, rank: Rank) -> str:
    """Carries out an order; returns why it could not, empty if it could.

    Raises `UnavailableError`: the weights were read, and the device failed.
    """
    try:
        match order:
            case LoadRank():
                worker.load_weights(order.path, order.digest)
            case FreeRank():
                for tier in order.tiers:
                    rank.give_back(tier)
                if order.weights:
                    worker.give_back_weights()
            case WakeRank():
                rank.take_again()
    except WeightsNotLoaded as error:
        return str(error)
    except (UnavailableError, ValueError) as error:
        if not isinstance(order, FreeRank | WakeRank):
            raise
        return str(error)
    return ""


def _step_handoffs(channel: Channel, handed: Peers | None, reported: HandedCounts) -> HandedCounts:
    """Advances handoffs and reports their counters if they changed; returns the last report."""
    if handed is None:
        return reported
    handed.step()
    counts = handed.counts
    if counts != reported and not handed.has_work:
        # Parts arrive between steps, and no step may follow the last of them.
        channel.send(encode(StepResult(0, [], handed=counts)))
        return counts
    return reported


def _wait(channel: Channel, rank: Rank, handed: Peers | None) -> None:
    deadline = time.monotonic() + IDLE_S
    if handed is None:
        rank.wait(deadline, channels=[channel])
        return
    if handed.has_work:
        return
    due = handed.next_deadline()
    channels = cast("list[Channel]", [channel, *handed.waitables])
    rank.wait(
        deadline if due is None else min(due, deadline),
        channels=channels,
        descriptors=handed.descriptors,
    )


def _computed(step: Step, worker: Worker, rank: Rank, handed: Peers | None) -> StepResult:
    if step.plan is not None:
        rank.take(step.plan)
    result = worker.execute(step) if step.spans else StepResult(step.number, [])
    report = rank.step()
    reports = [] if report is None else [report]
    counts = None if handed is None else handed.counts
    return msgspec.structs.replace(result, reports=reports, handed=counts)


VERSION = 4
DIAL_S = 300.0
"""A rank may be started long before its scheduler, which may have to be restarted."""
DIAL_AGAIN_S = 20.0
"""The timeout of one attempt to connect."""


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
    handoff_address: str = ""
    """Where it accepts other instances for handoffs, if it takes part in them."""


class OpenRankPair(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A pair with another instance is opened: the rank opens its part."""

    pair: PairSpec
    weights: str
    """The version of the weights, which may have changed since the rank was started."""


class CloseRankPair(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A pair is closed: nothing is read or written for it after this."""

    prefill: str
    decode: str


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The scheduler ends gracefully: no more steps."""


class LoadRank(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Replace the weights."""

    path: str
    digest: str


class FreeRank(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give memory back to the system."""

    tiers: list[str]
    weights: bool


class WakeRank(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take memory of a GPU again that was given back."""


class RankDone(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's answer to an order."""

    problem: str
    """Why it was not carried out; empty if it was."""


RankOrder = LoadRank | FreeRank | WakeRank
"""What every rank carries out and answers with `RankDone`."""
FromRank = RankCame | RankLoading | RankLoaded | StepResult | RankDone
ToRank = MeetAt | Step | OpenRankPair | CloseRankPair | RankOrder | End

_from_rank: FrameCodec[FromRank] = FrameCodec(
    msgspec.msgpack.Decoder(FromRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)
_to_rank: FrameCodec[ToRank] = FrameCodec(
    msgspec.msgpack.Decoder(ToRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)


def encode(message: FromRank | ToRank) -> bytes:
    return _to_rank.encode(message)


read_by_scheduler = _from_rank.decode
"""Decodes a frame from a rank; raises `PeerError`: it is not a message of a rank."""
read_by_rank = _to_rank.decode
"""Decodes a frame from a scheduler; raises `PeerError`: it is not a message of a scheduler."""


def ignore_progress(_rank: int, _layers: int, _of: int) -> None:
    """The default of `progress`."""


class MetRanks(NamedTuple):
    """The ranks of an instance, in their order."""

    channels: list[Channel]
    facts: list[RankFacts]
    handoff_addresses: list[str]
    """Where each accepts other instances for handoffs; empty: nowhere."""


def meet_ranks(
    listener: Listener,
    *,
    ranks: int,
    deadline: float,
    progress: Callable[[int, int, int], None] = ignore_progress,
) -> MetRanks:
    """Accepts all ranks, lets them meet each other, and waits until they have loaded.

    Raises `UnavailableError`: they did not all connect in time, or one was lost; `PeerError`: one
    sent an invalid message.
    """
    came: dict[int, Channel] = {}
    try:
        _await_all(listener, came, ranks, deadline)
        # A memory file of this process: nothing is left on disk, and no later life finds it.
        place = os.memfd_create("penstock-meeting")
        try:
            meeting = MeetAt(f"/proc/{os.getpid()}/fd/{place}")
            for channel in came.values():
                channel.send(encode(meeting))
            loaded = _await_loaded(came, deadline, progress)
        finally:
            os.close(place)
    except (UnavailableError, PeerError):
        for channel in came.values():
            channel.close()
        raise
    return MetRanks(
        [came[rank] for rank in range(ranks)],
        [RankFacts.from_bytes(loaded[rank].facts) for rank in range(ranks)],
        [loaded[rank].handoff_address for rank in range(ranks)],
    )


def _await_all(listener: Listener, came: dict[int, Channel], ranks: int, deadline: float) -> None:
    """Accepts all ranks."""
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


def _await_loaded(
    came: Mapping[int, Channel], deadline: float, progress: Callable[[int, int, int], None]
) -> dict[int, RankLoaded]:
    found: dict[int, RankLoaded] = {}
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
                    case RankLoaded() as loaded:
                        found[rank] = loaded
                    case unexpected:
                        raise PeerError(f"rank {rank} said {unexpected} before it had loaded")
    return found


def join(
    address: str, *, name: str, rank: int, secret: Secret, silence_s: float
) -> tuple[Channel, str]:
    """Connects a rank to its scheduler; returns the channel, and where to meet the other ranks.

    Raises `UnavailableError`: the scheduler did not answer in time, or is gone.
    """
    deadline = time.monotonic() + DIAL_S
    settings = ChannelSettings(open_s=DIAL_AGAIN_S, silence_s=silence_s)
    channel = _dial(address, name, secret, deadline, settings)
    channel.send(encode(RankCame(rank)))
    said = channel.receive(deadline=deadline)
    message = read_by_rank(said.frame) if isinstance(said, ReceivedFrame) else None
    if isinstance(message, MeetAt):
        return channel, message.place
    channel.close()
    raise UnavailableError(f"rank {rank} got no meeting place: {message or said}")


def _dial(
    address: str, name: str, secret: Secret, deadline: float, settings: ChannelSettings
) -> Channel:
    """Connects to a scheduler; logs each cause once while that takes longer than it should."""
    logged = ""
    while True:
        again_at = min(time.monotonic() + DIAL_AGAIN_S, deadline)
        try:
            return connect(address, name=name, deadline=again_at, secret=secret, settings=settings)
        except UnavailableError as error:
            # Whoever refuses at once is not asked again and again: the process is started anew.
            if time.monotonic() < again_at or again_at >= deadline:
                raise
            if str(error) != logged:
                logger.warning("scheduler not joined yet: name=%s cause=%s", name, error)
                logged = str(error)
