"""How far a step computes prompts on a device, told to the thread that hands them over.

    progress.layer({"request-1": 512}, 3)      # a layer was submitted to the engine's stream
    progress.end({"request-1": 512})           # the whole step was

The engine's thread submits layers faster than the device computes them. So it marks the place of
each layer in its stream by an event, and the handoff's thread looks at the events in their order
(`RankSides.submitted`). Events go over a few at a time: to be woken for every layer of every step,
that thread would take the interpreter from the engine's hundreds of times a step.

The one rule: an event lies behind the kernels of its layer in the stream, so it is recorded by the
engine's thread, at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.connectors.handoff.rank import RankSides
    from penstock.connectors.handoff.requests import HandoffThread
    from penstock.handoff.driver.prefill_rank import DeviceEvent

POST_S = 0.02
"""How long an event may wait for others of its step. An 8B model is submitted in less, so its
events go over when its step was submitted: before, every layer that is handed over would slow down
the submission of the next (on one H200, 512 tokens were submitted in 40 ms in place of 20)."""


class SubmittedLayers(NamedTuple):
    """Layers of a step that are computed when their event is reached."""

    event: DeviceEvent
    tokens: dict[str, int]
    """How many leading tokens of each prompt, by handoff."""
    layers: tuple[int, ...]


class StepProgress:
    """What the steps of one rank compute, layer by layer."""

    def __init__(
        self,
        thread: HandoffThread,
        sides: RankSides,
        *,
        layers: Iterable[int],
        stream: Callable[[], int],
        make_event: Callable[[], DeviceEvent],
    ) -> None:
        """Layers by their numbers; `stream` says to which stream a step is submitted."""
        self._thread = thread
        self._sides = sides
        self._layers = frozenset(layers)
        self._stream = stream
        self._make = make_event
        self._waiting: list[SubmittedLayers] = []
        self._seen: set[int] = set()
        self._posted_at = 0.0

    def layer(self, tokens: Mapping[str, int], layer: int) -> None:
        """A layer of some prompts was submitted."""
        self._seen.add(layer)
        if not self._waiting:
            # Its wait begins now, however long ago the last step was.
            self._posted_at = time.monotonic()
        self._record(tokens, (layer,))
        if time.monotonic() - self._posted_at >= POST_S:
            self._post()

    def end(self, tokens: Mapping[str, int]) -> None:
        """The whole step was submitted, also layers that nobody reported.

        An engine that replays a step from a graph does not come by at its layers.
        """
        if missing := self._layers - self._seen:
            self._record(tokens, tuple(sorted(missing)))
        self._seen.clear()
        self._post()

    def _record(self, tokens: Mapping[str, int], layers: tuple[int, ...]) -> None:
        spare = self._sides.spare_events
        event = spare.pop() if spare else self._make()
        event.record(self._stream())
        self._waiting.append(SubmittedLayers(event, dict(tokens), layers))

    def _post(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._thread.post(self._sides.submitted, waiting)
        self._posted_at = time.monotonic()
