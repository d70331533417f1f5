"""Points in one stream's work that the CPU waits for with a timeout.

    mark = marks.make()                 # behind all work of the stream so far
    ...
    if not mark.wait(30.0): ...         # the device has not reached it

The one rule: the event of a mark is reused only after the device has reached it. After a timeout
the device still uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.movers.cuda.streams import Bell, StreamEvent


class StreamMark:
    """One point in a stream's work."""

    __slots__ = ("_bell", "_event", "_spare")

    def __init__(self, event: StreamEvent, bell: Bell, spare: list[StreamEvent]) -> None:
        self._event: StreamEvent | None = event
        self._bell = bell
        self._spare = spare

    def wait(self, seconds: float) -> bool:
        """Blocks this thread until the device reaches the point; returns False after `seconds`.

        Raises:
            UnavailableError: the device failed.
        """
        if self._event is not None:
            if not self._bell.wait_for_ring(self._event, seconds):
                return False
            self._spare.append(self._event)
            self._event = None
        return True


class Marks:
    """Makes the marks of one stream.

    Args:
        stream: The stream, as the CUDA runtime takes it.
        bell: What wakes this thread.
        new_event: Makes an event; there are as many as marks waited for at the same time.
    """

    def __init__(self, stream: object, bell: Bell, new_event: Callable[[], StreamEvent]) -> None:
        self._stream = stream
        self._bell = bell
        self._new_event = new_event
        self._spare: list[StreamEvent] = []

    def make(self) -> StreamMark:
        """A point behind all work of the stream so far."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(self._stream)
        # Now, not in `wait`: by then more work may be ahead of the ring.
        self._bell.ring_behind(event)
        return StreamMark(event, self._bell, self._spare)

    def close(self) -> None:
        """Destroys the events of reached marks."""
        while self._spare:
            self._spare.pop().close()
