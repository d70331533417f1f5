"""What the scheduler asks of the ranks in one step, and what they answer."""

from __future__ import annotations

import msgspec

# msgspec reads the annotations when a message arrives, so these imports must be real.
from penstock.engine.batch import Span  # noqa: TC001
from penstock.engine.wishes import Sampled, Wish  # noqa: TC001

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
    scheduler: int
    """Which life of the scheduler gives it."""


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt whose tokens are wanted with their log-probabilities."""

    span: int
    """Which of the step's spans."""
    answer: int
    """Which of the scheduler's answers."""
    targets: list[int]
    """What follows each of the span's tokens; nothing may be known to follow the last one."""
    logprobs: int
    """So many alternatives are told with each."""


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
    scores: list[Score] = []
    """Prompts of which every token is wanted with its log-probability."""


class HandedCounts(msgspec.Struct, frozen=True, array_like=True):
    """What ranks have handed over, or taken in, since they started."""

    parts_verified: int = 0
    """Parts that were taken in: each was compared with its sums."""
    bytes_moved: int = 0
    """Bytes that were sent or taken in."""

    def __add__(self, other: HandedCounts) -> HandedCounts:
        return HandedCounts(
            self.parts_verified + other.parts_verified, self.bytes_moved + other.bytes_moved
        )


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one rank has to say about a step."""

    number: int
    sampled: list[Sampled]
    """One for each draw, from the first rank."""
    reports: list[bytes] = []
    """What became of copies."""
    scored: list[list[Sampled]] = []
    """One list for each of the step's scores, from the first rank."""
    handed: HandedCounts | None = None
    """Of a rank that takes part in handoffs."""
