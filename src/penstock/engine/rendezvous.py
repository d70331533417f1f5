"""How a scheduler and its ranks find each other, anew in every life.

    rank: RankCame ──→ scheduler           until all have come
    rank ←── MeetAt   scheduler          where their collectives meet: a place of this life alone
    rank: RankLoading … ──→ scheduler
    rank: RankLoaded ──→ scheduler         its facts; steps may come from now on

The one rule: a rank never meets ranks of another life. It dials its scheduler first, which tells
it where to meet, and that place is gone with the scheduler's process.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.steps import Step, StepResult
from penstock.errors import PeerError, UnavailableError
from penstock.runtime.rank_facts import RankFacts
from penstock.transport.base import FRAME_BYTES_MAX, ReceivedFrame
from penstock.transport.waiting import wait_any
from penstock.transport.zeromq import connect
from penstock.transport.zmq_link import ChannelSettings
from penstock.vocabulary.frames import FrameCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.transport.base import Channel
    from penstock.transport.zeromq import Listener

VERSION = 1
DIAL_S = 300.0
"""A rank may be started long before its scheduler, which waits for its restart."""


class RankCame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank is there."""

    rank: int


class MeetAt(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All ranks are there: load your share of the model."""

    place: str
    """The file over which `torch.distributed` finds the other ranks."""


class RankLoading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How many of its layers a rank has read."""

    rank: int
    layers: int
    of: int


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank can compute."""

    facts: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing more will come, and all is well."""


FromRank = RankCame | RankLoading | RankLoaded | StepResult
ToRank = MeetAt | Step | End

_from_rank: FrameCodec[FromRank] = FrameCodec(
    msgspec.msgpack.Decoder(FromRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)
_to_rank: FrameCodec[ToRank] = FrameCodec(
    msgspec.msgpack.Decoder(ToRank), version=VERSION, bytes_max=FRAME_BYTES_MAX
)


def encode(message: FromRank | ToRank) -> bytes:
    """A message as a frame."""
    return _to_rank.encode(message)


def read_by_scheduler(frame: bytes) -> FromRank:
    """A frame from a rank.

    Raises:
        PeerError: it is none of the messages that a rank sends.
    """
    return _from_rank.decode(frame)


def read_by_rank(frame: bytes) -> ToRank:
    """A frame from a scheduler.

    Raises:
        PeerError: it is none of the messages that a scheduler sends.
    """
    return _to_rank.decode(frame)


def nobody(_rank: int, _layers: int, _of: int) -> None:
    """Nobody wants to know how far the ranks are."""


def meet_ranks(
    listener: Listener,
    *,
    ranks: int,
    deadline: float,
    progress: Callable[[int, int, int], None] = nobody,
) -> tuple[list[Channel], list[RankFacts]]:
    """Lets all ranks in, has them meet each other, and waits until they have loaded.

    Raises:
        UnavailableError: they did not all come in time, or one was lost.
        PeerError: one said what makes no sense.
    """
    came: dict[int, Channel] = {}
    try:
        _await_all(listener, came, ranks, deadline)
        # Memory that only this process keeps: no file is left, and no later life finds it.
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
            raise UnavailableError(f"ranks {missing} of {ranks} did not come in time")
        said = channel.receive(deadline=deadline)
        message = read_by_scheduler(said.frame) if isinstance(said, ReceivedFrame) else None
        if not isinstance(message, RankCame):
            # A rank that died while it came: its next life will come, too.
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
    """A rank's way in: the channel to its scheduler, and where to meet the other ranks.

    Raises:
        UnavailableError: the scheduler did not answer in time, or went away.
    """
    deadline = time.monotonic() + DIAL_S
    settings = ChannelSettings(open_s=DIAL_S)
    channel = connect(address, name=name, deadline=deadline, secret=secret, settings=settings)
    channel.send(encode(RankCame(rank)))
    said = channel.receive(deadline=deadline)
    message = read_by_rank(said.frame) if isinstance(said, ReceivedFrame) else None
    if not isinstance(message, MeetAt):
        channel.close()
        raise UnavailableError(f"rank {rank} was not told where to meet: {message or said}")
    return channel, message.place
