"""What clients hear when they, or the server's room, are at fault."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import openai
import pytest

from penstock.serve import app
from penstock.serve.metrics import Metrics
from penstock.serve.router import Router

if TYPE_CHECKING:
    from tests.serve.conftest import Running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("change", "param", "told"),
    [
        ({"temperature": 3}, "temperature", "temperature is 3.0, must be from 0 to 2"),
        ({"top_p": 0}, "top_p", "top_p is 0.0, must be above 0"),
        ({"n": 17}, "n", "n is 17, must be from 1 to 16"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, must be from 1"),
        ({"max_tokens": 10**12}, "max_tokens", "must be from 1 to"),
        ({"seed": 2**70}, "seed", "must be a number of 64 bits"),
        ({"priority": 101}, "priority", "priority is 101, must be from -100 to 100"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 strings"),
        ({"top_logprobs": 2}, "top_logprobs", "must be left out, or logprobs true"),
        ({"tools": [{}]}, "tools", "tools"),
        ({"presence_penalty": 0.5}, "presence_penalty", "must be left out here"),
        ({"response_format": {"type": "json_object"}}, "response_format", "must be 'text'"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "role is robot"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "tokens"),
        ({"max_tokens": 510}, None, "the longest context"),
        ({"stream": "yes"}, "stream", "Expected `bool`"),
    ],
)
def test_a_wrong_request_is_refused_by_the_name_of_its_field(
    server: Running, change: dict[str, Any], param: str | None, told: str
) -> None:
    answer = server.client.post("/v1/chat/completions", json={**CHAT, **change})

    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([1, 2, 99999], "token 99999, must be from 0"),
        ([1, -2], "token -2, must be from 0"),
        ([1, 2**70], f"token {2**70}, must be from 0"),
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        (["one", "two"], "prompt has 2 entries"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused(server: Running, prompt: Any, told: str) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": prompt})

    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


DEEP = b'{"response_format": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
BODIES = [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"a": NaN}', b'{"user": "\xff"}', DEEP]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_request_is_refused(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/admin/weights"):
        answer = server.client.post(path, content=body)

        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(server: Running) -> None:
    answer = server.client.post("/v1/completions", json={"prompt": "x" * (1 << 20)})

    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the body has more than 1048576 bytes"


def test_a_body_that_does_not_come_to_its_end_is_given_up() -> None:
    text: Any = None
    settings = app.ServerSettings(body_s=0.05)
    served = app.Server(Router(), text, Metrics(), model="m", settings=settings).app()
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
def test_what_is_not_there_is_told_in_the_same_shape(
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
    with socket.create_connection((host, int(port)), timeout=60) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")

    assert server.client.get("/health").status_code == 200


def test_the_server_is_well_after_all_that(server: Running) -> None:
    assert server.complete("Are you well?")["choices"][0]["finish_reason"] == "length"
    assert server.client.get("/health").json() == {
        "status": "ok",
        "instances": {"instance-0": True},
    }
    assert server.cache()["cache"]["leases"] == 0
