"""What every control channel does: it carries frames in order, and says what is wrong.

A channel joins two ends. What one end sends, the other receives once and in order, or the
channel has failed. Nothing here waits longer than its deadline, and nothing that went wrong
looks like an empty channel:

| `receive` returns | meaning                                                       |
|-------------------|---------------------------------------------------------------|
| `Item(frame)`     | the next frame                                                |
| `Empty`           | nothing was there until the deadline; ask again               |
| `Closed`          | the other end said that it is done; nothing will come          |
| `Failed(cause)`   | the other end, or the way to it, is lost; nothing will come    |
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

FRAME_BYTES_MAX = 16 << 20
"""A frame is refused when it is longer: a plan of a hundred thousand blocks has four MiB."""


class Item(NamedTuple):
    """A frame that arrived."""

    frame: bytes


class Empty(NamedTuple):
    """Nothing arrived until the deadline."""


class Closed(NamedTuple):
    """The other end closed the channel in good order."""


class Failed(NamedTuple):
    """The channel is broken."""

    cause: str


Received = Item | Empty | Closed | Failed


class Channel(Protocol):
    """One end of a channel."""

    def send(self, frame: bytes) -> None:
        """Hands a frame over for sending; never waits.

        Raises:
            ValueError: the frame is longer than `FRAME_BYTES_MAX`.
            CapacityError: too much waits to be sent already; nothing was taken.
            UnavailableError: the channel was closed or has failed.
        """
        ...

    def receive(self, *, deadline: float | None = None) -> Received:
        """The next frame; waits for one until `deadline` on the monotonic clock, if given."""
        ...

    @property
    def descriptor(self) -> int:
        """A file descriptor for a poll over several channels.

        It is readable when something *may* have happened; after every poll, and before the
        first, ask `receive` until it answers `Empty`.
        """
        ...

    def close(self) -> None:
        """Tells the other end that nothing more will come, and gives the resources back."""
        ...
