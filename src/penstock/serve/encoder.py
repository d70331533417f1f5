"""Text to tokens beside the event loop: a long text delays nobody but its own request.

Tokenizers let other threads run while they work. Short texts and long ones have threads of their
own, so that a short one never waits behind a long one. What is certainly too long is refused by
its characters, before anything is encoded.

The one rule: the number of texts that wait is bounded.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from penstock.engine.text import TextTooLong
from penstock.serve.fields import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.engine.text import Text

LONG_CHARACTERS = 20_000
"""A text of this length takes tens of milliseconds."""
WAITING_MAX = 256
FoundT = TypeVar("FoundT")


class Encoder:
    """A tokenizer with threads of its own."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._short = ThreadPoolExecutor(2, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")
        self._waiting = 0

    async def encode(self, text: str, *, longest: int, param: str) -> list[int]:
        """The tokens of a text.

        Raises:
            BadRequest: it has more tokens than the longest that is allowed, or too many wait.
        """
        return await self._run(
            len(text), longest, param, lambda: self._text.encode(text, longest=longest)
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, longest: int
    ) -> list[int]:
        """The tokens of a conversation.

        Raises:
            BadRequest: it has more tokens than the longest that is allowed, the model's template
                does not take it, or too many wait.
        """
        characters = sum(len(turn["content"]) + 1 for turn in messages)
        return await self._run(
            characters,
            longest,
            "messages",
            lambda: self._text.encode_chat(messages, longest=longest),
        )

    async def _run(
        self, characters: int, longest: int, param: str, encode: Callable[[], FoundT]
    ) -> FoundT:
        if self._waiting >= WAITING_MAX:
            raise BadRequest(
                f"{self._waiting} texts wait to be encoded, at most {WAITING_MAX} may", status=429
            )
        threads = self._long if characters > LONG_CHARACTERS else self._short
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, encode)
        except TextTooLong as error:
            raise BadRequest(
                f"{param} {error}, must have at most {longest}, the longest context less one",
                param=param,
            ) from error
        except ValueError as error:
            raise BadRequest(str(error), param=param) from error
        finally:
            self._waiting -= 1
