"""`penstock router` in front of two vLLM servers: answers are those of plain vLLM."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from processes import END_S, ENGINE_S

from lab.bench.vllm_model import HandoffModel
from lab.bench.vllm_servers import (
    BLOCK_TOKENS,
    VllmForks,
    VllmServer,
    penstock_settings,
    plain_settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm

TOKENS = 3 * BLOCK_TOKENS + 17
HANDED_OVER, PROMPTS_MAX = 3, 12
"""On a machine that is busy with other things, an engine may be too late for a handoff; then decode
computes the prompt, which is no failure."""


class Routed(NamedTuple):
    """Servers, and the port of the router in front of two of them."""

    plain: VllmServer
    prefill: VllmServer
    decode: VllmServer
    port: int


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    cores = sorted(os.sched_getaffinity(0))
    forks = VllmForks(Path(sys.executable), tmp_path_factory.mktemp("routed"))
    try:
        forks.make_model(HandoffModel(positions=1024))
        settings = [
            plain_settings(cores[0]),
            penstock_settings("kv_producer", cores[-1]),
            penstock_settings("kv_consumer", cores[0]),
        ]
        plain, prefill, decode = [forks.start(each) for each in settings]
        for server in (plain, prefill, decode):
            server.wait_ready()
        yield from with_router(plain, prefill, decode)
    finally:
        forks.close()


def with_router(plain: VllmServer, prefill: VllmServer, decode: VllmServer) -> Iterator[Routed]:
    urls = [f"http://127.0.0.1:{server.port}" for server in (prefill, decode)]
    command = [sys.executable, "-m", "penstock.cli.entry", "router", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--vllm-prefill", urls[0], "--vllm-decode", urls[1]],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        # It is printed at once: the servers are there.
        line = process.stdout.readline()
        found = re.search(r":(\d+)/v1", line)
        assert found, line
        until(lambda: b'"up":false' not in page(int(found[1]), "/health"))
        yield Routed(plain, prefill, decode, int(found[1]))
        process.terminate()
        assert process.wait(END_S) == 0
    finally:
        process.kill()
        process.communicate()


def page(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=END_S) as answer:
        content: bytes = answer.read()
        return content


def until(holds: Any) -> None:
    deadline = time.monotonic() + END_S
    while not holds():
        assert time.monotonic() < deadline


def ask(port: int, number: int, **more: Any) -> bytes:
    """Asks with a prompt of tokens that no other number has."""
    prompt = [10 + (number * 397 + 13 * each) % 2000 for each in range(TOKENS)]
    asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**asked, "return_tokens_as_token_ids": True, **more}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ENGINE_S) as answer:
        content: bytes = answer.read()
        return content


def told_in(body: bytes) -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities of an answer, whole or streamed."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.strip()]
    if lines[-1] == b"[DONE]":
        del lines[-1]
    found = [each["logprobs"] for line in lines for each in json.loads(line)["choices"]]
    tokens = [token for each in found for token in each["tokens"]]
    return tokens, [value for each in found for value in each["token_logprobs"]]


def agree(one: bytes, other: bytes) -> bool:
    (tokens, values), (other_tokens, expected) = told_in(one), told_in(other)
    return tokens == other_tokens and values == pytest.approx(expected, abs=5e-5)


def test_answers_through_the_router_are_those_of_plain_vllm(routed: Routed) -> None:
    answers: dict[int, bytes] = {}
    while (received := prompts_received(routed)) < HANDED_OVER and len(answers) < PROMPTS_MAX:
        number = len(answers) + 1
        answers[number] = ask(routed.port, number)

    assert received == HANDED_OVER
    assert all(agree(answer, ask(routed.plain.port, each)) for each, answer in answers.items())


def prompts_received(routed: Routed) -> float:
    return routed.decode.counted("vllm:penstock_prompts_received_total")


def test_a_stream_through_the_router_is_that_of_plain_vllm(routed: Routed) -> None:
    streamed = ask(routed.port, 101, stream=True)

    assert streamed.endswith(b"data: [DONE]\n\n")
    assert agree(streamed, ask(routed.plain.port, 101))


def test_errors_of_vllm_reach_the_client(routed: Routed) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(routed.port, 102, model="another")

    with refused.value as answer:
        assert answer.code == 404
        assert "another" in json.load(answer)["error"]["message"]


def test_a_prompt_whose_prefill_server_is_killed_is_computed_by_decode(routed: Routed) -> None:
    routed.prefill.pause()
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(ask(routed.port, 103)))
    asking.start()
    until(lambda: all(value == 1 for value in in_hand(routed.port)))

    routed.prefill.kill()

    asking.join(END_S)
    assert agree(answers[0], ask(routed.plain.port, 103))
    assert agree(ask(routed.port, 104), ask(routed.plain.port, 104))


def in_hand(port: int) -> list[float]:
    """Requests at each server."""
    lines = page(port, "/metrics").decode().splitlines()
    now = [line for line in lines if line.startswith("penstock_router_requests_now{")]
    return [float(line.rpartition(" ")[2]) for line in now]
