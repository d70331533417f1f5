"""Answers in OpenAI's forms, whole or as a stream of chunks.

`usage.prompt_tokens_details.cached_tokens` counts prompt tokens that came from a cache;
`cached_by_tier`, ours, says from which.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.text import Text
    from penstock.serve.answers import Piece, Reader, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How answers are dressed: as chat or as plain completions."""

    id: str
    model: str
    chat: bool
    logprobs: bool
    tiers: Sequence[str]
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, readers: Sequence[Reader], pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer to a request without a stream."""
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

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A piece of a stream."""
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

    def last_chunk(self, readers: Sequence[Reader]) -> dict[str, Any]:
        """The piece that tells the usage, if it is wanted."""
        return {**self._head(), "choices": [], "usage": self._usage(readers)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, readers: Sequence[Reader]) -> dict[str, Any]:
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
        }

    def _logprobs(self, rows: Sequence[Row]) -> dict[str, Any] | None:
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

    def _top(self, row: Row) -> dict[str, float] | None:
        """The likeliest tokens by what they read; of those that read alike, the likelier one."""
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
        """A token as text; one that is no whole character by its bytes, as OpenAI writes it."""
        found = self.text.token_bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            mark = "" if self.chat else "bytes:"
            return mark + "".join(f"\\x{byte:02x}" for byte in found)


def _reason(reason: str) -> str:
    return "stop" if reason == "aborted" else reason
