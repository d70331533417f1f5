"""Channels and remote writes inside one process.

    near, far = channel_pair()
    near.send(b"hello"); far.receive()           # ReceivedFrame(frame=b"hello")

    fabric = InprocFabric()
    target = fabric.target();  area = target.open_area("rank 0", 1 << 20)
    link = fabric.connect(area.description)

For tests, and for an engine whose ranks share its process. A frame is there as soon as it was
sent, in order, so a run is as deterministic as its caller; no clock is read, and no descriptor
made, unless somebody waits. A link writes while it is observed, until it is closed.

Two rules. An end sees of the other only what it sent, closed or failed, as if it were far. The
fence holds when the link was closed, or there never was one and there can be none.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

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
from penstock.transport.posted import Areas, Delivery, PostedWrites, require_within
from penstock.transport.remote import Fenced, Notice, NotYet
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.transport.remote import Area, Memory, Span, WriteEnd

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
        require_frame_fits(frame)
        if self._closed or self._here.end is not None:
            raise UnavailableError(f"channel {self.name!r} can take no frame: it {self._story()}")
        self._there.put(frame, self.name)

    def receive(self, *, deadline: float | None = None) -> Received:
        if deadline is not None and not self.ready:
            self._wait(self.descriptor, deadline)
        return ChannelClosed() if self._closed else self._here.take()

    @property
    def ready(self) -> bool:
        """Whether there is anything but `Empty` to receive."""
        return self._closed or self._here.ready

    @property
    def descriptor(self) -> int:
        if self._closed:
            raise UnavailableError(f"channel {self.name!r} has no descriptor: it was closed here")
        return self._here.descriptor

    @property
    def alarm(self) -> float | None:
        """There is nothing to watch the clock for."""
        return None

    def close(self) -> None:
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
            return  # Its sender does not know of the end yet.
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


NOTICES_MAX = 1024
"""How many notices wait for a target before its writers have to wait."""


SPARE_MAX = 8
"""How many freed areas are kept for the next ones; the memory of others goes back."""
_NOTHING = np.empty(0, dtype=np.uint8)
"""What writes without spans are moved into."""


class InprocFabric:
    """What targets and writers of one process have in common."""

    def __init__(self) -> None:
        self._areas: dict[bytes, InprocArea] = {}
        self._next_number = 0

    def target(self, allocate: Callable[[int], Memory] | None = None) -> InprocTarget:
        """A new target.

        Args:
            allocate: gives memory for an area, given its bytes; plain memory by default. Where
                it is not an array, as on a device, writers pack into windows.
        """
        return InprocTarget(self, allocate or _plain_memory)

    def connect(self, description: bytes) -> InprocLink:
        """A way to the area that a target described.

        Raises:
            ValueError: it describes no area.
            UnavailableError: the area was retired, or somebody else has connected to it.
        """
        area = self._areas.get(description)
        if area is None:
            raise ValueError(f"description {description[:40]!r} is of no area of this fabric")
        if area.retired or area.link is not None:
            why = "was retired" if area.retired else "has its writer already"
            raise UnavailableError(f"no way to the area of {area.peer!r}: it {why}")
        area.link = InprocLink(area)
        return area.link

    def describe(self, area: InprocArea) -> bytes:
        """Makes an area known, under a number of its own."""
        description = b"penstock inproc area %d" % self._next_number
        self._next_number += 1
        self._areas[description] = area
        return description

    def forget(self, area: InprocArea) -> None:
        """Nobody can connect to this area any more."""
        del self._areas[area.description]


class InprocArea:
    """A piece of memory, with the notices that were given for it."""

    ready = True
    failure = ""

    def __init__(self, fabric: InprocFabric, peer: str, memory: Memory) -> None:
        self.peer = peer
        self.memory = memory
        self.arrived: deque[bytes] = deque()
        self.retired = False
        self.link: InprocLink | None = None
        self.description = fabric.describe(self)

    def deliver(self, notice: bytes) -> Delivery:
        """Takes a notice of the area's writer."""
        if self.retired:
            return Delivery.GONE
        if len(self.arrived) >= NOTICES_MAX:
            return Delivery.FULL
        self.arrived.append(notice)
        return Delivery.GIVEN


