"""Decode loops in plain torch: a Llama-like model that computes one token a request and step.

Every step embeds the last tokens, runs all layers with attention over the whole context, and
ends as an engine's step does: the sampled tokens, with a few runners-up, are copied to the
host (4 KiB at batch 32) and read there. Weights are random, and the context keeps its length
(the oldest position is written over), so every step does the same work.

With two steps in flight the copy has a stream of its own, so that the next step's kernels do
not queue behind it, and the tokens of a step are read while the next one runs; with one, the
tokens are read before the next step is submitted.

The one rule: the model never learns whether blocks are being moved. All it does is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.interference.shapes import Shape

SAMPLED = 16
"""The token and its runners-up: of 32 requests, 4 KiB of 64-bit numbers."""
_EPSILON = 1e-5


class Decoder:
    """Weights, KV and the forward pass of one step, in place on the device."""

    def __init__(self, shape: Shape, *, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        generator = torch.Generator(device=device).manual_seed(1)

        def random(*size: int) -> torch.Tensor:
            drawn = torch.empty(size, device=device, dtype=dtype)
            # Of the scale that keeps numbers of the same size from layer to layer.
            return drawn.normal_(0.0, size[-1] ** -0.5, generator=generator)

        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._embedding = random(shape.vocabulary, shape.hidden)
        self._head = random(shape.vocabulary, shape.hidden)
        self._norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self._layers = [
            (
                torch.ones(shape.hidden, device=device, dtype=dtype),
                random(width, shape.hidden),
                random(kv_width, shape.hidden),
                random(kv_width, shape.hidden),
                random(shape.hidden, width),
                torch.ones(shape.hidden, device=device, dtype=dtype),
                random(shape.intermediate, shape.hidden),
                random(shape.intermediate, shape.hidden),
                random(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.layers)
        ]
        kv = (shape.batch, shape.kv_heads, shape.context, shape.head_dim)
        self._keys = [random(*kv) for _ in range(shape.layers)]
        self._values = [random(*kv) for _ in range(shape.layers)]
        self._cos, self._sin = _rotary_tables(shape, device, dtype)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self.sampled = torch.zeros(shape.batch, SAMPLED, dtype=torch.int64, device=device)
        """The result of the last step: each request's token first."""

    def forward(self) -> Iterator[None]:
        """One step, from the last tokens to the next; pauses after each layer."""
        shape = self.shape
        hidden = functional.embedding(self.sampled[:, 0], self._embedding)
        cos, sin = self._cos[self._position], self._sin[self._position]
        for number, weights in enumerate(self._layers):
            before, query, key, value, out, after, gate, up, down = weights
            normed = _rms_norm(hidden, before)
            q = functional.linear(normed, query).view(shape.batch, shape.heads, shape.head_dim)
            k = functional.linear(normed, key).view(shape.batch, shape.kv_heads, shape.head_dim)
            v = functional.linear(normed, value).view(shape.batch, shape.kv_heads, shape.head_dim)
            attended = self._attend(number, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
            hidden = hidden + functional.linear(attended, out)
            normed = _rms_norm(hidden, after)
            gated = functional.silu(functional.linear(normed, gate))
            hidden = hidden + functional.linear(gated * functional.linear(normed, up), down)
            if number < shape.layers - 1:
                yield
        logits = functional.linear(_rms_norm(hidden, self._norm), self._head)
        self.sampled.copy_(torch.topk(logits, SAMPLED, dim=-1).indices)
        self._position.add_(1).remainder_(shape.context)
        yield

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Writes the new K and V over the oldest, and attends to the whole context."""
        shape = self.shape
        self._keys[layer].index_copy_(2, self._position, k[:, :, None])
        self._values[layer].index_copy_(2, self._position, v[:, :, None])
        # The query heads of a KV head stand in for query positions: without a mask that is the
        # same, and K and V are read once for all of them.
        grouped = q.view(shape.batch, shape.kv_heads, -1, shape.head_dim)
        attended = functional.scaled_dot_product_attention(
            grouped, self._keys[layer], self._values[layer]
        )
        return attended.reshape(shape.batch, -1)


class DecodeLoop:
    """A decoder on a CUDA stream, step by step, and its results on their way to the host.

    Args:
        decoder: What a step computes.
        captured: Whether a step is one CUDA graph, rather than a launch per operation.
        in_flight: Steps submitted before the oldest one is read: one or two.
        priority: Of its streams. The movers' have the lowest there is, which is 0, and that of any
            stream whose maker does not care: to be ahead of them an engine needs -1.
    """

    def __init__(
        self, decoder: Decoder, *, captured: bool, in_flight: int, priority: int = -1
    ) -> None:
        if in_flight not in {1, 2}:
            raise ValueError(f"in_flight is {in_flight}, must be 1 or 2")
        self.stream = torch.cuda.Stream(priority=priority)
        self.piece_count = 1 if captured else decoder.shape.layers
        self._decoder = decoder
        self._in_flight = in_flight
        self._results = [_Result(decoder.sampled, self.stream, in_flight) for _ in range(in_flight)]
        self._submitted = 0
        self._read = 0
        self._graph = self._capture() if captured else None

    def step(self) -> Iterator[None]:
        """Submits a step, and pauses after each layer, or once for a captured one."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            if self._graph is not None:
                self._graph.replay()
            else:
                pieces = self._decoder.forward()
                for _ in range(self.piece_count - 1):
                    next(pieces)
                    yield
                next(pieces)
            self._results[self._submitted % self._in_flight].send(self._decoder.sampled)
        self._submitted += 1
        yield

    def read_oldest(self) -> bool:
        """Reads the oldest result once as many steps are in flight as may be."""
        if self._submitted - self._read < self._in_flight:
            return False
        self._results[self._read % self._in_flight].read()
        self._read += 1
        return True

    def settle(self) -> None:
        """Waits for all that was submitted; a step that was given up is not missed."""
        self.stream.synchronize()
        for result in self._results:
            result.settle()
        self._read = self._submitted

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(2):  # What is chosen or taken at the first use must not be captured.
                for _ in self._decoder.forward():
                    pass
            self.stream.synchronize()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in self._decoder.forward():
                    pass
        return graph


class _Result:
    """The sampled tokens of one step on their way to the host."""

    def __init__(self, like: torch.Tensor, stream: torch.cuda.Stream, in_flight: int) -> None:
        self._sent = torch.empty_like(like)
        self._there = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self._compute = stream
        self._copies = torch.cuda.Stream(priority=stream.priority) if in_flight > 1 else stream
        self._ready, self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def send(self, sampled: torch.Tensor) -> None:
        """Starts the copy behind the step that was submitted last."""
        # The next step writes to `sampled`; what is copied must stay as it is.
        self._sent.copy_(sampled)
        self._ready.record(self._compute)
        if self._copies is not self._compute:
            self._copies.wait_event(self._ready)
        with torch.cuda.stream(self._copies):
            self._there.copy_(self._sent, non_blocking=True)
        self._arrived.record(self._copies)

    def read(self) -> list[int]:
        """Waits for the tokens, as an engine does before it can tell anyone."""
        self._arrived.synchronize()
        tokens: list[int] = self._there[:, 0].tolist()
        return tokens

    def settle(self) -> None:
        """Waits for a copy under way."""
        self._copies.synchronize()


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As eager code writes it: in 32 bits, one launch an operation."""
    wide = hidden.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
    return weight * (wide * scale).to(hidden.dtype)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-high, low), dim=-1) * sin


def _rotary_tables(
    shape: Shape, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context, device=device).float(), 500_000.0**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
