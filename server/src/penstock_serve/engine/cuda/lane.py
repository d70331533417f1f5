"""The streams of one rank on a GPU, and steps as CUDA graphs.

    inputs:   ─ step n+1 ─→
    compute:  ── step n ──────→ step n+1 ─→      priority over copies of blocks

The input of a step is copied in a stream of its own while the step before is computed, so that it
does not wait behind block copies on the link. `StepGraphs` replays steps of few tokens: a graph is
captured for a number of decoding requests with a number of blocks each, and for a number of
prompt tokens where a request continues a long prefix. A step is padded to the next such shape with
rows that write nothing; its input is copied to where the graph reads it, and its logits stay where
the graph leaves them until the next replay of the same shape.

Where loads fill layer by layer, each layer waits for what has joined the step, also in a graph.

Two rules. All work of a step begins and ends in one stream, so an event behind a step is behind all
steps before it; that stream waits for the stream that attention uses beside it. And a graph holds
addresses: it belongs to one model and the blocks it was captured with, and its output is used in
the same stream before the next replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.tensors import Bell, Marks, StreamEvent
from penstock_serve.engine.batch import BatchShape, Sheet, StepBatch
from penstock_serve.engine.model import layer_waits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock import EngineSteps
    from penstock.tensors import StreamMark
    from penstock_serve.engine.model import Decoder

HIGH = -1
"""Above the movers' streams, which have the lowest priority, the default."""


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
        context: AbstractContextManager[object] = torch.cuda.stream(self._compute)
        return context

    def send(self, sheet: Sheet) -> StepBatch:
        """A step's input on the device, padded to a graph's shape if one can be replayed."""
        shape = None if self._graphs is None else self._graphs.shape_for(sheet)
        with torch.cuda.stream(self._inputs):
            batch = sheet.sent(self._device, shape)
        self._compute.wait_stream(self._inputs)
        batch.packed.record_stream(self._compute)
        return batch

    def forward(
        self,
        decoder: Decoder,
        batch: StepBatch,
        kv: Sequence[torch.Tensor],
        gates: EngineSteps | None = None,
    ) -> torch.Tensor | None:
        if self._graphs is not None and batch.shape is not None:
            return self._graphs.replay(decoder, batch, kv, gates)
        return decoder.forward(batch, kv, before_layer=layer_waits(gates, self.stream))

    def mark(self) -> StreamMark:
        return self._marks.make()


ROWS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
"""Numbers of decoding requests that graphs are captured for; beyond, multiples of the last."""
TAILS = (16, 32, 64)
"""Numbers of prompt tokens after a long prefix that graphs are captured for."""
TOKENS_MIN = 1024
"""The shortest context of a graph; longer ones are powers of two."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    """Where it reads its input."""
    logits: torch.Tensor


class StepGraphs:
    """The graphs of one rank, captured when a shape is first met."""

    def __init__(self) -> None:
        self._captured: dict[BatchShape, _Captured] = {}
        self._gates: EngineSteps | None = None
        self._pool: object = None

    def shape_for(self, sheet: Sheet) -> BatchShape | None:
        """The shape to pad a step to; `None` if it cannot be replayed."""
        if sheet.scored:
            # A graph returns only the logits of each span's last token.
            return None
        count = len(sheet.decodes)
        rows = next((rows for rows in ROWS if rows >= count), -(-count // ROWS[-1]) * ROWS[-1])
        blocks = _blocks(sheet.longest, sheet) if rows else 0
        if not sheet.prefills:
            return BatchShape(rows, blocks)
        tail = sheet.prefills[0]
        if len(sheet.prefills) > 1 or not len(tail.tokens) <= TAILS[-1] < tail.stop:
            return None
        tail_rows = next(count for count in TAILS if count >= len(tail.tokens))
        return BatchShape(rows, blocks, tail_rows, _blocks(tail.stop, sheet))

    def replay(
        self,
        decoder: Decoder,
        batch: StepBatch,
        kv: Sequence[torch.Tensor],
        gates: EngineSteps | None,
    ) -> torch.Tensor:
        """The logits of a step, in the current stream; layers wait for the gates they were given.

        Graphs with the gates of another cache are captured again.
        """
        assert batch.shape is not None
        if gates is not self._gates:
            self._captured.clear()
            self._gates = gates
        captured = self._captured.get(batch.shape)
        if captured is None:
            captured = self._capture(decoder, batch.shape, kv)
            self._captured[batch.shape] = captured
        captured.batch.packed.copy_(batch.packed[: len(captured.batch.packed)])
        captured.graph.replay()
        return captured.logits

    def _capture(
        self, decoder: Decoder, shape: BatchShape, kv: Sequence[torch.Tensor]
    ) -> _Captured:
        # All rows are padding, so nothing is written during warm-up and capture.
        empty = Sheet(kv[0].shape[2]).sent(decoder.device, shape)
        waits = layer_waits(self._gates, torch.cuda.current_stream().cuda_stream)
        decoder.forward(empty, kv, before_layer=waits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            logits = decoder.forward(empty, kv, before_layer=waits)
        assert logits is not None
        self._pool = graph.pool()
        return _Captured(graph, empty, logits)


def _blocks(tokens: int, sheet: Sheet) -> int:
    filled = max(TOKENS_MIN, 1 << (tokens - 1).bit_length())
    return -(-filled // sheet.block_tokens)
