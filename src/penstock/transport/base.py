"""What every control channel does: it carries frames in order, and says what is wrong.

A channel joins two ends. What one end sends, the other receives once and in order, or the
channel has failed. Nothing here waits longer than its deadline, and nothing that went wrong
looks like an empty channel:

| `receive` returns      | meaning                                                     |
|------------------------|-------------------------------------------------------------|
| `ReceivedFrame(frame)` | the next frame                                              |
| `Empty`                | nothing was there until the deadline; ask again             |
| `ChannelClosed`        | the other end said that it is done; nothing will come       |
| `ChannelFailed(cause)` | the other end, or the way to it, is lost; nothing will come |

What arrived before the end is received before it. After the end, every `receive` returns the same
`ChannelClosed` or `ChannelFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.errors import CapacityError

FRAME_BYTES_MAX = 16 << 20
"""A frame is refused when it is longer: a plan of a hundred thousand blocks has four MiB."""


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame that arrived."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing arrived until the deadline."""


@dataclass(frozen=True, slots=True)
class ChannelClosed:
    """The other end closed the channel in good order."""


@dataclass(frozen=True, slots=True)
class ChannelFailed:
    """The channel is broken."""

    cause: str


Received = ReceivedFrame | Empty | ChannelClosed | ChannelFailed


class BacklogError(CapacityError):
    """The other end has not taken enough of what was sent before; nothing was sent."""

    def __init__(self, *, channel: str, frames: int, frame_bytes: int) -> None:
        super().__init__(tier=channel, wanted=1, available=0)
        self.args = (
            f"channel {channel!r} holds {frames} frames of {frame_bytes} bytes together that "
            "the other end has not taken: no room for another",
        )


class Waitable(Protocol):
    """What `wait_any` can wait for, besides plain descriptors."""

    @property
    def ready(self) -> bool:
        """Whether there is something to take now."""
        ...

    @property
    def descriptor(self) -> int:
        """Becomes readable when something may have happened since `ready` was false."""
        ...

    @property
    def alarm(self) -> float | None:
        """When to ask `ready` again though the descriptor is silent, on the monotonic clock."""
        ...


class Channel(Waitable, Protocol):
    """One end of a channel. It belongs to one thread."""

    @property
    def name(self) -> str:
        """What the other end is called; for messages and statistics."""
        ...

    def send(self, frame: bytes) -> None:
        """Hands a frame over for sending; never waits.

        Raises:
            ValueError: the frame is longer than `FRAME_BYTES_MAX`.
            BacklogError: too much waits for the other end already; nothing was taken.
            UnavailableError: the channel was closed or has failed.
        """
        ...

    def receive(self, *, deadline: float | None = None) -> Received:
        """The next frame; waits for one until `deadline` on the monotonic clock, if given.

        After `close` of this end it answers `ChannelClosed`.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether `receive` would answer something else than `Empty` now."""
        ...

    @property
    def descriptor(self) -> int:
        """A file descriptor for a poll over several channels; `wait_any` is such a poll.

        It becomes readable when something *may* have happened since `receive` answered `Empty`
        or `ready` was false. What came before that, or in the course of a `send`, it does not
        show: ask every channel right before each poll, not only after it.
        """
        ...

    def close(self) -> None:
        """Sends the end of the channel, and gives the resources back.

        What was sent before still arrives, if the other end takes it in time. Closing twice
        does no harm.
        """
        ...


def require_frame_fits(frame: bytes) -> None:
    """Refuses a frame that no channel takes."""
    if len(frame) > FRAME_BYTES_MAX:
        raise ValueError(f"frame has {len(frame)} bytes, must have at most {FRAME_BYTES_MAX}")
