"""A control channel inside one process: two ends that hand frames to each other.

    near, far = channel_pair()
    near.send(b"hello"); far.receive()           # ReceivedFrame(frame=b"hello")

For tests and simulators, and for an engine whose ranks share its process. A frame is there as
soon as it was sent, in order, so a run is as deterministic as its caller; no clock is read, and
no descriptor made, unless somebody waits.

The one rule: an end sees of the other only what it sent, closed or failed, as if it were far.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from penstock.errors import UnavailableError
from penstock.transport.base import (
    FRAME_BYTES_MAX,
    BacklogError,
    ChannelClosed,
    ChannelFailed,
    Empty,
    Received,
    ReceivedFrame,
    require_frame_fits,
)
from penstock.transport.waiting import wait_readable

WINDOW_FRAMES = 1024
"""A backlog of more frames, or bytes, is refused, as ZeroMQ channels do."""
WINDOW_BYTES = 4 * FRAME_BYTES_MAX

Wait: TypeAlias = Callable[[int, float], object]
"""Waits until a descriptor is readable or a deadline has passed. A simulator brings its own,
which runs the rest of its world instead."""


class InprocChannel:
    """One end of a channel inside a process; `channel_pair` makes two."""

    def __init__(self, name: str, here: Inbox, there: Inbox, wait: Wait) -> None:
        self.name = name
        self._here = here
        self._there = there
        self._wait = wait
        self._closed = False

    def send(self, frame: bytes) -> None:
        """Hands a frame to the other end; see `Channel`."""
        require_frame_fits(frame)
        if self._closed or self._here.end is not None:
            raise UnavailableError(f"channel {self.name!r} can take no frame: it {self._story()}")
        self._there.put(frame, self.name)

    def receive(self, *, deadline: float | None = None) -> Received:
        """The next frame; see `Channel`."""
        if deadline is not None and not self.ready:
            self._wait(self.descriptor, deadline)
        return ChannelClosed() if self._closed else self._here.take()

    @property
    def ready(self) -> bool:
        """Whether there is anything but `Empty` to receive."""
        return self._closed or self._here.ready

    @property
    def descriptor(self) -> int:
        """A descriptor that becomes readable when something may be there; see `Channel`."""
        if self._closed:
            raise UnavailableError(f"channel {self.name!r} has no descriptor: it was closed here")
        return self._here.descriptor

    @property
    def alarm(self) -> float | None:
        """There is nothing to watch the clock for."""
        return None

    def close(self) -> None:
        """Tells the other end that nothing more will come."""
        if not self._closed:
            self._closed = True
            self._here.shut()
            self._there.finish(ChannelClosed())

    def fail(self, cause: str) -> None:
        """Breaks the channel for both ends: what a simulator does when one of them dies."""
        self._here.finish(ChannelFailed(cause))
        self._there.finish(ChannelFailed(cause))

    def _story(self) -> str:
        match self._here.end:
            case ChannelFailed(cause) if not self._closed:
                return f"failed: {cause}"
            case _:
                return "was closed here" if self._closed else "was closed there"


class Inbox:
    """What has come for one end and was not taken yet, and how it ended."""

    def __init__(self) -> None:
        self.end: ChannelClosed | ChannelFailed | None = None
        self._frames: deque[bytes] = deque()
        self._frame_bytes = 0
        self._shut = False
        self._event_fd: int | None = None

    def put(self, frame: bytes, name: str) -> None:
        """Keeps a frame; `name` is what its sender calls the channel."""
        if self._shut:
            return  # Its sender is about to hear of that, and does not know it yet.
        if len(self._frames) >= WINDOW_FRAMES or self._frame_bytes + len(frame) > WINDOW_BYTES:
            raise BacklogError(
                channel=name, frames=len(self._frames), frame_bytes=self._frame_bytes
            )
        self._frames.append(bytes(frame))
        self._frame_bytes += len(frame)
        self._wake()

    def take(self) -> Received:
        """The oldest frame, or how it ended, or nothing."""
        if self._frames:
            frame = self._frames.popleft()
            self._frame_bytes -= len(frame)
            return ReceivedFrame(frame)
        return self.end if self.ready and self.end is not None else Empty()

    @property
    def ready(self) -> bool:
        """Whether there is anything to take."""
        if self._frames or self.end is not None:
            return True
        self._quieten()
        return False

    def finish(self, end: ChannelClosed | ChannelFailed) -> None:
        """Nothing comes any more. The first reason counts."""
        if self.end is None:
            self.end = end
            self._wake()

    def shut(self) -> None:
        """Throws away what is there and what will come."""
        self._shut = True
        self._frames.clear()
        if self._event_fd is not None:
            os.close(self._event_fd)
            self._event_fd = None

    @property
    def descriptor(self) -> int:
        """An eventfd, made when it is first asked for."""
        if self._event_fd is None:
            there = int(bool(self._frames) or self.end is not None)
            self._event_fd = os.eventfd(there, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event_fd

    def _wake(self) -> None:
        if self._event_fd is not None:
            os.eventfd_write(self._event_fd, 1)

    def _quieten(self) -> None:
        # It cannot be readable without a cause: `put` and `finish` are the only ones.
        if self._event_fd is not None and select.select([self._event_fd], [], [], 0)[0]:
            os.eventfd_read(self._event_fd)


def channel_pair(
    near: str = "near", far: str = "far", *, wait: Wait = wait_readable
) -> tuple[InprocChannel, InprocChannel]:
    """The two ends of a new channel. An end is called what the *other* one is named here."""
    here, there = Inbox(), Inbox()
    return InprocChannel(far, here, there, wait), InprocChannel(near, there, here, wait)
