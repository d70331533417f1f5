"""Whatever a server does to a request ends as an answer, or as a failure with its kind."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import UnavailableError
from penstock_serve.loadtest.exchange import RETRY_AFTER_MAX_S
from penstock_serve.loadtest.workloads import ChatMessage
from tests.loadtest.conftest import USAGE, WHOLE, chunk, event, target_at
from tests.serve.vllm_servers import drop, fail, hang

if TYPE_CHECKING:
    from penstock_serve.loadtest.exchange import LoadTarget, StreamedAnswer
    from tests.serve.vllm_servers import Behaviour, Conversation, FakeVllm

HISTORY = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="why?")]


def ask(target: LoadTarget) -> StreamedAnswer:
    return asyncio.run(target.ask(HISTORY, 3))


def test_an_answer_has_its_text_its_times_and_what_the_server_counted(target: LoadTarget) -> None:
    answer = ask(target)

    assert answer.failure is None
    assert answer.texts == ["a", "b", "c"]
    times = [answer.began_s, *answer.token_times_s, answer.ended_s]
    assert times == sorted(times)
    assert len(times) == 5
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (40, 30)


def test_a_chat_is_asked_as_a_stream_with_usage(openai: FakeVllm, target: LoadTarget) -> None:
    ask(target)

    [asked] = openai.asked
    assert asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "why?"},
    ]
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}
    assert (asked["max_tokens"], asked["temperature"], asked["model"]) == (3, 0, "small")
    assert "ignore_eos" not in asked


def test_completions_get_the_history_as_one_prompt(openai: FakeVllm) -> None:
    openai.always = lambda conversation: conversation.stream(
        event(choices=[{"text": "so"}]), "data: [DONE]\n\n"
    )
    answer = ask(target_at(openai.url, api="completions", ignore_eos=True))

    assert answer.failure is None
    assert answer.texts == ["so"]
    assert openai.asked[0]["prompt"] == "system: be brief\n\nuser: why?\n\nassistant:"
    assert openai.asked[0]["ignore_eos"] is True


def test_events_may_be_cut_anywhere_on_their_way(openai: FakeVllm, target: LoadTarget) -> None:
    text = "".join(WHOLE).replace("\n", "\r\n")
    openai.always = lambda conversation: conversation.stream(*text)

    answer = ask(target)

    assert answer.failure is None
    assert answer.texts == ["a", "b", "c"]


def test_thoughts_and_calls_of_tools_are_tokens_too(openai: FakeVllm, target: LoadTarget) -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "look"}}]},
    ]
    events = [event(choices=[{"delta": delta}]) for delta in deltas]
    openai.always = lambda conversation: conversation.stream(*events, "data: [DONE]\n\n")

    answer = ask(target)

    assert answer.failure is None
    assert len(answer.token_times_s) == 2


def streams(*pieces: str, ends: bool = True) -> Behaviour:
    def behave(conversation: Conversation) -> None:
        conversation.stream(*pieces, ends=ends)
        if not ends:
            conversation.drop()

    return behave


def says(raw: bytes) -> Behaviour:
    def behave(conversation: Conversation) -> None:
        conversation.wfile.write(raw)
        conversation.drop()

    return behave


def busy(retry_after: str) -> Behaviour:
    content = {"error": {"message": "too busy"}}
    return lambda conversation: conversation.answer(503, content, **{"retry-after": retry_after})


TOO_MUCH = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}


@pytest.mark.parametrize(
    ("behave", "kind", "message"),
    [
        (drop, "unreachable", "closed the connection without an answer$"),
        (fail(400), "status 400", "400"),
        (busy("1"), "status 503", "too busy"),
        (streams(chunk("a"), ends=False), "cut", "broke off"),
        (streams(chunk("a")), "cut", r"without \[DONE\]"),
        (streams("data: {no json\n\n"), "garbage", "an event is '{no json'"),
        (streams('data: {"choices": 5}\n\n'), "garbage", "choices"),
        (streams("data: \xff\xfe\n\n"), "garbage", "an event is"),
        (streams("hello\n"), "garbage", "a line of the stream is 'hello'"),
        (streams("data: " + "x" * (2 << 20)), "garbage", "longer than 1048576 bytes"),
        (streams(event(choices=[], usage=TOO_MUCH)), "garbage", "5 cached_tokens of 4"),
        (streams(event(choices=[], usage={"prompt_tokens": -1})), "garbage", "prompt_tokens"),
        (streams(event(error={"message": "it died"})), "error in stream", "it died"),
        (streams("data: [DONE]\n\n"), "empty", "no token"),
        (lambda conversation: conversation.answer(200, {}), "garbage", "content-type"),
        (says(b"220 mail.example ESMTP\r\n\r\n"), "garbage", "broke off"),
        (says(b"HTTP/1.1 200 OK\r\n"), "unreachable", "closed"),
    ],
)
def test_what_a_server_does_wrong_has_a_kind_and_a_message(
    openai: FakeVllm, target: LoadTarget, behave: Behaviour, kind: str, message: str
) -> None:
    openai.always = behave

    answer = ask(target)

    assert answer.failure is not None
    assert answer.failure.kind == kind
    assert re.search(message, answer.failure.message), answer.failure.message
    assert answer.ended_s >= answer.began_s


@pytest.mark.parametrize(
    "behave", [hang, lambda each: (each.stream(chunk("a"), ends=False), each.hang())]
)
def test_a_server_that_says_nothing_more_is_left_after_the_timeout(
    openai: FakeVllm, behave: Behaviour
) -> None:
    openai.always = behave

    answer = ask(target_at(openai.url, timeout_s=0.5))

    assert answer.failure is not None
    assert answer.failure.kind == "timeout"
    # A machine that stood still may have sent nothing before the timeout.
    assert not openai.asked or openai.left.acquire(timeout=60), "the connection was not closed"


def test_a_server_that_never_ends_its_answer_is_left_after_the_timeout(openai: FakeVllm) -> None:
    def talk(conversation: Conversation) -> None:
        conversation.stream(chunk("a"), ends=False)
        data = chunk("b").encode()
        while True:
            conversation.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    openai.always = talk

    answer = ask(target_at(openai.url, timeout_s=0.5))

    assert answer.failure is not None
    assert answer.failure.kind in {"timeout", "garbage"}


def test_nobody_at_the_port_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]

    answer = ask(target_at(f"http://127.0.0.1:{port}"))

    assert answer.failure is not None
    assert answer.failure.kind == "unreachable"


@pytest.mark.parametrize(
    ("given", "waits_s"),
    [("7", 7.0), ("1e9", RETRY_AFTER_MAX_S), ("nan", 0), ("-3", 0), ("Wed, 21 Oct 2015", 0)],
)
def test_how_long_a_busy_server_wants_to_be_left_alone_is_bounded(
    openai: FakeVllm, target: LoadTarget, given: str, waits_s: float
) -> None:
    openai.always = busy(given)

    answer = ask(target)

    assert answer.failure is not None
    assert answer.failure.retry_after_s == waits_s


def test_the_first_model_of_a_server_is_asked_for_with_the_key(
    openai: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def models(conversation: Conversation) -> None:
        told.append(conversation.headers["authorization"])
        conversation.answer(200, {"object": "list", "data": [{"id": "one"}, {"id": "two"}]})

    monkeypatch.setattr(openai.RequestHandlerClass, "do_GET", models)

    unnamed = replace(target_at(openai.url, api_key="secret"), model="")
    assert asyncio.run(unnamed.served_model()).id == "one"
    assert told == ["Bearer secret"]


def test_a_server_that_names_no_model_is_refused_with_what_to_do(target: LoadTarget) -> None:
    with pytest.raises(UnavailableError, match="names no model: give the name with --model"):
        asyncio.run(replace(target, model="").served_model())


def test_usage_of_the_last_event_counts(openai: FakeVllm, target: LoadTarget) -> None:
    first = json.loads(json.dumps(USAGE)) | {"completion_tokens": 1}
    openai.always = lambda conversation: conversation.stream(
        event(choices=[{"delta": {"content": "a"}}], usage=first), *WHOLE[2:]
    )

    answer = ask(target)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
