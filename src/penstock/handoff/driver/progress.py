"""What a device has computed, by events: one for each layer of each step, for all its requests.

    steps = LayerEvents(event=Event, ...)
    steps.begin({"request-1": 512}, layers=range(32))     # before the step's kernels
    …  the layer's kernels are launched  …
    steps.layer_submitted(layer, stream)                  # records an event behind them
    steps.poll()                                          # what has been passed, never waits
    steps.drive(until)                                    # waits for the next one

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
    layer: int
    tokens: int


class ProgressSource(Protocol):
    """Tells a prefill rank what its device has computed.

    On CUDA: one event for each layer of each step, recorded behind the layer's kernels, for all
    requests of the step together. No thread waits for them. They are looked at when a step
    begins or ends (`poll`), and while the engine waits for its step's result anyway (`drive`),
    so that the writes of early layers go out while later layers compute.
    """

    def poll(self) -> list[Progress]:
        """What was computed since the last call; never waits."""
        ...

    def drive(self, until: float) -> list[Progress]:
        """Waits for the next event, at most until then on the monotonic clock."""
        ...


class StepProgress:
    """Which prompts each layer of each step in flight belongs to, without a device.

    What every progress source needs beside its events. The engine calls `begin` with what a step
    will compute, the source calls `layer_done` for each layer, in any order, and gets the
    progress of each prompt. A layer of a step is reported once.
    """

    def __init__(self, *, step_count_max: int = 8) -> None:
        if step_count_max < 1:
            raise ValueError(f"step_count_max is {step_count_max}, must be at least 1")
        self.step_count_max = step_count_max
        self.steps: dict[int, tuple[dict[str, int], set[int]]] = {}

    def begin(self, step: int, tokens: dict[str, int], layers: range) -> None:
        """A step will bring each prompt to this many tokens, in these layers.

        Raises:
            ValueError: the step is known, or too many are in flight.
        """
        if step in self.steps:
            raise ValueError(f"step is {step}, which is in flight already")
        if len(self.steps) >= self.step_count_max:
            raise ValueError(f"{len(self.steps)} steps are in flight, at most that many may be")
        if not layers:
            raise ValueError(f"layers is {layers}, must not be empty")
        self.steps[step] = (dict(tokens), set(layers))

    def layer_done(self, step: int, layer: int) -> list[Progress]:
        """A layer of a step is computed.

        Raises:
            ValueError: it is not in flight.
        """
        tokens, layers = self.steps.get(step, ({}, set()))
        if layer not in layers:
            raise ValueError(f"layer {layer} of step {step} is not in flight")
        layers.remove(layer)
        if not layers:
            del self.steps[step]
        return [Progress(handoff, layer, count) for handoff, count in tokens.items()]

    def abandon(self, step: int) -> None:
        """A step failed: nothing more will come of it. What was never begun is left alone."""
        self.steps.pop(step, None)


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


class DrivenSource(ProgressSource, Protocol):
    """A progress source that knows whether anything is under way."""

    @property
    def busy(self) -> bool:
        """Whether an event was recorded and not reported."""
        ...


class _Recorded(NamedTuple):
    step: int
    layer: int
    event: DeviceEvent


class LayerEvents:
    """The progress of a device whose steps run in one stream.

    Args:
        event: makes an event.
        clock: the time that `drive` is given.
        step_count_max: steps in flight; engines have two.
    """

    def __init__(
        self,
        event: Callable[[], DeviceEvent],
        *,
        clock: Callable[[], float] = time.monotonic,
        step_count_max: int = 8,
    ) -> None:
        self._make = event
        self._clock = clock
        self._steps = StepProgress(step_count_max=step_count_max)
        self._recorded: deque[_Recorded] = deque()
        self._spare: list[DeviceEvent] = []
        self._number = 0

    def begin(self, tokens: Mapping[str, int], layers: range) -> int:
        """A step is about to be submitted that will bring each prompt to this many tokens.

        Returns its number. See `StepProgress.begin`.
        """
        self._steps.begin(self._number + 1, dict(tokens), layers)
        self._number += 1
        return self._number

    def layer_submitted(self, layer: int, stream: object) -> None:
        """The kernels of a layer of the latest step were submitted to the stream."""
        event = self._spare.pop() if self._spare else self._make()
        event.record(stream)
        self._recorded.append(_Recorded(self._number, layer, event))

    def abandon(self, step: int) -> None:
        """A step failed: nothing more will come of it."""
        kept = deque(each for each in self._recorded if each.step != step)
        for each in self._recorded:
            if each.step == step:
                each.event.close()
        self._recorded = kept
        self._steps.abandon(step)

    @property
    def busy(self) -> bool:
        """Whether an event was recorded and not reported."""
        return bool(self._recorded)

    def poll(self) -> list[Progress]:
        """What was computed since the last call; never waits."""
        found: list[Progress] = []
        while self._recorded and self._recorded[0].event.reached:
            step, layer, event = self._recorded.popleft()
            if len(self._spare) < SPARE_MAX:
                self._spare.append(event)
            else:
                event.close()
            found += self._steps.layer_done(step, layer)
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
