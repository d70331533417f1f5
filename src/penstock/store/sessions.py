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
from penstock.store.messages import (
    FRAME_BYTES_MAX,
    SessionRefused,
    VoidNotice,
    answer_frames,
    answers,
    short,
)
from penstock.transport.packets import receive_packet, send_packet

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from penstock.store.base import MappedArena, NewGeneration
    from penstock.store.messages import AnyStoreAnswer, OwnerHello, VoidSeen
    from penstock.store.tier_slots import TierSlot
    from penstock.transport.base import ChannelClosed, ChannelFailed, Empty
    from penstock.transport.packets import Packet

OUTPUT_BYTES_MAX = 8 << 20
"""Answers that may wait for a client: those of thousands of jobs. With more it is cut off."""
VOIDING = -1
"""In place of a generation: the owner has asked for another one, which does not count yet."""


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

        Raises `PeerError`: too much waits; `OSError`: the client has gone.
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
    """Which generation its requests mean, by number of the tier, or `VOIDING`; `None`: its tier is
    not open."""
    ready: bool = False
    why: str = ""
    """Why it is not ready, as it was told."""
    voids: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    """Requests to void a space in a tier that were not answered yet."""
    tickets: dict[int, set[int]] = field(default_factory=dict)
    """The numbers of the jobs of each ticket that are under way."""

    def slot(self, tier: int) -> TierSlot:
        """The tier of a number.

        Raises `PeerError`: there is none.
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
        if self.generations[tier] == VOIDING:
            return "its new generation cannot be kept yet"
        generation = slot.tier.generation(self.hello.space)
        if generation is None:
            return "its generation is being read"
        if self.generations[tier] != generation:
            return "another engine has begun a new generation"
        return ""

    def take_void(self, tier: int, new: NewGeneration, *, voided: bool) -> VoidNotice | None:
        """A space has a new generation in a tier: what the owner is told, if it concerns it.

        `voided` says that requests to void the space have begun it.
        """
        waits, ours = self.voids[tier, new.name], self.hello.space == new.name
        if ours and not voided and self.generations[tier] == VOIDING:
            return None  # Its own reset voids this one too, and comes next.
        if ours and voided and waits:  # What it sends after its request is meant for this one.
            self.generations[tier] = new.generation
        asked = self.voids.pop((tier, new.name), 0) if voided and not new.unkept else 0
        if not waits and not ours:
            return None
        unkept = short(new.unkept) if waits else ""
        return VoidNotice(tier, new.name, new.generation, asked, unkept)

    def note_seen(self, seen: VoidSeen) -> None:
        """The owner knows of a generation: what it sends from now on is meant for that one."""
        counts = self.slot(seen.tier).generation(self.hello.space)
        if seen.generation == counts and self.generations[seen.tier] != VOIDING:
            self.generations[seen.tier] = seen.generation


def tell_known(hello: OwnerHello, tiers: Sequence[TierSlot]) -> None:
    """Tells tiers which generations an owner knows of."""
    for slot, generation in zip(tiers, hello.generations, strict=False):
        if generation is not None:
            slot.expect(hello.space, generation)
