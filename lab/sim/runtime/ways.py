"""Channels and messages that take their time, on the clock of a simulated world.

`SimChannel` keeps the promises of a channel: frames in order and once, or it has failed. `Post`
carries the engine's own messages, which may overtake each other, come twice, or not at all.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.errors import InvariantViolation, UnavailableError
from penstock.transport.base import (
    BacklogError,
    ChannelClosed,
    ChannelFailed,
    Empty,
    Received,
    ReceivedFrame,
    require_frame_fits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from lab.sim.runtime.world import RuntimeWorld


class Inbox:
    """What has arrived at one end, and how it ended."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self.frames: deque[bytes] = deque()
        self.end: ChannelClosed | ChannelFailed | None = None
        self.shut = False
        """Whether whoever has this end has closed it."""
        self.arrived = arrived
        """Called when there is something to take, or room to send again."""

    def finish(self, end: ChannelClosed | ChannelFailed) -> None:
        """Nothing more will come; the first reason counts."""
        if self.end is None:
            self.end = end
            self.arrived()


class SimChannel:
    """One end of a channel whose frames travel for a while."""

    def __init__(self, world: RuntimeWorld, name: str, here: Inbox, there: Inbox) -> None:
        self.name = name
        self._world = world
        self._here = here
        self._there = there
        self._travelling = 0
        self._last_at = 0.0

    @property
    def ready(self) -> bool:
        """Whether there is anything but `Empty` to receive."""
        return bool(self._here.frames) or self._here.end is not None or self._here.shut

    @property
    def descriptor(self) -> int:
        """There is none: nobody waits for real in a simulated world."""
        raise InvariantViolation(f"somebody waits for the simulated channel {self.name!r}")

    @property
    def alarm(self) -> float | None:
        """It needs none: a simulated world calls whoever there is something for."""
        return None

    def send(self, frame: bytes) -> None:
        """Sends a frame on its way."""
        require_frame_fits(frame)
        if self._here.shut or self._here.end is not None:
            raise UnavailableError(f"channel {self.name!r} can take no frame")
        held = self._travelling + len(self._there.frames)
        if held >= self._world.ways.window_frames:
            self._world.note("channel is full")
            raise BacklogError(channel=self.name, frames=held, frame_bytes=0)
        self._travelling += 1
        self._travel(self._deliver, frame)

    def receive(self, *, deadline: float | None = None) -> Received:
        """The next frame, or how it ended; never waits."""
        assert deadline is None
        if self._here.shut:
            return ChannelClosed()
        if self._here.frames:
            self._there.arrived()  # There is room again.
            return ReceivedFrame(self._here.frames.popleft())
        return Empty() if self._here.end is None else self._here.end

    def close(self) -> None:
        """Nothing more will come from this end, once what was sent has arrived."""
        if not self._here.shut:
            self._here.shut = True
            self._here.frames.clear()
            self._travel(self._there.finish, ChannelClosed())

    def fail(self, cause: str) -> None:
        """Breaks the channel for both ends: what travels is lost, what has arrived is not."""
        self._here.finish(ChannelFailed(cause))
        self._there.finish(ChannelFailed(cause))

    def _travel(self, arrive: Callable[..., None], what: object) -> None:
        pause = self._world.rng.random() * 2 * self._world.delay_s
        self._last_at = max(self._last_at, self._world.now + pause)
        self._world.after(self._last_at - self._world.now, arrive, what)

    def _deliver(self, frame: bytes) -> None:
        self._travelling -= 1
        if self._there.end is None and not self._there.shut:
            self._there.frames.append(frame)
            self._there.arrived()


def sim_channel_pair(
    world: RuntimeWorld, name: str, *, near: Callable[[], None], far: Callable[[], None]
) -> tuple[SimChannel, SimChannel]:
    """Both ends of a new channel; each is told when there is something for it."""
    here, there = Inbox(near), Inbox(far)
    return SimChannel(world, name, here, there), SimChannel(world, name, there, here)


class Post:
    """The engine's own messages, to and from one life of a rank."""

    def __init__(self, world: RuntimeWorld) -> None:
        self._world = world
        self._last_at = 0.0

    def send(self, deliver: Callable[[bytes], None], message: bytes, *, in_order: bool) -> bool:
        """Sends a message, which arrives once, mostly; False if it is lost."""
        world, ways = self._world, self._world.ways
        if not world.ranks.well and world.rng.random() < ways.lose:
            world.note("message lost")
            return False
        pause = world.rng.random() * 2 * world.delay_s
        if in_order:
            self._last_at = max(self._last_at, world.now + pause)
            pause = self._last_at - world.now
        world.after(pause, deliver, message)
        if not world.ranks.well and world.rng.random() < ways.repeat:
            world.note("message twice")
            world.after(pause + world.rng.random() * 4 * world.delay_s, deliver, message)
        return True
