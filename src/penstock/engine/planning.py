"""A step in the making: whose tokens it has, within the bounds of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.batch import PREVIOUS, Span
from penstock.engine.steps import Score

if TYPE_CHECKING:
    from penstock.engine.requests import Answer

SCORED_TOKENS = 128
"""Prompt tokens of a step that are told with their log-probabilities, at most: each needs a row of
logits as wide as the vocabulary."""


@dataclass(slots=True)
class Chunk:
    """The next tokens of an answer."""

    answer: Answer
    count: int
    ends: bool
    """Whether its last token is the answer's newest: the next one is chosen from it."""

    def span(self) -> Span:
        """The chunk as the ranks get it."""
        answer = self.answer
        assert answer.lease is not None
        start, stop = answer.scheduled, answer.scheduled + self.count
        tokens = answer.tokens[start:stop]
        tokens += [PREVIOUS] * (self.count - len(tokens))
        table = answer.lease.block_table.tolist()
        return Span(answer.arrival, start, tokens, table, self.ends)

    def score(self, span: int) -> Score | None:
        """What is wanted of the prompt's tokens in it, if anything is."""
        answer = self.answer
        prompt, start = answer.request.prompt, answer.scheduled
        targets = prompt[start + 1 : start + self.count + 1]
        if not targets or not answer.scores or start + 1 + len(targets) <= answer.scored:
            return None
        logprobs = answer.request.sampling.logprobs
        return Score(span, answer.arrival, list(targets), logprobs)


class Plan:
    """The chunks of one step."""

    def __init__(self, tokens: int, requests: int) -> None:
        self.tokens_left = tokens
        self.chunks: list[Chunk] = []
        self._scored_left = SCORED_TOKENS
        self._requests = requests
        self._names: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether nothing more fits in."""
        return self.tokens_left < 1 or len(self.chunks) >= self._requests

    def room_for(self, answer: Answer) -> int:
        """How many tokens of an answer fit in."""
        room = min(self.tokens_left, self._scored_left) if answer.scores else self.tokens_left
        return min(answer.left, room)

    def has(self, answer: Answer) -> bool:
        """Whether an answer takes part."""
        return answer.arrival in self._names

    def add(self, answer: Answer, count: int, *, ends: bool) -> None:
        """Adds the next tokens of an answer."""
        self.chunks.append(Chunk(answer, count, ends))
        self._names.add(answer.arrival)
        self.tokens_left -= count
        if answer.scores:
            self._scored_left -= count

    def in_batch_order(self) -> list[Chunk]:
        """Chunks of prompts first, single tokens of running answers last."""
        return sorted(
            self.chunks, key=lambda chunk: chunk.count == 1 and chunk.answer.scheduled > 0
        )
