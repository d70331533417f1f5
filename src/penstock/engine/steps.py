"""What the scheduler asks of the ranks in one step, and what they answer."""

from __future__ import annotations

import msgspec

# msgspec reads the annotations when a message arrives, so these imports must be real.
from penstock.engine.batch import Span  # noqa: TC001
from penstock.engine.sampling import Sampled, Wish  # noqa: TC001

COPIES_ALONE = 0
"""The number of a step that computes nothing; real ones are counted from 1."""
STEP_S = 600.0
"""A step that takes longer never ends. A rank that died or hangs is noticed long before."""


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """A token to choose: from the logits of a span, for an answer."""

    span: int
    """Which of the step's spans."""
    answer: int
    """Which of the scheduler's answers."""
    wish: Wish


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A prompt whose KV another instance is going to get."""

    handoff: str
    token_count: int
    cached: int
    """So many leading tokens have their KV already."""
    slots: list[int]
    """Where its blocks lie, from the first one on."""
    keys: list[bytes]
    """What the sums of each block are bound to."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One step's work: every rank gets the same."""

    number: int
    spans: list[Span]
    draws: list[Draw]
    plan: bytes | None = None
    """Copies that the ranks carry out beside it."""
    offers: list[Offer] = []
    """Prompts that this step begins, and that are handed over."""
    handed: list[tuple[int, str]] = []
    """The spans whose KV is handed over, and the names of their handoffs."""


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one rank has to say about a step."""

    number: int
    sampled: list[Sampled]
    """One for each draw, from the first rank."""
    reports: list[bytes] = []
    """What became of copies."""
