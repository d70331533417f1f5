"""Conversations for `lab bench vllm`: turns that come back when the device has forgotten them.

Every conversation begins with the same system prompt and grows by a question and an answer a
turn. All conversations take a turn before any takes its next one, so between two turns of one
of them the device sees all the others: with more conversations than fit, it has evicted what
the next turn needs.

The one rule: the prompts of a round depend on its seed alone. The answers are drawn as well,
not taken from the model, so that every side computes the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How many conversations of which size."""

    name: str = "conversations"
    conversations: int = 8
    turns: int = 3
    system_tokens: int = 128
    question_tokens: int = 160
    answer_tokens: int = 8
    together: int = 2
    """So many requests are under way at the same time."""
    vocabulary: int = 2048
    reuse: bool = True
    """Without it every prompt is new: nothing can be found anywhere."""

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all conversations at the end, the common beginning counted once."""
        grown = self.turns * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.conversations * grown

    def waves(self, seed: int) -> Iterator[list[list[int]]]:
        """The prompts of a round, in groups that are sent together."""
        draw = Random(seed)
        system = self._draw(draw, self.system_tokens)
        talks = [list(system) for _ in range(self.conversations)]
        for _ in range(self.turns):
            for first in range(0, self.conversations, self.together):
                wave = talks[first : first + self.together]
                for talk in wave:
                    talk.extend(self._draw(draw, self.question_tokens))
                yield [self._prompt(draw, talk) for talk in wave]
                for talk in wave:
                    talk.extend(self._draw(draw, self.answer_tokens))

    def _prompt(self, draw: Random, talk: list[int]) -> list[int]:
        return list(talk) if self.reuse else self._draw(draw, len(talk))

    def _draw(self, draw: Random, count: int) -> list[int]:
        return [draw.randrange(10, self.vocabulary) for _ in range(count)]


WORKLOADS = (
    Workload(),
    Workload(name="new", reuse=False),
    Workload(name="chats", conversations=6, turns=4),
)
"""All three have the same working set, so the same engines run them."""
RECORDED = (
    Workload(
        name="short prompts",
        conversations=128,
        turns=1,
        system_tokens=0,
        question_tokens=40,
        answer_tokens=1,
        together=16,
        reuse=False,
    ),
    Workload(
        name="1,024 tokens",
        conversations=12,
        turns=1,
        system_tokens=0,
        question_tokens=1024,
        answer_tokens=1,
        reuse=False,
    ),
    Workload(
        name="8,192 tokens, found",
        conversations=24,
        turns=1,
        system_tokens=8160,
        question_tokens=32,
        answer_tokens=1,
        together=4,
    ),
)
"""For what recording costs: many requests, each of which takes little else, and prompts of many
blocks of which hardly any has to be computed."""
