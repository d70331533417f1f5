"""One direction of the link between GPU and host: copies in turns, in two streams.

A copy engine works on one stream until that stream has to wait; what other streams want of it
waits as long. Copies of any number in one stream, or in two that run independently, kept a
4 KiB copy of the engine waiting for all of them (9.5 ms and 4.6 ms of 512 MiB on an H200). So
copies go by turns in two streams, each turn behind the one before: a change of turns is where
others come in, however much has been submitted.

The one rule: turns stay in order, so the end of one is the end of all before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.movers.cuda.streams import Event, Stream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.movers.cuda.runs import Turn


class Link:
    """Copies between staging and host memory, one way."""

    def __init__(self) -> None:
        self._streams = (Stream(), Stream())
        self._ends = (Event(), Event())

    @property
    def stream(self) -> Stream:
        """Where the last turn was taken: what is recorded there comes after all turns."""
        return self._streams[0]

    def follow(self, event: Event) -> None:
        """What is sent from now on waits on the device for an event."""
        # The next turn is taken in the other stream, and every later one follows that turn.
        self._streams[1].wait_for(event)

    def send_to_host(self, turns: Iterable[Turn]) -> None:
        """Copies out of staging."""
        for staged, hosts, lengths in turns:
            self._copy(hosts, staged, lengths)

    def send_to_device(self, turns: Iterable[Turn]) -> None:
        """Copies into staging."""
        for staged, hosts, lengths in turns:
            self._copy(staged, hosts, lengths)

    def _copy(self, targets: list[int], sources: list[int], lengths: list[int]) -> None:
        stream, before, end = self._next_turn()
        if len(lengths) == 1:
            stream.copy_after(before, targets[0], sources[0], lengths[0], end)
        else:
            stream.copy_batch_after(before, targets, sources, lengths, end)

    def _next_turn(self) -> tuple[Stream, Event, Event]:
        """The stream whose turn it is, the end of the turn before, and the event for its own."""
        one, other = self._streams
        before, end = self._ends
        self._streams, self._ends = (other, one), (end, before)
        return other, before, end

    def wait(self) -> None:
        """Blocks this thread until all copies have ended."""
        for stream in self._streams:
            stream.wait()

    def close(self) -> None:
        """Gives streams and events back; nothing may be in flight."""
        for each in (*self._streams, *self._ends):
            each.close()
