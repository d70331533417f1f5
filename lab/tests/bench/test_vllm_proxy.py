"""How the proxy of `lab bench vllm --handoff` asks servers, beside servers that compute nothing."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import pytest

from lab.bench.vllm_handoff_gaps import LongAnswer
from lab.bench.vllm_pairs import draw_prompt
from lab.bench.vllm_proxy import AtOnce, alone, in_turn, together
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.vllm_servers import VllmServer

PARAMS = {"do_remote_prefill": True, "remote_port": 7, "penstock": {"address": "ipc:///here"}}
PROMPT = draw_prompt("1~side", tokens=64, answer_tokens=3)


@dataclass(slots=True)
class Recorded:
    """A server that answers at once, and what it was asked."""

    name: str
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def params(self) -> Any:
        """What its only request said about the transfer."""
        [body] = self.bodies
        return body["kv_transfer_params"]


@contextmanager
def serving(name: str) -> Iterator[Recorded]:
    recorded = Recorded(name)

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.bodies.append(body)
            self.send_response(200)
            self.end_headers()
            if not body.get("stream"):
                self.wfile.write(json.dumps({"kv_transfer_params": PARAMS}).encode())
                return
            for number in range(body["max_tokens"]):
                reported = {"tokens": [f"w{number}"], "token_logprobs": [-0.5]}
                part = {"choices": [{"logprobs": reported}]}
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        recorded.port = server.server_port
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join(60)


@pytest.fixture
def pair() -> Iterator[tuple[Recorded, Recorded]]:
    with serving("prefill") as prefill, serving("decode") as decode:
        yield prefill, decode


def as_server(recorded: Recorded) -> VllmServer:
    return cast("VllmServer", recorded)


def test_in_turn_the_decode_server_is_told_what_the_prefill_server_answered(
    pair: tuple[Recorded, Recorded],
) -> None:
    prefill, decode = pair

    answer = in_turn(as_server(prefill), as_server(decode), PROMPT)

    assert answer.words == ["w0", "w1", "w2"]
    assert prefill.bodies[0]["max_tokens"] == 1
    assert prefill.params()["do_remote_decode"] is True
    assert decode.params() == PARAMS


def test_at_once_both_servers_know_the_handoff_by_one_name(
    pair: tuple[Recorded, Recorded],
) -> None:
    prefill, decode = pair

    answer = AtOnce("ipc:///there")(as_server(prefill), as_server(decode), PROMPT)

    assert len(answer.times) == 3
    name = prefill.params()["penstock"]["handoff"]
    assert decode.params()["penstock"] == {"handoff": name, "address": "ipc:///there"}


def test_a_server_that_is_not_there_is_told_as_an_error() -> None:
    [port] = free_ports(1)

    answer = alone(as_server(Recorded("nobody", port)), PROMPT)

    assert "Refused" in answer.error
    assert answer.words == []


def test_prompts_that_are_asked_together_keep_their_order(
    pair: tuple[Recorded, Recorded],
) -> None:
    _, decode = pair
    prompts = [draw_prompt(f"{n}~side", tokens=8, answer_tokens=n) for n in (1, 2, 3)]

    answers = together(lambda prompt: alone(as_server(decode), prompt), prompts)

    assert [len(answer.words) for answer in answers] == [1, 2, 3]


def test_the_times_between_tokens_are_those_of_a_span(pair: tuple[Recorded, Recorded]) -> None:
    _, decode = pair
    long = draw_prompt("long~side", tokens=8, answer_tokens=40)

    answer = LongAnswer(as_server(decode), long)
    answer.wait_for(40)
    answer.close()

    assert len(answer.gaps(0.0, float("inf"))) == 39
    assert answer.gaps(0.0, 0.0) == []
