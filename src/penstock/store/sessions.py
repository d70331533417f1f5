"""One client of the store process: its connection, what it said, and the answers that wait for it.

Answers are collected while requests are carried out, and leave together, in frames of bounded
size. The one rule: a client that does not read costs a bounded amount of memory, and then its
session.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import PeerError
from penstock.store.messages import FRAME_BYTES_MAX, SessionRefused, answer_frames, answers, short
from penstock.transport.packets import receive_packet, send_packet

if TYPE_CHECKING:
    import socket

    from penstock.store.base import MappedArena
    from penstock.store.messages import AnyStoreAnswer, OwnerHello
    from penstock.store.tier_slots import TierSlot
    from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
    from penstock.transport.packets import Packet

OUTPUT_BYTES_MAX = 8 << 20
"""Answers that may wait for a client: those of thousands of jobs. With more it is cut off."""


class ClientSession:
    """A connection that was accepted. `answer` collects, `flush` sends."""

    def __init__(self, channel: socket.socket, *, pid: int, opened_at: float) -> None:
        self.pid = pid
        self.opened_at = opened_at
        self.greeted = False
        """Whether it has said what it is for."""
        self.is_open = True
        self.waits_for_room = False
        """Whether its loop waits until more can be sent."""
        self._channel = channel
        self._answers: list[AnyStoreAnswer] = []
        self._frames: deque[bytes] = deque()
        self._frames_bytes = 0

    @property
    def descriptor(self) -> int:
        return self._channel.fileno()

    @property
    def has_output(self) -> bool:
        return bool(self._answers or self._frames)

    def receive(self) -> Packet | Empty | ChannelClosed | ChannelFailed:
        """The next packet, if there is one; the caller owns its descriptors."""
        return receive_packet(self._channel, FRAME_BYTES_MAX)

    def answer(self, answer: AnyStoreAnswer) -> None:
        """Adds an answer to the next batch; goes nowhere once the session has ended."""
        if self.is_open:
            self._answers.append(answer)

    def flush(self) -> bool:
        """Sends what waits; whether some is left for lack of room.

        Raises:
            PeerError: too much waits.
            OSError: the client has gone.
        """
        for frame in answer_frames(self._answers):
            self._frames.append(frame)
            self._frames_bytes += len(frame)
        self._answers.clear()
        while self._frames and send_packet(self._channel, self._frames[0]):
            self._frames_bytes -= len(self._frames.popleft())
        if self._frames_bytes > OUTPUT_BYTES_MAX:
            raise PeerError(f"{self._frames_bytes} bytes of answers wait, and it does not read")
        return bool(self._frames)

    def refuse(self, problem: str) -> None:
        """Ends the session, and says why if there is a reason and room to say it."""
        if problem and not self._frames:
            with suppress(OSError):
                send_packet(self._channel, answers.encode([SessionRefused(short(problem))]))
        self.is_open = False
        self._answers.clear()
        self._frames.clear()
        self._channel.close()


@dataclass(slots=True, eq=False)
class OfferedArena:
    """An arena that a session has offered."""

    name: str
    mapped: MappedArena
    jobs: set[int] = field(default_factory=set)
    offered: bool = True


@dataclass(slots=True, eq=False)
class OwnerState:
    """What is known of an owner."""

    hello: OwnerHello
    tiers: list[TierSlot]
    ranks: dict[str, list[int]]
    """By the name of their arena."""
    generations: list[int | None]
    """Which generation its requests mean, by number of the tier; `None`: its tier is not open."""
    ready: bool = False
    why: str = ""
    """Why it is not ready, as it was told."""
    voids: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    """Requests to void a space in a tier that were not carried out yet."""
    tickets: dict[int, set[int]] = field(default_factory=dict)
    """The numbers of the jobs of each ticket that are under way."""

    def slot(self, tier: int) -> TierSlot:
        """The tier of a number.

        Raises:
            PeerError: there is none.
        """
        if tier >= len(self.tiers):
            raise PeerError(f"tier is {tier}, must be below {len(self.tiers)}")
        return self.tiers[tier]

    def why_not(self, tier: int) -> str:
        """Why nothing of a tier can be used now; empty if it can."""
        slot = self.tiers[tier]
        if slot.tier is None:
            return f"tier {slot.name!r} is off: {slot.why}"
        if not self.ready:
            return self.why
        if self.voids[tier, self.hello.space]:
            return "its new generation cannot be kept yet"
        generation = slot.tier.generation(self.hello.space)
        if generation is None:
            return "its generation is being read"
        if self.generations[tier] != generation:
            return "another engine has begun a new generation"
        return ""
