"""Turns the tokens of an instance into responses in OpenAI's format.

Each prompt has an `AnswerReader`, which collects the tokens of all its answers and returns an
`AnswerPiece` as soon as its text is final. `AnswerFormat` makes whole responses, or chunks of a
stream, out of pieces.
"""

from __future__ import annotations

import codecs
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from penstock_serve.engine.requests import Reason
from penstock_serve.engine.text import AnswerText
from penstock_serve.observe.live import PHASES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from penstock_serve.engine.requests import Output, Request
    from penstock_serve.engine.sampling_options import Sampled
    from penstock_serve.engine.text import Text
    from penstock_serve.server.openai_requests import TextRequest


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token with its log-probability."""

    token: int
    logprob: float | None
    """`None` for the first token of a prompt, which has no logits before it."""
    alternatives: Sequence[tuple[int, float]]
    offset: int
    """The number of characters of the text before it."""


@dataclass(slots=True)
class AnswerPiece:
    """An addition to one answer: text, tokens, or its end."""

    answer: int
    """The number of the answer, of those to the same prompt."""
    choice: int
    """The number of the answer, of all in the request."""
    text: str
    generated: int
    """Tokens that were generated for it."""
    rows: list[TokenRow] = field(default_factory=list)
    """Its tokens, if log-probabilities are returned."""
    reason: str = ""


class AnswerReader:
    """Collects all answers to one prompt."""

    def __init__(
        self,
        text: Text,
        asked: TextRequest,
        sent: Request,
        *,
        echo: str | None = None,
        first_choice: int = 0,
    ) -> None:
        self.sent = sent
        """What an instance gets."""
        self.prompt_tokens = len(sent.prompt)
        self.completion_tokens = 0
        self.cached: Sequence[int] = ()
        self.handed = False
        """Whether another instance computed the rest of the prompt."""
        self.spent_s: Sequence[float] = ()
        """The time until the first token: queued, loading, handed over, prefill."""
        self.decode_s = 0.0
        """The time from the first text to the last; whoever passes it on measures it."""
        self._text = text
        self._asked = asked
        self._echo = echo
        """The prompt's text, if answers begin with it."""
        self._first_choice = first_choice
        self._scored: dict[int, Sampled] = {}
        self._answers = [
            _GrowingAnswer(text, asked, begins=0 if echo is None else len(echo))
            for _ in range(asked.n)
        ]

    @property
    def done(self) -> bool:
        return all(each.ended for each in self._answers)

    @property
    def phases_s(self) -> list[float]:
        """The time of each of `PHASES`; empty before the first token."""
        return [*self.spent_s, self.decode_s] if self.spent_s else []

    def score(self, progress: Output) -> None:
        """Adds log-probabilities of the prompt."""
        self._scored |= dict(enumerate(progress.scored, start=progress.position))

    def take(self, progress: Output) -> AnswerPiece | None:
        """The text that a token made final; `None` if there is none."""
        found = self._answers[progress.answer]
        if found.ended:
            return None
        if progress.cached_by_tier:
            self.cached = progress.cached_by_tier
        if progress.spent_s and not self.spent_s:
            self.spent_s = progress.spent_s
        self.handed |= progress.handed
        if self._asked.max_tokens != 0:
            if progress.sampled is not None:
                self.completion_tokens += 1
            text, rows, generated, reason = found.take(progress)
        else:
            text, rows, generated, reason = "", [], 0, "length"
            found.ended = True
        if not found.begun and self._echo is not None and (text or reason):
            text, rows = self._echo + text, [*self._prompt_rows(), *rows]
        if not text and not reason:
            return None
        found.begun = True
        choice = self._first_choice + progress.answer
        return AnswerPiece(progress.answer, choice, text, generated, rows, reason)

    def stopped_by_reader(self, piece: AnswerPiece) -> bool:
        """Whether the answer ended by a stop string, which the instance does not know."""
        return self._answers[piece.answer].stopped

    def _prompt_rows(self) -> list[TokenRow]:
        if self._asked.logprobs is None:
            return []
        offsets, rows = _Offsets(0), []
        for position, token in enumerate(self.sent.prompt):
            known = self._scored.get(position)
            offset = offsets.add(self._text.token_bytes(token))
            logprob, alternatives = (known.logprob, known.alternatives) if known else (None, [])
            rows.append(TokenRow(token, logprob, alternatives, offset))
        return rows


