"""From an instance's tokens to the text of answers, piece by piece, as it becomes certain.

A prompt has a `Reader`, which follows all its answers and makes `Piece`s of them. `forms.py`
turns pieces into what OpenAI's clients read.
"""

from __future__ import annotations

import codecs
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.messages import Scored
from penstock.engine.text import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from penstock.engine import messages as ms
    from penstock.engine.text import Text


@dataclass(frozen=True, slots=True)
class Row:
    """A token with its log-probability."""

    token: int
    logprob: float | None
    """None for the first token of a prompt: nothing precedes it."""
    alternatives: Sequence[tuple[int, float]]
    offset: int
    """So many characters of the text come before it."""


@dataclass(slots=True)
class Piece:
    """What one answer has gained: text, tokens, or its end."""

    answer: int
    """Which of the answers to its prompt."""
    choice: int
    """Which of all answers of the request."""
    text: str
    generated: int
    """Tokens that were generated for it."""
    rows: list[Row] = field(default_factory=list)
    """Its tokens, if log-probabilities are told."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What clients are told of the answers to one prompt."""

    prompt: Sequence[int]
    answers: int = 1
    stops: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: bool = False
    echo: str | None = None
    """The prompt's text, if answers begin with it."""
    generates: bool = True
    """Whether anything is wanted besides the prompt."""
    first_choice: int = 0


class Reader:
    """Follows all answers to one prompt."""

    def __init__(self, text: Text, telling: Telling) -> None:
        self.prompt_tokens = len(telling.prompt)
        self.completion_tokens = 0
        self.cached: list[int] = []
        self._text = text
        self._telling = telling
        self._scored: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        self._following = [
            _Following(text, telling, begins=0 if telling.echo is None else len(telling.echo))
            for _ in range(telling.answers)
        ]

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return all(each.ended for each in self._following)

    def score(self, scored: ms.Scored) -> None:
        """Takes in log-probabilities of the prompt."""
        told = zip(scored.logprobs, scored.alternatives, strict=False)
        self._scored |= dict(enumerate(told, start=scored.position))

    def take(self, progress: ms.Progress) -> Piece | None:
        """What is certain now and was not before; `None` if nothing is."""
        found = self._following[progress.answer]
        if found.ended:
            return None
        if progress.cached:
            self.cached = progress.cached
        if self._telling.generates:
            if progress.token is not None:
                self.completion_tokens += 1
            text, rows, generated, reason = found.take(progress)
        else:
            text, rows, generated, reason = "", [], 0, "length"
            found.ended = True
        if not found.begun and self._telling.echo is not None and (text or reason):
            text, rows = self._telling.echo + text, [*self._prompt_rows(), *rows]
        if not text and not reason:
            return None
        found.begun = True
        choice = self._telling.first_choice + progress.answer
        return Piece(progress.answer, choice, text, generated, rows, reason)

    def stopped_by_reader(self, piece: Piece) -> bool:
        """Whether the answer ended because of a stop string, which the instance cannot know."""
        return self._following[piece.answer].stopped

    def _prompt_rows(self) -> list[Row]:
        if not self._telling.logprobs:
            return []
        offsets, rows = _Offsets(0), []
        for position, token in enumerate(self._telling.prompt):
            logprob, alternatives = self._scored.get(position, (None, []))
            offset = offsets.add(self._text.token_bytes(token))
            rows.append(Row(token, logprob, alternatives, offset))
        return rows


class _Following:
    """One answer as it grows."""

    def __init__(self, text: Text, telling: Telling, *, begins: int) -> None:
        self.begun = False
        self.ended = False
        self._text = text
        self._logprobs = telling.logprobs
        self._answer = Answer(text, telling.stops, min_tokens=telling.min_tokens)
        self._offsets = _Offsets(begins)
        self._rows: list[Row] = []
        self._generated = 0

    @property
    def stopped(self) -> bool:
        return self._answer.stopped

    def take(self, progress: ms.Progress) -> tuple[str, list[Row], int, str]:
        """Text that is certain now, and with it the tokens it is made of; why it ended."""
        new = ""
        if progress.token is not None:
            self._generated += 1
            if self._logprobs:
                self._rows.append(self._row(progress, progress.token))
            # The token that ends an answer is no part of its text.
            if progress.reason != "stop":
                new = self._answer.add(progress.token)
        reason = "stop" if self._answer.stopped else progress.reason
        if reason:
            new += self._answer.end()
            self.ended = True
        if not new and not reason:
            return "", [], 0, ""
        rows, generated = self._rows, self._generated
        self._rows, self._generated = [], 0
        return new, rows, generated, reason

    def _row(self, progress: ms.Progress, token: int) -> Row:
        offset = self._offsets.add(self._text.token_bytes(token))
        return Row(token, progress.logprob, progress.alternatives, offset)


class _Offsets:
    """Where tokens begin in a text, in characters; some end in the middle of one."""

    def __init__(self, begins: int) -> None:
        self._count = begins
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: bytes) -> int:
        """Takes the next token in; returns how many characters were complete before it."""
        before = self._count
        self._count += len(self._decoder.decode(token))
        return before


async def pieces_of(
    reader: Reader,
    tokens: AsyncGenerator[ms.Progress | ms.Scored, None],
    stop: Callable[[int], None],
) -> AsyncGenerator[Piece, None]:
    """The pieces of a prompt's answers as they become certain; tells `stop` of those cut short."""
    async with aclosing(tokens):
        async for progress in tokens:
            if isinstance(progress, Scored):
                reader.score(progress)
                continue
            piece = reader.take(progress)
            if piece is not None:
                if reader.stopped_by_reader(piece):
                    stop(piece.answer)
                yield piece
            if reader.done:
                return
