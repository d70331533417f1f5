"""Steps as CUDA graphs: the launches of a step become one.

A graph is captured for a shape: so many requests that decode, so many blocks each; and, where a
request goes on after a long prefix, so many tokens of it. A step is filled up to the next such
shape with rows that write nothing; its input is copied to where the graph reads it, and its
logits lie where the graph leaves them, until the next replay of the same shape.

The one rule: a graph holds addresses. It belongs to one model and to the blocks it was captured
with, and what it leaves is used in the same stream before it is replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from penstock.engine.batch import BatchShape, Sheet, StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.model import Decoder

ROWS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)
"""Requests of a graph; beyond, in steps of the last."""
TAILS = (16, 32, 64)
"""Tokens that follow a long prefix."""
TOKENS_MIN = 1024
"""The shortest context of a graph; beyond, by powers of two."""


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    """Where it reads its input."""
    logits: torch.Tensor


class StepGraphs:
    """The graphs of one rank, captured when a shape is first met."""

    def __init__(self) -> None:
        self._captured: dict[BatchShape, _Captured] = {}
        self._pool: object = None

    def shape_for(self, sheet: Sheet) -> BatchShape | None:
        """What to fill a step up to; `None` if it is not one of those that are replayed."""
        if sheet.scored:
            # A graph leaves the logits of each span's last token alone.
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
        self, decoder: Decoder, batch: StepBatch, kv: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The logits of a step, in the current stream."""
        assert batch.shape is not None
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
        # Of no request: all rows fill up, and write nothing while it is tried and captured.
        empty = Sheet(kv[0].shape[2]).sent(decoder.device, shape)
        decoder.forward(empty, kv)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            logits = decoder.forward(empty, kv)
        assert logits is not None
        self._pool = graph.pool()
        return _Captured(graph, empty, logits)


def _blocks(tokens: int, sheet: Sheet) -> int:
    filled = max(TOKENS_MIN, 1 << (tokens - 1).bit_length())
    return -(-filled // sheet.block_tokens)
