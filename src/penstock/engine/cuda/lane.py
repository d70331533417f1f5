"""The streams of one rank on a GPU: steps in order, their inputs ahead of them.

    inputs:   ─ step n+1 ─→
    compute:  ── step n ──────→ step n+1 ─→      priority over copies of blocks

An input goes up in a stream of its own while the step before is computed, so that it does not
wait for the link behind blocks on their way when the step is due. `StepGraphs` replay steps of
few tokens, if that is wanted.

The one rule: a step's work begins and ends in one stream, so whatever is behind one step is behind
all before. What attention reads beside it, in another one, that stream waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.engine.cuda.graphs import StepGraphs
from penstock.movers.cuda.bell import Bell
from penstock.movers.cuda.marks import Marks
from penstock.movers.cuda.streams import StreamEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock.engine.batch import Sheet, StepBatch
    from penstock.engine.model import Decoder
    from penstock.movers.cuda.marks import StreamMark

HIGH = -1
"""The movers' streams have the lowest priority, which is the default: this one goes ahead."""


class CudaLane:
    """Where a rank's steps run.

    Args:
        device: The current CUDA device.
        graphs: Whether steps of few tokens are captured and replayed.
    """

    def __init__(self, device: torch.device, *, graphs: bool = False) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device, priority=HIGH)
        self._inputs = torch.cuda.Stream(device)
        self._graphs = StepGraphs() if graphs else None
        # Weights and blocks were made in another stream.
        torch.cuda.synchronize(device)
        self.stream: int = self._compute.cuda_stream
        self._marks = Marks(self.stream, Bell(), StreamEvent)

    def computing(self) -> AbstractContextManager[object]:
        """What is called inside runs in the stream of steps."""
        context: AbstractContextManager[object] = torch.cuda.stream(self._compute)
        return context

    def send(self, sheet: Sheet) -> StepBatch:
        """A step's input on the device, filled up to a usual shape if it is to be replayed."""
        shape = None if self._graphs is None else self._graphs.shape_for(sheet)
        with torch.cuda.stream(self._inputs):
            batch = sheet.sent(self._device, shape)
        self._compute.wait_stream(self._inputs)
        batch.packed.record_stream(self._compute)
        return batch

    def forward(
        self, decoder: Decoder, batch: StepBatch, kv: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The logits of a step: computed, or replayed."""
        if self._graphs is not None and batch.shape is not None:
            return self._graphs.replay(decoder, batch, kv)
        return decoder.forward(batch, kv)

    def mark(self) -> StreamMark:
        """A point behind all that was called so far."""
        return self._marks.make()
