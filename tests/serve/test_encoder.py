"""Texts become tokens beside the event loop: a long one delays nobody, and too many are refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock_serve.engine.text import Text
from penstock_serve.server import text_endpoint as module
from penstock_serve.server.fields import BadRequest
from penstock_serve.server.text_endpoint import LONG_CHARACTERS, Encoder

LONG = "x" * (LONG_CHARACTERS + 1)


class Tokenizer:
    """One that is not done with a long text before the test says so."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        if len(text) > LONG_CHARACTERS:
            assert self.released.wait(600), "the event loop waits for the tokenizer"
        return [len(text)]

    def get_vocab(self) -> dict[str, int]:
        return {"x": 0}


def test_while_a_long_text_is_encoded_others_are_served() -> None:
    tokenizer = Tokenizer()
    encoder = Encoder(Text(tokenizer))

    async def play() -> None:
        slow = [
            asyncio.create_task(encoder.encode(LONG, longest=1 << 20, param="prompt"))
            for _ in range(4)
        ]
        for _ in range(3):
            assert await encoder.encode("short", longest=99, param="prompt") == [5]
        assert not any(task.done() for task in slow)
        tokenizer.released.set()
        assert await asyncio.gather(*slow) == [[len(LONG)]] * 4

    asyncio.run(asyncio.wait_for(play(), 60))


def test_more_texts_than_may_wait_are_refused_with_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    tokenizer = Tokenizer()
    encoder = Encoder(Text(tokenizer))

    async def play() -> None:
        slow = [
            asyncio.create_task(encoder.encode(LONG, longest=1 << 20, param="prompt"))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(BadRequest, match="2 texts wait") as refused:
            await encoder.encode("short", longest=99, param="prompt")
        assert refused.value.status == 429
        tokenizer.released.set()
        await asyncio.gather(*slow)
        assert await encoder.encode("short", longest=99, param="prompt") == [5]

    asyncio.run(asyncio.wait_for(play(), 60))


def test_what_is_certainly_too_long_is_not_encoded_at_all() -> None:
    encoder = Encoder(Text(Tokenizer()))

    async def play() -> Any:
        with pytest.raises(BadRequest, match="must have at most 9") as refused:
            await encoder.encode(LONG, longest=9, param="prompt[3]")
        return refused.value.param

    assert asyncio.run(asyncio.wait_for(play(), 60)) == "prompt[3]"
