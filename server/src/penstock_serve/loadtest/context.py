"""What fits into the context of a model: sessions and traces are cut to it before they are asked.

A workload is made of words, and a model counts tokens. How many tokens a word and a message become
is asked of the server itself, by three short prompts that no workload has. From then on a prompt is
estimated from above, so that no prompt with its answer is longer than the context.

The one rule: what was cut is said in one line, and what cannot be cut is refused before the run.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock_serve.loadtest.workloads import VARIATION, WORDS, ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock_serve.loadtest.exchange import LoadTarget
    from penstock_serve.loadtest.workloads import Profile, ScriptSession, ScriptTurn

PROBE_TOKENS = 1
"""The answer to a prompt that is sent only to be counted."""
SPREAD = 4.0
"""Words of more than one token vary: a text of n words may have so many times √n tokens more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """How many tokens a server makes of prompts, estimated from above."""

    per_word: float = 1.5
    per_message: float = 16.0
    """Of a message beyond its words: what marks its role and its end."""
    fixed: float = 96.0
    """Of a prompt beyond its messages: such as a system prompt that the chat template has."""

    @classmethod
    def worst(cls) -> TokenCounts:
        """Of a model that makes a token of every letter."""
        return cls(per_word=7.0, per_message=48.0, fixed=256.0)

    def tokens(self, words: int, messages: int) -> int:
        """The most tokens that a prompt can have."""
        spread = SPREAD * math.sqrt(words) if self.per_word > 1 else 0.0
        return math.ceil(self.per_word * words + spread + self.per_message * messages + self.fixed)

    def words(self, tokens: int, messages: int) -> int:
        """The most words that a prompt of so many tokens can have; 0 if not even one fits."""
        fits, beyond = 0, tokens + 1
        while beyond - fits > 1:
            middle = (fits + beyond) // 2
            fits, beyond = (
                (middle, beyond) if self.tokens(middle, messages) <= tokens else (fits, middle)
            )
        return fits


async def count_tokens(target: LoadTarget) -> TokenCounts:
    """Asks a server how many tokens it makes of words; cautious numbers if it does not say."""
    short = (ChatMessage(role="user", content=WORDS[0]),)
    said = ChatMessage(role="assistant", content=WORDS[1])
    every = (ChatMessage(role="user", content=" ".join(WORDS)),)
    one, three, all_words = await asyncio.gather(
        _tokens_of(target, short),
        _tokens_of(target, (*short, said, *short)),
        _tokens_of(target, every),
    )
    if one is None or three is None or all_words is None:
        return TokenCounts()
    return TokenCounts(
        per_word=max(1.0, (all_words - one) / (len(WORDS) - 1)),
        per_message=max(1.0, (three - one) / 2),
        fixed=float(one),
    )


async def _tokens_of(target: LoadTarget, history: Sequence[ChatMessage]) -> int | None:
    answer = await target.ask(history, PROBE_TOKENS)
    return answer.usage.prompt_tokens if answer.usage else None


def _longest_words(profile: Profile, turns: int) -> int:
    """The most words that the last of so many turns of a session has before it."""
    most = round(profile.turn_tokens * max(VARIATION))
    kept = turns if profile.keeps_history else 1
    words = profile.system_tokens + profile.context_tokens + kept * most
    # A server's own answer has at most so many tokens, and the script's so many words.
    return words + (kept - 1) * profile.output_tokens


def _message_count(profile: Profile, turns: int) -> int:
    """How many messages the prompt of the last of so many turns has."""
    asked = 2 * turns - 1 if profile.keeps_history else 1
    return asked + (profile.system_tokens > 0)


def fits(profile: Profile, counts: TokenCounts, context: int) -> bool:
    """Whether all turns fit into a context."""
    return _most_tokens(profile, profile.turns, counts) <= context


def _most_tokens(profile: Profile, turns: int, counts: TokenCounts) -> int:
    """Of the last of so many turns, with its answer."""
    words, messages = _longest_words(profile, turns), _message_count(profile, turns)
    return counts.tokens(words, messages) + profile.output_tokens


def fit_profile(profile: Profile, counts: TokenCounts, context: int) -> Profile:
    """The same sessions, with fewer turns if more do not fit into a context.

    Raises `ConfigError`: not even the first turn fits.
    """
    turns = profile.turns
    while turns > 1 and _most_tokens(profile, turns, counts) > context:
        turns -= 1
    needed = _most_tokens(profile, turns, counts)
    if needed > context:
        raise ConfigError(
            "--workload",
            f"asks for up to {needed:,} tokens in its first turn, answer included, and "
            f"the model takes {context:,}: give less by --system-tokens, --context-tokens, "
            "--turn-tokens or --output-tokens",
        )
    return replace(profile, turns=turns)


@dataclass(slots=True)
class CutSessions:
    """Sessions of one turn, cut so that prompt and answer fit into a context together.

    Prompts lose their ends, so that equal beginnings stay equal. `cut` counts the requests that
    lost something.
    """

    sessions: Iterable[ScriptSession]
    counts: TokenCounts
    context: int
    cut: int = 0

    def __iter__(self) -> Iterator[ScriptSession]:
        for session in self.sessions:
            fitted = replace(session, turns=tuple(map(self._fitted, session.turns)))
            self.cut += fitted != session
            yield fitted

    def _fitted(self, turn: ScriptTurn) -> ScriptTurn:
        # An answer gets no more than half, so that there is always a prompt.
        output = min(turn.output_tokens, max(1, self.context // 2))
        words = self.counts.words(self.context - output, messages=len(turn.messages))
        messages = tuple(
            replace(each, content=" ".join(each.content.split(" ")[: max(1, words)]))
            for each in turn.messages
        )
        return replace(turn, messages=messages, output_tokens=output)
