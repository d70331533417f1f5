"""A small server that streams answers as OpenAI's API does, or as badly as it is told to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from penstock_serve.loadtest.exchange import LoadTarget
from penstock_serve.server.vllm_server import ServerUrl
from tests.serve.vllm_servers import FakeVllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.vllm_servers import Conversation

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 30},
}


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def chunk(text: str) -> str:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


WHOLE = [
    event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
    *map(chunk, ("a", "b", "c")),
    event(choices=[], usage=USAGE),
    "data: [DONE]\n\n",
]


def answer_whole(conversation: Conversation) -> None:
    conversation.stream(*WHOLE)


@pytest.fixture
def openai() -> Iterator[FakeVllm]:
    server = FakeVllm("openai")
    server.always = answer_whole
    yield server
    server.stop()


@pytest.fixture
def target(openai: FakeVllm) -> LoadTarget:
    return target_at(openai.url)


def target_at(url: str, **more: Any) -> LoadTarget:
    return LoadTarget(url=ServerUrl.read("URL", url), model="small", **{"timeout_s": 60.0, **more})