class _GrowingAnswer:
    def __init__(self, text: Text, asked: TextRequest, *, begins: int) -> None:
        self.begun = False
        self.ended = False
        self._text = text
        self._logprobs = asked.logprobs is not None
        self._answer = AnswerText(text, asked.stop, min_tokens=asked.min_tokens)
        self._offsets = _Offsets(begins)
        self._rows: list[TokenRow] = []
        self._generated = 0

    @property
    def stopped(self) -> bool:
        return self._answer.stopped

    def take(self, progress: Output) -> tuple[str, list[TokenRow], int, str]:
        """The text that is final now, its rows, its number of tokens, and why it ended."""
        new, sampled = "", progress.sampled
        if sampled is not None:
            self._generated += 1
            if self._logprobs:
                self._rows.append(self._row(sampled))
            # The token that ends an answer is not part of its text.
            if progress.reason is not Reason.STOP:
                new = self._answer.add(sampled.token)
        reason = "" if progress.reason is None else progress.reason.value
        reason = "stop" if self._answer.stopped else reason
        if reason:
            new += self._answer.end()
            self.ended = True
        if not new and not reason:
            return "", [], 0, ""
        rows, generated = self._rows, self._generated
        self._rows, self._generated = [], 0
        return new, rows, generated, reason

    def _row(self, sampled: Sampled) -> TokenRow:
        offset = self._offsets.add(self._text.token_bytes(sampled.token))
        return TokenRow(sampled.token, sampled.logprob, sampled.alternatives, offset)


class _Offsets:
    """Where tokens begin in a text, in characters; a token may end within a character."""

    def __init__(self, begins: int) -> None:
        self._count = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: bytes) -> int:
        """Adds the next token; returns how many characters were complete before it."""
        before = self._count
        self._count += len(self._decoder.decode(token))
        return before


async def pieces_of(
    reader: AnswerReader,
    tokens: AsyncGenerator[Output, None],
    stop: Callable[[int], None],
) -> AsyncGenerator[AnswerPiece, None]:
    """The pieces of a prompt's answers; calls `stop` for those that a stop string ends."""
    async with aclosing(tokens):
        async for progress in tokens:
            if progress.scored:
                reader.score(progress)
                continue
            piece = reader.take(progress)
            if piece is not None:
                if reader.stopped_by_reader(piece):
                    stop(piece.answer)
                yield piece
            if reader.done:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The response format: chat or plain completions."""

    id: str
    model: str
    chat: bool
    logprobs: bool
    tiers: Sequence[str]
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, readers: Sequence[AnswerReader], pieces: Sequence[AnswerPiece]
    ) -> dict[str, Any]:
        """The response to a request without `stream`."""
        choices = []
        for number in sorted({piece.choice for piece in pieces}):
            own = [piece for piece in pieces if piece.choice == number]
            said = "".join(piece.text for piece in own)
            choice: dict[str, Any] = {"index": number, "finish_reason": _reason(own[-1].reason)}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": said}
            else:
                choice["text"] = said
            choice["logprobs"] = self._logprobs([row for piece in own for row in piece.rows])
            choices.append(choice)
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self._usage(readers),
        }

    def chunk(self, piece: AnswerPiece, *, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.choice,
            "finish_reason": _reason(piece.reason) if piece.reason else None,
            "logprobs": self._logprobs(piece.rows),
        }
        if self.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        return {**self._head(), "choices": [choice]}

    def last_chunk(self, readers: Sequence[AnswerReader]) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head(), "choices": [], "usage": self._usage(readers)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, readers: Sequence[AnswerReader]) -> dict[str, Any]:
        """OpenAI's count of tokens, with cached ones by tier."""
        prompt = sum(reader.prompt_tokens for reader in readers)
        completion = sum(reader.completion_tokens for reader in readers)
        cached = [sum(each) for each in zip_longest(*(r.cached for r in readers), fillvalue=0)]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
            "cached_by_tier": dict(zip(self.tiers, cached, strict=False)),
            "timings_ms": timings_ms(readers),
        }

    def _logprobs(self, rows: Sequence[TokenRow]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                {
                    **self._named(row.token, row.logprob),
                    "top_logprobs": [self._named(*other) for other in row.alternatives],
                }
                for row in rows
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._written(row.token) for row in rows],
            "token_ids": [row.token for row in rows],
            "token_logprobs": [row.logprob for row in rows],
            "top_logprobs": [self._top(row) for row in rows],
            "text_offset": [row.offset for row in rows],
        }

    def _top(self, row: TokenRow) -> dict[str, float] | None:
        """The likeliest tokens by their text; of those with equal text, the likelier one."""
        if row.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in row.alternatives:
            found.setdefault(self._written(token), logprob)
        return found

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._written(token),
            "token_id": token,
            "logprob": logprob,
            "bytes": list(self.text.token_bytes(token)),
        }

    def _written(self, token: int) -> str:
        """A token as text; one that is not whole characters as bytes, in OpenAI's notation."""
        found = self.text.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            mark = "" if self.chat else "bytes:"
            return mark + "".join(f"\\x{byte:02x}" for byte in found)


def timings_ms(readers: Sequence[AnswerReader]) -> dict[str, float]:
    """What answers spent their time on; of several prompts, the longest time of each phase."""
    spent = [each for reader in readers if (each := reader.phases_s)]
    return {
        name: round(1000 * max(times), 1)
        for name, times in zip(PHASES, zip(*spent, strict=True), strict=False)
    }


def _reason(reason: str) -> str:
    return "stop" if reason == "aborted" else reason
