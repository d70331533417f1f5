"""The shapes of the decode loops: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama-like model and its batch."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    batch: int
    context: int
    """Tokens each request attends to, in every step."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, must be a multiple of {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, must be even for rotary positions")

    @property
    def parameters(self) -> int:
        """Numbers in the weights, embeddings included."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden
        ends = 2 * self.vocabulary * self.hidden + self.hidden
        return self.layers * (attention + feed_forward + norms) + ends


EIGHT_B = Shape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    batch=32,
    context=2048,
)
"""Llama 3.1 8B, batch 32 at 2k tokens."""
SMALL = Shape(
    layers=1,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=1024,
    vocabulary=4096,
    batch=32,
    context=256,
)
"""Some sixty launches a step, each so small that the GPU always waits for the next."""
