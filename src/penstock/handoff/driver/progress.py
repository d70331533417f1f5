"""What a device has computed, by events: one for each layer that was submitted to its stream.

    events = LayerEvents(StreamEvent)
    …  the kernels of a layer are launched  …
    events.record({"request-1": 512}, layer, stream)      # an event behind them
    events.poll()                                         # what has been passed, never waits
    events.drive(until)                                   # waits for the next one

No thread waits for events. The engine looks at them at step boundaries, and while it waits for
its step's result anyway. Events of one stream are passed in order, so only the oldest is asked.

The one rule: progress is reported for bytes that *are* there. On a CUDA device that is when the
event recorded behind the layer's last kernel has passed, not when the kernel was launched.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SPARE_MAX = 1024
"""Events that are kept for the next steps."""


class Progress(NamedTuple):
    """The KV of a prompt's first `tokens` tokens is there in one layer of this rank."""

    handoff: str
    layer: int | None
    """`None`: in all layers."""
    tokens: int


class DeviceEvent(Protocol):
    """A point in the work of a stream: `StreamEvent` of `movers.cuda.streams`, or a fake of it."""

    def record(self, stream: object) -> None:
        """Marks what was submitted to the stream so far."""
        ...

    @property
    def reached(self) -> bool:
        """Whether the CPU can see that the device has got there."""
        ...

    def close(self) -> None:
        """Gives the event back."""
        ...


class _Recorded(NamedTuple):
    event: DeviceEvent
    tokens: dict[str, int]
    layer: int | None


class LayerEvents:
    """The progress of a device whose steps run in one stream.

    Args:
        event: makes an event.
        clock: the time that `drive` is given.
    """

    def __init__(
        self, event: Callable[[], DeviceEvent], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = event
        self._clock = clock
        self._recorded: deque[_Recorded] = deque()
        self._spare: list[DeviceEvent] = []

    def record(self, tokens: Mapping[str, int], layer: int | None, stream: object) -> None:
        """What was submitted to the stream computes so many tokens of each prompt in a layer."""
        event = self._spare.pop() if self._spare else self._make()
        event.record(stream)
        self._recorded.append(_Recorded(event, dict(tokens), layer))

    def forget(self, handoff: str) -> None:
        """What was submitted for a prompt is not reported any more: its blocks are lost."""
        for recorded in self._recorded:
            recorded.tokens.pop(handoff, None)

    @property
    def busy(self) -> bool:
        """Whether an event was recorded and not reported."""
        return bool(self._recorded)

    def poll(self) -> list[Progress]:
        """What was computed since the last call; never waits."""
        found: list[Progress] = []
        while self._recorded and self._recorded[0].event.reached:
            event, tokens, layer = self._recorded.popleft()
            if len(self._spare) < SPARE_MAX:
                self._spare.append(event)
            else:
                event.close()
            found += [Progress(handoff, layer, count) for handoff, count in tokens.items()]
        return found

    def drive(self, until: float) -> list[Progress]:
        """Looks at the next event until it has been passed, at most until then on the clock.

        It looks without pause: a layer takes a fraction of a millisecond, less than a sleeping
        thread needs to be woken, and this thread waits for the step's result anyway.
        """
        found = self.poll()
        while not found and self._recorded and self._clock() < until:
            found = self.poll()
        return found

    def close(self) -> None:
        """Gives the events back."""
        for event in (*(each.event for each in self._recorded), *self._spare):
            event.close()
        self._recorded.clear()
        self._spare.clear()
