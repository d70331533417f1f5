"""The errors that clients get for wrong requests and for a full server."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import openai
import pytest

from penstock.config import ServeTable
from penstock_serve.observe.metrics import ServerMetrics
from penstock_serve.server import app
from penstock_serve.server.router import Router

if TYPE_CHECKING:
    from tests.serve.conftest import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}

JSON = {"content-type": "application/json"}
SIMPLE_TYPES = (
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json-patch+json",
)


@pytest.mark.parametrize(
    ("change", "param", "reported"),
    [
        ({"temperature": 3}, "temperature", "temperature is 3, must be a number from 0 to 2"),
        ({"temperature": "0"}, "temperature", "temperature is '0', must be a number"),
        ({"temperature": True}, "temperature", "temperature is true, must be a number"),
        ({"top_p": 0}, "top_p", "top_p is 0, must be a number above 0 and at most 1"),
        ({"top_k": -2}, "top_k", "top_k is -2, must be a whole number from -1"),
        ({"min_p": 1.5}, "min_p", "min_p is 1.5, must be a number from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be a number from 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty", "must be a number from -2 to 2"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is none"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "must be a number from -100 to 100"),
        ({"logit_bias": {"400": 1}}, "logit_bias", "token 400, must be from 0 to 399"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must be a table"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", "token 9999, must be from 0 to 399"),
        ({"n": 17}, "n", "n is 17, must be a whole number from 1 to 16"),
        ({"n": 1.5}, "n", "n is 1.5, must be a whole number"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, must be a whole number from 1"),
        ({"max_tokens": 10**12}, "max_tokens", "must be a whole number from 1 to"),
        ({"max_completion_tokens": []}, "max_completion_tokens", "is [], must be a whole number"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9, must be at most max_tokens, 8"),
        ({"min_tokens": 600}, "min_tokens", "what the prompt leaves of the longest context"),
        ({"seed": 2**70}, "seed", "must be a whole number of 64 bits"),
        ({"priority": 101}, "priority", "must be a whole number from -100 to 100"),
        ({"cache": "never"}, "cache", "must be one of 'use', 'read_only', 'off'"),
        ({"stop": ["x"] * 33}, "stop", "at most 32 strings"),
        ({"stop": ""}, "stop", "each of 1 to 256 characters"),
        ({"stop": ["x" * 257]}, "stop", "each of 1 to 256 characters"),
        ({"logprobs": 2}, "logprobs", "logprobs is 2, must be true or false"),
        ({"top_logprobs": 2}, "top_logprobs", "must be left out, or logprobs true"),
        ({"tools": [{}]}, "tools", "must be left out: this server calls no tools"),
        ({"tool_choice": "required"}, "tool_choice", "'required', must be 'none'"),
        ({"store": True}, "store", "store is true, must be false"),
        ({"store": 0}, "store", "store is 0, must be false"),
        ({"service_tier": "flex"}, "service_tier", "must be 'auto' or 'default'"),
        ({"modalities": ["audio"]}, "modalities", "must be ['text']"),
        ({"echo": True}, "echo", "echo is true, must be false"),
        ({"use_beam_search": True}, "use_beam_search", "must be false"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "must be true"),
        ({"metadata": {"a": 1}}, "metadata", "must be a table of at most 16 strings"),
        ({"response_format": {"type": "json_object"}}, "response_format", "{'type': 'text'}"),
        (
            {"stream_options": {"include_use": 1}},
            "stream_options.include_use",
            "did you mean include_usage?",
        ),
        ({"temprature": 1}, "temprature", "no field that this server knows; did you mean temp"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "Hello"}, "messages", "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "content is missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "role is missing"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            "messages[0].content",
            "messages[0].content is null, must be a text, or a list of texts",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "has 'messages', must have names of variables that the server does not set itself",
        ),
        (
            {"chat_template_kwargs": {"date": ["today"]}},
            "chat_template_kwargs.date",
            "must be a text, a number, or true or false",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "is 'robot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "is 'image_url', must be 'text'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "must be left out",
        ),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "tokens"),
        ({"max_tokens": 510}, "max_tokens", "the longest context"),
        ({"stream": "yes"}, "stream", "stream is 'yes', must be true or false"),
        ({"prompt_cache_key": 5}, "prompt_cache_key", "must be a string of at most 512"),
        ({"prompt_cache_key": "k" * 513}, "prompt_cache_key", "must be a string of at most"),
        ({"prompt_cache_retention": "forever"}, "prompt_cache_retention", "must be one of 'in_mem"),
        ({"penstock": {"ttl_s": 10**400}}, "penstock.ttl_s", "is a number of 1329 bits, must be"),
        ({"penstock": {"priority": -101}}, "penstock.priority", "must be a whole number from -100"),
        ({"penstock": {"over": "yes"}}, "penstock.over", "is 'yes', must be true or false"),
        ({"penstock": {"日本": 1}}, "penstock.日本", "is no hint, must be one of over"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    server: Running, change: dict[str, Any], param: str, reported: str
) -> None:
    answer = server.client.post("/v1/chat/completions", json={**CHAT, **change})

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert reported in error["message"]
    assert error["param"] == param
    # What the decoder would have said.
    assert "`" not in error["message"]


@pytest.mark.parametrize(
    ("prompt", "reported"),
    [
        ([1, 2, 99999], "token 99999, must be from 0"),
        ([1, -2], "token -2, must be from 0"),
        ([1, 2**70], f"token {2**70}, must be from 0"),
        ([1, 2**4000], "token a number of 4001 bits, must be from 0"),
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        (["one", 2], "prompt[1] is 2, must be a text, or tokens"),
        ([[1], []], "prompt[1] is [], must be a text, or tokens"),
        ([[1, "x"]], "prompt[0] has token 'x', must be from 0"),
        ([1, True], "prompt[0] is 1"),
        (["x"] * 129, "prompt has 129 entries, must have at most 128"),
        (["x", "word " * 600], "prompt[1] has"),
        ({"text": "x"}, "must be a text, tokens, or a list of these"),
        ("\ud800", "the body is no JSON"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(
    server: Running, prompt: Any, reported: str
) -> None:
    body = json.dumps({"prompt": prompt}).encode()

    answer = server.client.post("/v1/completions", content=body, headers=JSON)

    assert answer.status_code == 400, answer.text
    assert reported in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/admin/weights"])
@pytest.mark.parametrize("kind", [None, *SIMPLE_TYPES])
def test_a_body_that_is_not_declared_as_json_is_refused_with_the_header_to_add(
    server: Running, path: str, kind: str | None
) -> None:
    """As a page of any site could have a browser send it, and `curl -d` does."""
    body = json.dumps({"prompt": "x", "version": "2"}).encode()

    answer = server.client.post(
        path, content=body, headers={} if kind is None else {"content-type": kind}
    )

    assert answer.status_code == 415
    given = "is missing" if kind is None else f"is {kind!r}"
    assert answer.json()["error"]["message"] == (
        f"content-type {given}, must be application/json: add the header 'Content-Type: "
        "application/json', in curl with -H 'Content-Type: application/json'"
    )


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_declared_with_a_charset_and_in_any_case(server: Running, kind: str) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()

    answer = server.client.post("/v1/completions", content=body, headers={"content-type": kind})

    assert answer.status_code == 200, answer.text


DEEP = b'{"response_format": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
BODIES = [
    b"",
    b"{",
    b"[]",
    b'{"max_tokens": 1e999, "prompt": "x", "version": 1}',
    b'"text"',
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"user": "\xff"}',
    DEEP,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_request_is_refused(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/admin/weights"):
        answer = server.client.post(path, content=body, headers=JSON)

        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "x" * (1 << 20)})

    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the body has more than 1048576 bytes"


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent() -> None:
    """A client that asks first (`Expect: 100-continue`) sends none of it."""
    text: Any = None
    settings = ServeTable()
    served = app.Server(Router(), text, ServerMetrics(), model="m", settings=settings).app()
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nobody asked for the body")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    length = [(b"content-length", b"99999999999"), (b"content-type", b"application/json")]
    asyncio.run(served({**scope, "headers": length}, receive, send))

    assert sent[0]["status"] == 413
    assert b"the body has more than 1048576 bytes" in sent[1]["body"]


def test_a_compressed_body_is_refused_by_its_header(server: Running) -> None:
    body = gzip.compress(json.dumps({"prompt": "x"}).encode())

    answer = server.client.post(
        "/v1/completions", content=body, headers={"content-encoding": "gzip"}
    )

    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == (
        "content-encoding is 'gzip', must be left out: bodies are read as they are"
    )


def test_a_body_that_is_not_there_is_called_so(server: Running) -> None:
    answer = server.client.post("/v1/completions")

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body is empty, must be a JSON object"


def test_a_body_that_does_not_come_to_its_end_is_given_up() -> None:
    text: Any = None
    settings = ServeTable(body_s=0.05)
    served = app.Server(Router(), text, ServerMetrics(), model="m", settings=settings).app()
    sent: list[Any] = []
    first = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]

    async def receive() -> Any:
        return first.pop() if first else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(asyncio.wait_for(served({**scope, "query_string": b""}, receive, send), 60))

    assert sent[0]["status"] == 408
    assert b"did not come within 0.05 s" in sent[1]["body"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("GET", "/nothing", 404), ("GET", "/v1/models/other", 404)],
)
def test_errors_of_unknown_paths_have_the_same_format(
    server: Running, method: str, path: str, status: int
) -> None:
    answer = server.client.request(method, path)

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_openai_s_client_raises_what_it_would_raise_elsewhere(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="must be 'small-model'"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="temperature is 9"):
            client.completions.create(model="small-model", prompt="x", temperature=9)


def test_a_tenant_s_name_has_a_bound(server: Running) -> None:
    headers = {"x-penstock-tenant": "t" * 129}

    answer = server.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-penstock-tenant"


def test_a_client_that_goes_away_while_it_asks_harms_nobody(server: Running) -> None:
    host, _, port = server.address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=600) as half:
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99\r\n\r\n{"
        )

    assert server.client.get("/health").status_code == 200


def test_the_server_is_well_after_all_that(server: Running) -> None:
    assert server.complete("Are you well?")["choices"][0]["finish_reason"] == "length"
    assert server.client.get("/health").json() == {
        "status": "ok",
        "instances": {"instance-0": True},
    }
    assert server.cache()["cache"]["leases"] == 0
