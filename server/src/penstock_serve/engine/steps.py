"""One step: its plan, the message to the ranks, and their results."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from penstock import HandoffOffer  # noqa: TC001
from penstock.toolkit import OperationId  # noqa: TC001

# msgspec reads the annotations when a message arrives, so these imports must be real.
from penstock_serve.engine.batch import PREVIOUS, TokenSpan
from penstock_serve.engine.sampling_options import Sampled, TokenSampling  # noqa: TC001

if TYPE_CHECKING:
    from penstock_serve.engine.requests import Answer

COPIES_ALONE = 0
"""The number of a step that computes nothing; real ones are counted from 1."""
STEP_S = 600.0
"""The timeout of a step. A rank that died or hangs is detected much earlier."""


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """A token to sample from the logits of a span, for an answer."""

    span: int
    """Which of the step's spans."""
    answer: int
    """Which of the scheduler's answers."""
    sampling: TokenSampling


class Score(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt whose log-probabilities are returned."""

    span: int
    """Which of the step's spans."""
    answer: int
    """Which of the scheduler's answers."""
    targets: list[int]
    """The token after each of the span's tokens; the prompt's last token has none."""
    logprobs: int
    """Alternatives that are returned with each."""


class StepOffer(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that a step begins, and that is handed over to another instance."""

    offer: HandoffOffer
    decode: str
    """The instance that gets it."""


class HandedSpan(msgspec.Struct, frozen=True, array_like=True):
    """A span whose KV is handed over."""

    span: int
    """Which of the step's spans."""
    handoff: str
    decode: str
    """The instance that gets it."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The work of one step, the same for every rank."""

    number: int
    spans: list[TokenSpan]
    draws: list[Draw]
    plan: bytes | None = None
    """Copies that the ranks make besides."""
    offers: list[StepOffer] = []
    """Prompts that this step begins and that will be handed over."""
    handed: list[HandedSpan] = []
    """The spans whose KV is handed over."""
    scores: list[Score] = []
    """Chunks whose log-probabilities are returned."""
    joins: list[OperationId] = []
    """Loads that its layers wait for; only with the rank in this process."""


class HandedCounts(msgspec.Struct, frozen=True, array_like=True):
    """What ranks have sent or received in handoffs since they started, and hold now."""

    parts_verified: int = 0
    """Received parts, each verified by its checksums."""
    bytes_moved: int = 0
    """Bytes that were sent or received."""
    landing_bytes: int = 0
    """Memory of landing areas now, with retired ones whose writer may still write."""

    def __add__(self, other: HandedCounts) -> HandedCounts:
        return HandedCounts(
            self.parts_verified + other.parts_verified,
            self.bytes_moved + other.bytes_moved,
            self.landing_bytes + other.landing_bytes,
        )


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's result of a step."""

    number: int
    sampled: list[Sampled]
    """One for each draw, from the first rank."""
    reports: list[bytes] = []
    """Reports about copies."""
    scored: list[list[Sampled]] = []
    """One list for each of the step's scores, from the first rank."""
    handed: HandedCounts | None = None
    """The counters of a rank that takes part in handoffs."""


class StepTimes:
    """How long steps take, by medians of the last ones."""

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=15)
        self._decode_s: deque[float] = deque(maxlen=15)

    def add(self, prefilled: int, decoded: int, seconds: float) -> None:
        """A step has ended; one that is no clear case says nothing."""
        if not prefilled:
            self._decode_s.append(seconds)
        elif prefilled > PREFILL_SHARE * (prefilled + decoded):
            self._token_s.append(seconds / prefilled)

    def expected_s(self, prefilled: int) -> float:
        """For a step with so many tokens of prompts; 0 while nothing is known."""
        decode_s = median(self._decode_s) if self._decode_s else 0.0
        token_s = median(self._token_s) if self._token_s else 0.0
        return decode_s + prefilled * token_s


PREFILL_SHARE = 0.75
"""Prefill speed is measured in steps in which at least this share of the tokens is prompts."""
SCORED_TOKENS = 128
"""The most prompt tokens of a step whose log-probabilities are returned: each needs a row of logits
as wide as the vocabulary."""


@dataclass(slots=True)
class Chunk:
    """The next tokens of an answer."""

    answer: Answer
    count: int
    ends: bool
    """Whether its last token is the answer's newest, from whose logits the next is sampled."""

    def span(self) -> TokenSpan:
        """The chunk as part of a `Step`."""
        answer = self.answer
        assert answer.lease is not None
        start, stop = answer.scheduled, answer.scheduled + self.count
        tokens = answer.tokens[start:stop]
        tokens += [PREVIOUS] * (self.count - len(tokens))
        table = answer.lease.block_table.tolist()
        return TokenSpan(answer.arrival, start, tokens, table, self.ends)

    def score(self, span: int) -> Score | None:
        """The chunk as a `Score`, if its prompt is scored."""
        answer = self.answer
        prompt, start = answer.request.prompt, answer.scheduled
        targets = prompt[start + 1 : start + self.count + 1]
        if not targets or not answer.scores or start + 1 + len(targets) <= answer.scored:
            return None
        logprobs = answer.request.sampling.logprobs
        return Score(span, answer.arrival, list(targets), logprobs)


class PlannedStep:
    """The chunks of one step."""

    def __init__(self, tokens: int, requests: int) -> None:
        self.tokens_left = tokens
        self.chunks: list[Chunk] = []
        self.joins: list[OperationId] = []
        """Loads that it does not wait for before it begins."""
        self._scored_left = SCORED_TOKENS
        self._requests = requests
        self._names: set[int] = set()

    @property
    def full(self) -> bool:
        return self.tokens_left < 1 or len(self.chunks) >= self._requests

    def room_for(self, answer: Answer) -> int:
        """How many tokens of an answer fit into the step."""
        room = min(self.tokens_left, self._scored_left) if answer.scores else self.tokens_left
        return min(answer.left, room)

    def has(self, answer: Answer) -> bool:
        return answer.arrival in self._names

    def add(self, answer: Answer, count: int, *, ends: bool) -> None:
        self.chunks.append(Chunk(answer, count, ends))
        self._names.add(answer.arrival)
        self.tokens_left -= count
        if answer.scores:
            self._scored_left -= count

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks if chunk.count > 1)

    def in_batch_order(self) -> list[Chunk]:
        """Chunks of prompts first, single tokens of running answers last."""
        return sorted(
            self.chunks, key=lambda chunk: chunk.count == 1 and chunk.answer.scheduled > 0
        )
