"""One direction of the link between GPU and host: copies in turns, in two streams.

A copy engine works on one stream until that stream has to wait; what other streams want of it
waits as long. Copies of any number in one stream, or in two that run independently, kept a
4 KiB copy of the engine waiting for all of them (9.5 ms and 4.6 ms of 512 MiB on an H200). So
copies go by turns in two streams, each turn behind the one before: a change of turns is where
others come in, however much has been submitted.

The one rule: turns stay in order, so the end of one is the end of all before it.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from penstock.movers.cuda.streams import Stream, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Sequence


class CudaLink:
    """Whose turn it is between staging and host memory, one way.

    `calls.c` keeps that in memory of its own, at `address`: a link is used by one kind of calls
    from its making on.
    """

    def __init__(self) -> None:
        self._streams = (Stream(), Stream())
        self._ends = (StreamEvent(), StreamEvent())
        self._words = array("q", [each.number for each in (*self._streams, *self._ends)])
        self.address = self._words.buffer_info()[0]
        """Both streams, that of the last turn first, and the events of their turns likewise."""

    @property
    def stream(self) -> Stream:
        """Where the last turn was taken: what is recorded there comes after all turns."""
        return self._streams[0]

    @property
    def next_stream(self) -> Stream:
        """Where the next turn is taken, which every later one follows."""
        return self._streams[1]

    def take_turn(
        self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copies extents behind the turn before."""
        one, other = self._streams
        before, end = self._ends
        self._streams, self._ends = (other, one), (end, before)
        if len(lengths) == 1:
            other.copy_after(before, targets[0], sources[0], lengths[0], end)
        else:
            other.copy_batch_after(before, targets, sources, lengths, end)

    def wait(self) -> None:
        """Blocks this thread until all copies have ended."""
        for stream in self._streams:
            stream.wait()

    def close(self) -> None:
        """Gives streams and events back; nothing may be in flight."""
        for each in (*self._streams, *self._ends):
            each.close()