class InprocTarget:
    """The side that is written to; see `Target`."""

    def __init__(self, fabric: InprocFabric, allocate: Callable[[int], Memory]) -> None:
        self._fabric = fabric
        self._allocate = allocate
        self._areas: Areas[InprocArea] = Areas()
        self._spare: list[Memory] = []

    def open_area(self, peer: str, size: int) -> InprocArea:
        """Memory for one writer; that of an area that was freed, if there is any."""
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        fitting = [at for at, memory in enumerate(self._spare) if len(memory) == size]
        memory = self._spare.pop(fitting[0]) if fitting else self._allocate(size)
        return self._areas.add(InprocArea(self._fabric, peer, memory))

    def notices(self) -> list[Notice]:
        found: list[Notice] = []
        for area in self._areas.open:
            found += [Notice(area, notice) for notice in area.arrived]
            area.arrived.clear()
        return found

    def retire(self, area: Area) -> None:
        known = self._areas.retire(area)
        if known is not None:
            known.retired = True
            known.arrived.clear()
            self._fabric.forget(known)

    def fence(self, area: Area) -> Fenced | NotYet:
        link = self._areas.require_retired(area).link
        if link is None or link.closed:
            return Fenced()
        return NotYet(f"the link of {area.peer!r} is not closed")

    @property
    def descriptor(self) -> None:
        """Nothing: notices come by calls of this process."""
        return

    @property
    def watches_fences(self) -> bool:
        """No: a link is closed by a call of this process."""
        return False

    def fence_descriptor(self, _area: Area) -> None:
        """Nothing; see `watches_fences`."""

    def free(self, area: Area) -> None:
        known = self._areas.free(area, self.fence(area))
        self._spare = [*self._spare, known.memory][-SPARE_MAX:]

    @property
    def open_bytes(self) -> int:
        return self._areas.open_bytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that wait for a fence, or to be freed."""
        return self._areas.retired_bytes

    def close(self) -> None:
        for area in self._areas.open:
            self.retire(area)
        self._spare.clear()


class InprocLink:
    """The way of one writer to one area; see `WriterLink`."""

    def __init__(self, area: InprocArea) -> None:
        self._area = area
        self._posted = PostedWrites(area.peer, len(area.memory))
        self.closed = False

    def post(
        self, spans: Sequence[Span], notice: bytes, *, packed: Sequence[tuple[int, int]] = ()
    ) -> int:
        """Begins a write; what was packed is in the area already."""
        if self.closed:
            raise UnavailableError(f"link to {self._area.peer!r} was closed")
        for offset, length in packed:
            require_within(offset, length, len(self._area.memory))
        if spans and not isinstance(self._area.memory, np.ndarray):
            raise ValueError(f"spans are {len(spans)}, must be 0: pack into a window of this area")
        return self._posted.post(spans, notice)

    def window(self, offset: int, length: int) -> Memory | None:
        if self.closed:
            raise UnavailableError(f"link to {self._area.peer!r} was closed")
        require_within(offset, length, len(self._area.memory))
        window: Memory = self._area.memory[offset : offset + length]
        return window

    def observe(self, *, budget_bytes: int) -> tuple[list[WriteEnd], int]:
        """Moves some bytes; returns which writes have ended."""
        memory = self._area.memory
        array = memory if isinstance(memory, np.ndarray) else _NOTHING
        return self._posted.advance(array, budget_bytes, self._area.deliver)

    @property
    def descriptor(self) -> None:
        return

    @property
    def busy(self) -> bool:
        return bool(self._posted)

    def close(self) -> None:
        self.closed = True
        self._posted.fail("closed")


def _plain_memory(size: int) -> Memory:
    return np.zeros(size, dtype=np.uint8)
