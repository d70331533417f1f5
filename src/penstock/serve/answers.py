"""From an instance's tokens to OpenAI's answers, whole or as a stream.

| what a client reads      | made of                                                       |
|--------------------------|---------------------------------------------------------------|
| a completion             | every answer's text, log-probabilities, why it ended, usage    |
| a stream of chunks       | the same, piece by piece, as text becomes certain              |

`usage.prompt_tokens_details.cached_tokens` counts prompt tokens that came from a cache;
`cached_by_tier`, ours, says from which.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.engine.text import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from penstock.engine import messages as ms
    from penstock.engine.text import Text


@dataclass(slots=True)
class Piece:
    """What one answer has gained: text, tokens, or its end."""

    answer: int
    text: str
    offset: int
    """So many characters of the answer came before."""
    progress: list[ms.Progress] = field(default_factory=list)
    reason: str = ""


class Reader:
    """Follows all answers of one request."""

    def __init__(
        self, text: Text, *, prompt_tokens: int, answers: int, stops: Sequence[str]
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached: list[int] = []
        self._answers = [Answer(text, stops) for _ in range(answers)]
        self._waiting: list[list[ms.Progress]] = [[] for _ in range(answers)]
        self._ended = [False] * answers

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return all(self._ended)

    def take(self, progress: ms.Progress) -> Piece | None:
        """What is certain now and was not before; `None` if nothing is."""
        number = progress.answer
        if self._ended[number]:
            return None
        if progress.cached:
            self.cached = progress.cached
        answer = self._answers[number]
        new = ""
        offset = len(answer.so_far)
        waiting = self._waiting[number]
        if progress.token is not None:
            self.completion_tokens += 1
            waiting.append(progress)
            # The token that ends an answer is no part of its text.
            if progress.reason != "stop":
                new = answer.add(progress.token)
        reason = "stop" if answer.stopped else progress.reason
        if reason:
            new += answer.end()
            self._ended[number] = True
        if not new and not reason:
            return None
        self._waiting[number] = []
        return Piece(number, new, offset, waiting, reason)

    def stopped_by_reader(self, piece: Piece) -> bool:
        """Whether the answer ended because of a stop string, which the instance cannot know."""
        return self._answers[piece.answer].stopped

    def usage(self) -> dict[str, Any]:
        """OpenAI's count of tokens, with cached ones by tier."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached)},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How answers are dressed: as chat or as plain completions."""

    id: str
    model: str
    chat: bool
    logprobs: bool
    tiers: Sequence[str]
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, reader: Reader, pieces: Sequence[Piece], text: Text) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choices = []
        for number in sorted({piece.answer for piece in pieces}):
            own = [piece for piece in pieces if piece.answer == number]
            said = "".join(piece.text for piece in own)
            tokens = [progress for piece in own for progress in piece.progress]
            choice: dict[str, Any] = {"index": number, "finish_reason": _reason(own[-1].reason)}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": said}
            else:
                choice["text"] = said
            choice["logprobs"] = self._logprobs(tokens, text, offset=0)
            choices.append(choice)
        return {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": self._usage(reader),
        }

    def chunk(self, piece: Piece, text: Text, *, first: bool) -> dict[str, Any]:
        """A piece of a stream."""
        choice: dict[str, Any] = {
            "index": piece.answer,
            "finish_reason": _reason(piece.reason) if piece.reason else None,
            "logprobs": self._logprobs(piece.progress, text, offset=piece.offset),
        }
        if self.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        return {**self._head(), "choices": [choice]}

    def last_chunk(self, reader: Reader) -> dict[str, Any]:
        """The piece that tells the usage, if it is wanted."""
        return {**self._head(), "choices": [], "usage": self._usage(reader)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, reader: Reader) -> dict[str, Any]:
        by_tier = dict(zip(self.tiers, reader.cached, strict=False))
        return {**reader.usage(), "cached_by_tier": by_tier}

    def _logprobs(
        self, tokens: Sequence[ms.Progress], text: Text, *, offset: int
    ) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        rows = [_row(progress, text) for progress in tokens]
        if self.chat:
            return {"content": rows, "refusal": None}
        return {
            "tokens": [row["token"] for row in rows],
            "token_ids": [row["token_id"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in row["top_logprobs"]} for row in rows
            ],
            "text_offset": list(accumulate((len(row["token"]) for row in rows), initial=offset))[
                :-1
            ],
        }


def _row(progress: ms.Progress, text: Text) -> dict[str, Any]:
    assert progress.token is not None
    return {
        **_named(progress.token, progress.logprob, text),
        "top_logprobs": [_named(token, logprob, text) for token, logprob in progress.alternatives],
    }


def _named(token: int, logprob: float, text: Text) -> dict[str, Any]:
    said = text.decode([token])
    return {
        "token": said,
        "token_id": token,
        "logprob": logprob,
        "bytes": list(said.encode()),
    }


def _reason(reason: str) -> str:
    return "stop" if reason == "aborted" else reason


async def pieces_of(
    reader: Reader, tokens: AsyncGenerator[ms.Progress, None], stop: Callable[[int], None]
) -> AsyncGenerator[Piece, None]:
    """The pieces of a request as they become certain; tells `stop` of answers cut short."""
    async with aclosing(tokens):
        async for progress in tokens:
            piece = reader.take(progress)
            if piece is not None:
                if reader.stopped_by_reader(piece):
                    stop(piece.answer)
                yield piece
            if reader.done:
                return
