"""The router in front of vLLM servers: who is asked for what, and what becomes of failures."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.cli.app import run
from tests.serve.conftest import SOON_S, eventually
from tests.serve.vllm_servers import (
    LONG,
    FakeVllm,
    RunningRouter,
    drop,
    events_of,
    fail,
    hang,
    hang_in_a_handoff,
    once_asked,
    reply,
    running,
    starting,
    whole_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.serve.vllm_servers import Conversation


@pytest.fixture
def vllm() -> Iterator[Callable[[str], FakeVllm]]:
    """Starts servers by their names."""
    with starting() as start:
        yield start


@pytest.fixture
def servers(vllm: Callable[[str], FakeVllm]) -> tuple[FakeVllm, FakeVllm]:
    return vllm("prefill"), vllm("decode")


@pytest.fixture
def router(servers: tuple[FakeVllm, FakeVllm]) -> Iterator[RunningRouter]:
    prefill, decode = servers
    with running([prefill], [decode]) as found:
        yield found


# Requests and answers.


def test_an_answer_is_as_vllm_said_it(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    answer = router.complete()

    assert answer.status_code == 200
    assert answer.json() == whole_of(servers[1])
    assert answer.headers["x-of-vllm"] == "kept"
    assert answer.headers["x-request-id"] == "cmpl-decode"


def test_a_stream_is_as_vllm_said_it(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    assert router.stream() == "".join(events_of(servers[1]))


def test_events_that_arrive_in_pieces_are_put_together(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    text = "".join(events_of(servers[1]))
    servers[1].always = lambda asked: asked.stream(*(text[at : at + 7] for at in range(0, 200, 7)))

    assert router.stream() == text[: len(range(0, 200, 7)) * 7]


def test_the_first_prompt_is_handed_over_in_turn_and_the_next_ones_at_once(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers

    router.complete()
    router.complete("Another prompt. " + LONG)

    first, second = (each["kv_transfer_params"] for each in decode.asked)
    names = [each["kv_transfer_params"]["penstock"]["handoff"] for each in prefill.asked]
    assert first["remote_host"] == "here"
    assert [each["penstock"]["handoff"] for each in (first, second)] == names
    assert second == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "penstock": {"handoff": names[1], "address": prefill.address},
    }
    assert len(set(names)) == 2
    assert router.counted("prompts_total", by="prefill") == 2


def test_the_prefill_server_computes_one_token_and_other_fields_pass_unread(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers
    more = {"temperature": 0.5, "of_tomorrow": {"a": [1.0, 1e300]}, "cache_salt": "s"}

    router.complete(max_tokens=50, min_tokens=5, logprobs=2, stream=True, **more)

    (asked,), (answered,) = prefill.asked, decode.asked
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    assert asked == {"prompt": LONG, "max_tokens": 1, "stream": False, **more}
    del answered["kv_transfer_params"]
    assert answered == {
        "prompt": LONG,
        "max_tokens": 50,
        "min_tokens": 5,
        "logprobs": 2,
        "stream": True,
        **more,
    }


def test_hints_reach_both_servers_where_their_connectors_read_them(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers

    router.complete(penstock={"over": True}, prompt_cache_retention="24h")
    router.complete("Another prompt. " + LONG, penstock={"ttl_s": 60, "priority": -1})
    router.complete("short", penstock={"keep_tokens": 16})

    hints = [
        {name: value for name, value in each["kv_transfer_params"]["penstock"].items()
         if name not in {"handoff", "address"}}
        for each in (*prefill.asked, *decode.asked)
    ]  # fmt: skip
    over = {"priority": 1, "ttl_s": 86400.0, "keep_tokens": 0}
    later = {"priority": -1, "ttl_s": 60.0}
    assert hints == [over, later, over, later, {"keep_tokens": 16}]
    assert not any("penstock" in each for each in (*prefill.asked, *decode.asked))
    assert not any("prompt_cache_retention" in each for each in decode.asked)


def test_requests_with_one_cache_key_go_to_one_server(vllm: Callable[[str], FakeVllm]) -> None:
    decode = [vllm("one"), vllm("two")]
    with running([], decode) as router:
        # Prompts have nothing in common. Salts keep clients apart that chose the same key.
        for number, salt in enumerate("aaaabcde"):
            router.complete(f"{number}", prompt_cache_key="k", cache_salt=salt)

    first = next(server for server in decode if server.asked[0]["cache_salt"] == "a")
    assert [each["cache_salt"] for each in first.asked][:4] == list("aaaa")
    assert sorted(len(each.asked) for each in decode) == [2, 6]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt_cache_key": 5}, "prompt_cache_key is 5, must be a string of at most 512"),
        ({"penstock": {"ttl_s": 0}}, "penstock.ttl_s is 0, must be a number of seconds above 0"),
        ({"penstock": 5}, "penstock is 5, must be a table with over, keep_tokens"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention is '48h', must be one of"),
        (
            {"penstock": {"over": True}, "kv_transfer_params": {"penstock": True}},
            "penstock is beside kv_transfer_params, must be in it",
        ),
    ],
)
def test_wrong_hints_are_refused_by_name(
    router: RunningRouter, more: dict[str, Any], said: str
) -> None:
    answer = router.client.post("/v1/completions", json={"prompt": LONG, **more})

    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_a_chat_is_handed_over(router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]) -> None:
    prefill, _ = servers
    messages = [{"role": "user", "content": LONG}]

    answer = router.client.post(
        "/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 9}
    )

    assert answer.status_code == 200
    assert prefill.asked[0]["max_completion_tokens"] == 1
    assert prefill.asked[0]["messages"] == messages


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"kv_transfer_params": {"penstock": False}},
        {"prompt": [LONG, LONG]},
        {"prompt": [[5] * 500, [6] * 500]},
        {"prompt": "short"},
        {"prompt": 5},
        {"prompt": []},
    ],
)
def test_what_cannot_be_handed_over_goes_to_decode_as_it_came(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm], more: dict[str, Any]
) -> None:
    prefill, decode = servers

    answer = router.client.post("/v1/completions", json={"prompt": LONG, **more})

    assert answer.status_code == 200
    assert not prefill.asked
    assert decode.asked == [{"prompt": LONG, **more}]
    assert router.counted("prompts_total", by="decode") == 1


@pytest.mark.parametrize("prompt", [[LONG], [7] * 500, [[7] * 500]])
def test_one_prompt_is_handed_over_however_it_is_written(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm], prompt: Any
) -> None:
    router.complete(prompt)

    assert [each["prompt"] for each in servers[0].asked] == [prompt]


def test_a_body_that_is_no_json_is_left_to_vllm(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    servers[1].always = fail(400)

    headers = {"content-type": "application/json"}
    answer = router.client.post("/v1/completions", content=b'{"prompt": ', headers=headers)

    assert (answer.status_code, answer.json()) == (400, {"error": {"message": "400"}})
    assert servers[1].bodies == [b'{"prompt": ']


def test_models_are_those_of_a_decode_server(router: RunningRouter) -> None:
    answer = router.client.get("/v1/models/a/b", headers={"authorization": "Bearer of-vllm"})

    assert answer.json() == {"path": "/v1/models/a/b", "key": "Bearer of-vllm"}


def test_the_key_of_a_client_goes_to_both_servers(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    router.client.post(
        "/v1/completions", json={"prompt": LONG}, headers={"authorization": "Bearer of-vllm"}
    )

    assert [each.headers[0]["authorization"] for each in servers] == ["Bearer of-vllm"] * 2


def test_a_router_with_a_key_refuses_other_clients(servers: tuple[FakeVllm, FakeVllm]) -> None:
    prefill, decode = servers
    with running([prefill], [decode], key="sesame") as router:
        refused = [router.complete().status_code, router.client.get("/v1/models").status_code]
        told = {"authorization": "Bearer sesame"}
        answer = router.client.post("/v1/completions", json={"prompt": LONG}, headers=told)

        assert refused == [401, 401]
        assert answer.status_code == router.client.get("/health").status_code == 200


# Failures of prefill servers.


@pytest.mark.parametrize("failure", [fail(500), fail(503), fail(429), drop])
@pytest.mark.parametrize("known", ["", "known"], ids=["in turn", "at once"])
def test_another_prefill_server_computes_what_one_did_not(
    vllm: Callable[[str], FakeVllm], failure: Callable[[Conversation], None], known: str
) -> None:
    bad, good, decode = vllm("bad"), vllm("good"), vllm("decode")
    with running([bad, good], [decode]) as router:
        if known:
            for number in range(2):
                router.complete(f"{number} {LONG}")
            assert len(bad.asked) == len(good.asked) == 1
        bad.always = once_asked(decode, failure) if known else failure
        # It waits for the KV in vain, as vLLM does.
        decode.always = lambda asked: (
            hang_in_a_handoff if asked.handoff.get("address") == bad.address else reply
        )(asked)

        answer = router.complete(f"new {LONG}")

        assert answer.json() == whole_of(decode)
        assert decode.asked[-1]["kv_transfer_params"]["penstock"]["address"] == good.address
        assert router.counted("requests_total", server=bad.url, outcome="failed") == 1
        assert router.counted("retries_total", role="prefill") == 1


def test_decode_computes_what_no_prefill_server_does(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers
    router.complete()
    prefill.always = once_asked(decode, fail(500))
    decode.always = hang_in_a_handoff

    answer = router.complete(f"new {LONG}")

    assert answer.json() == whole_of(decode)
    assert "kv_transfer_params" not in decode.asked[-1]
    assert decode.left.acquire(timeout=SOON_S)


def test_a_refused_request_is_no_answer_and_has_no_first_token(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    servers[0].always = servers[1].always = fail(400)
    for _ in range(3):
        assert router.complete().status_code == 400

    live = router.client.get("/live").json()

    assert router.counted("first_token_seconds_count") == 0
    assert router.counted("prompts_total") == 0
    assert live["prompts"] == {}
    assert live["traffic"]["outcomes"] == {"refused": 3}
    # No server has a page of metrics that would say how many tokens it made.
    rates = {"requests_per_s": 0, "output_tokens_per_s": None}
    assert live["traffic"]["rates"] == rates


def test_a_request_that_prefill_refuses_is_answered_by_decode(
    vllm: Callable[[str], FakeVllm],
) -> None:
    first, second, decode = vllm("first"), vllm("second"), vllm("decode")
    first.always = second.always = fail(404)
    decode.always = fail(404)
    with running([first, second], [decode]) as router:
        answer = router.complete()

        assert (answer.status_code, answer.json()) == (404, {"error": {"message": "404"}})
        assert len(first.asked) + len(second.asked) == 1
        assert router.counted("requests_total", role="decode", outcome="refused") == 1


def test_a_server_without_the_connector_is_not_asked_for_prompts(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers
    prefill.always = lambda asked: asked.answer(200, {"id": "x", "kv_transfer_params": None})

    answers = [router.complete(f"{number} {LONG}") for number in range(3)]

    assert [each.json() for each in answers] == [whole_of(decode)] * 3
    assert len(prefill.asked) == 1


# Failures of decode servers.


def error_event(asked: Conversation) -> None:
    asked.stream('data: {"error": {"message": "engine dead"}}\n\n', "data: [DONE]\n\n")


@pytest.mark.parametrize("failure", [fail(500), fail(503), drop, error_event])
@pytest.mark.parametrize("stream", ["", "stream"], ids=["whole", "stream"])
def test_another_decode_server_answers_what_one_did_not(
    vllm: Callable[[str], FakeVllm], failure: Callable[[Conversation], None], stream: str
) -> None:
    prefill, bad, good = vllm("prefill"), vllm("bad"), vllm("good")
    bad.always = failure
    with running([prefill], [bad, good]) as router:
        answer = router.complete(stream=bool(stream))

        expected = "".join(events_of(good)) if stream else json.dumps(whole_of(good))
        assert (answer.status_code, answer.text) == (200, expected)
        assert len(bad.asked) == 1
        assert router.counted("retries_total", role="decode") == 1


def test_an_error_of_the_last_decode_server_is_what_the_client_gets(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    servers[1].always = fail(503)

    answer = router.complete()

    assert (answer.status_code, answer.json()) == (503, {"error": {"message": "503"}})


def test_an_answer_that_breaks_off_before_it_is_whole_is_asked_for_elsewhere(
    vllm: Callable[[str], FakeVllm],
) -> None:
    bad, good = vllm("bad"), vllm("good")

    def break_off(asked: Conversation) -> None:
        asked.send_response(200)
        asked.send_header("content-type", "application/json")
        asked.send_header("content-length", "1000")
        asked.end_headers()
        asked.wfile.write(b'{"id": ')
        asked.drop()

    bad.always = break_off
    with running([], [bad, good]) as router:
        assert router.complete().json() == whole_of(good)


def test_a_stream_that_breaks_off_ends_with_an_error_event(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    first, *_ = events_of(servers[1])

    def break_off(asked: Conversation) -> None:
        asked.stream(first, 'data: {"id": "half of an', ends=False)
        asked.drop()

    servers[1].always = break_off

    begun, error, done, rest = router.stream().split("\n\n")

    assert f"{begun}\n\n" == first
    told = json.loads(error.removeprefix("data: "))["error"]
    assert servers[1].url in told["message"]
    assert told["type"] == "service_unavailable"
    assert (done, rest) == ("data: [DONE]", "")
    assert router.counted("requests_total", role="decode", outcome="broken") == 1


# Clients that leave.


def test_a_client_that_leaves_aborts_both_requests(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    prefill, decode = servers
    router.complete()
    prefill.always = decode.always = hang
    leave(router, decode)

    assert prefill.left.acquire(timeout=SOON_S)
    assert decode.left.acquire(timeout=SOON_S)
    eventually(lambda: router.counted("requests_now"), 0)


def leave(router: RunningRouter, decode: FakeVllm) -> None:
    """Sends a request, and hangs up when the server has it."""
    assert decode.came.acquire(timeout=SOON_S)  # That of an earlier request.
    body = json.dumps({"prompt": f"another {LONG}"}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    url = httpx.URL(router.address)
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as plain:
        plain.sendall(head.encode() + body)
        assert decode.came.acquire(timeout=SOON_S)


def test_a_client_that_leaves_a_stream_aborts_it(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    _, decode = servers

    def stream_on(asked: Conversation) -> None:
        asked.stream(events_of(decode)[0], ends=False)
        asked.hang()

    decode.always = stream_on
    asked = {"prompt": LONG, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())

    assert decode.left.acquire(timeout=SOON_S)
    eventually(lambda: router.counted("requests_total", outcome="aborted"), 1)


def test_without_a_decode_server_requests_get_503_with_the_cause(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    servers[1].health = 500
    eventually(lambda: router.client.get("/health").status_code, 503)

    answer = router.complete()

    assert answer.status_code == 503
    expected = f"no decode server is up: {servers[1].url} answered GET /health with status 500"
    assert answer.json()["error"]["message"] == expected
    assert router.counted("server_up", server=servers[1].url) == 0
    assert router.client.get("/v1/models").status_code == 503


# Choices.


def test_prompts_that_begin_alike_go_to_one_server_and_others_take_turns(
    vllm: Callable[[str], FakeVllm],
) -> None:
    prefills, decodes = [vllm("p0"), vllm("p1")], [vllm("d0"), vllm("d1")]
    with running(prefills, decodes) as router:
        for turn in range(3):
            for chat in ("red", "blue"):
                router.complete(f"{chat}: {LONG}" + f"turn {turn}. " * 40 * turn)

    for server in (*prefills, *decodes):
        assert len({each["prompt"].partition(":")[0] for each in server.asked}) == 1
        assert len(server.asked) == 3


def test_a_prompt_that_decode_has_is_not_computed_again(
    router: RunningRouter, servers: tuple[FakeVllm, FakeVllm]
) -> None:
    router.complete()
    router.complete()

    assert len(servers[0].asked) == 1
    assert "kv_transfer_params" not in servers[1].asked[1]


def test_a_busy_server_gets_no_further_prompt(vllm: Callable[[str], FakeVllm]) -> None:
    busy, idle = vllm("busy"), vllm("idle")
    with running([], [busy, idle]) as router:
        busy.behaves = [hang]
        asking = threading.Thread(target=lambda: router.complete(timeout=None))
        asking.start()
        assert busy.came.acquire(timeout=SOON_S)

        for number in range(4):
            router.complete(f"{number} {LONG}")

        assert len(idle.asked) == 4
        busy.health = 500
        asking.join(SOON_S)


# The command.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--vllm-decode: is not given, must be the URL of a vLLM server"),
        (
            ["--vllm-decode", "localhost:x"],
            "--vllm-decode: is 'localhost:x', must be a URL such as http://HOST:PORT, without /v1",
        ),
        (
            ["--vllm-decode", "http://h:99999"],
            "--vllm-decode: is 'http://h:99999', must be a URL such as http://HOST:PORT, "
            "without /v1",
        ),
        (
            ["--vllm-decode", "http://h:1/v1"],
            "--vllm-decode: is 'http://h:1/v1', must be a URL such as http://HOST:PORT, "
            "without /v1",
        ),
        (
            ["--vllm-decode", "http://h:1", "--vllm-prefill", "http://H:1/"],
            "--vllm-decode: is 'http://h:1', which --vllm-prefill names already: give it once",
        ),
        (
            ["--vllm-decode", "http://h:1", "--log-level", "loud"],
            "--log-level: is 'loud', must be one of debug, info, warning, error",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(["router", *given])

    assert (status, capsys.readouterr().err) == (2, f"penstock: {message}\n")


def test_a_router_that_is_asked_to_stop_lets_answers_end(
    servers: tuple[FakeVllm, FakeVllm],
) -> None:
    prefill, decode = servers
    go = threading.Event()

    def stream_slowly(asked: Conversation) -> None:
        first, *rest = events_of(decode)
        asked.stream(first, ends=False)
        assert go.wait(SOON_S)
        for each in (*rest, ""):
            data = each.encode()
            asked.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    decode.always = stream_slowly
    urls = ["--vllm-prefill", prefill.url, "--vllm-decode", decode.url]
    command = [sys.executable, "-m", "penstock.cli.entry", "router", "--port", "0", *urls]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.partition("router at ")[2].partition("/v1")[0]
        asked = {"prompt": LONG, "stream": True}
        with httpx.stream(
            "POST", f"{address}/v1/completions", json=asked, timeout=SOON_S
        ) as answer:
            lines = answer.iter_lines()
            begun = next(lines)
            process.send_signal(signal.SIGTERM)
            go.set()
            text = "\n".join([begun, *lines])
        _, logged = process.communicate(timeout=SOON_S)
    finally:
        process.kill()

    assert "up: 1 of 1 prefill server, 1 of 1 decode server" in line
    assert text.rstrip() == "".join(events_of(decode)).rstrip()
    assert process.returncode == 0
    assert "request=cmpl-decode" in logged
    assert "status=200 complete=true" in logged
