"""What clients get from a running server, asked over HTTP and by OpenAI's own client."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from penstock.cli.app import run
from penstock_serve.observe.live import PHASES
from tests.serve.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

QUESTION = [{"role": "user", "content": "What does the cache keep, and for how long?"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, messages: Any = QUESTION, **wishes: Any) -> Any:
    wishes = {"temperature": 0, "max_tokens": 12, **wishes}
    return client.chat.completions.create(model="small-model", messages=messages, **wishes)


def test_a_chat_is_answered_whole_or_as_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client)
    stream = list(ask(client, stream=True, stream_options={"include_usage": True}))

    said = whole.choices[0].message.content
    assert said
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == said
    assert stream[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_a_field_that_is_null_is_one_that_was_left_out(client: openai.OpenAI) -> None:
    nothing = dict.fromkeys(
        ("top_p", "n", "stop", "seed", "stream", "logprobs", "logit_bias", "presence_penalty")
    )

    said = ask(client, **nothing).choices[0].message
    # As many clients do: what was answered goes back with all fields, most of which are null.
    next_turn = ask(client, [*QUESTION, said.model_dump(), *QUESTION])

    assert ask(client).choices[0].message.content == said.content
    assert next_turn.usage.completion_tokens == 12
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content is null, must be a"):
        ask(client, [{"role": "user", "content": None}])


def test_a_completion_is_answered_whole_or_as_a_stream(client: openai.OpenAI) -> None:
    wishes: dict[str, Any] = {"prompt": "A penstock is", "temperature": 0, "max_tokens": 10}

    whole = client.completions.create(model="small-model", **wishes)
    stream = client.completions.create(model="small-model", stream=True, **wishes)

    assert whole.object == "text_completion"
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_the_second_turn_finds_the_first_and_says_in_which_tier(client: openai.OpenAI) -> None:
    first = ask(client, [{"role": "user", "content": "Tell me about blocks. " * 4}])
    said = first.choices[0].message.content
    turns = [
        {"role": "user", "content": "Tell me about blocks. " * 4},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And leases?"},
    ]

    second = ask(client, turns)

    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 8 * 8
    assert second.usage.model_extra["cached_by_tier"] == {"device": cached, "host": 0}


def test_a_request_may_stay_out_of_the_cache(server: Running) -> None:
    prompt = "Nobody should remember this sentence, which is long enough to fill some blocks."

    server.complete(prompt, cache="read_only")
    again = server.complete(prompt)
    without = server.complete(prompt, cache="off")

    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert without["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def let_go(server: Running) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("penstock_cache_blocks_let_go_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


def test_hints_reach_the_cache(server: Running) -> None:
    prompt = "A sentence of a conversation that is going to be over after this very request."
    before = let_go(server)

    kept = server.complete(prompt, penstock={"ttl_s": 600, "priority": 3}, prompt_cache_key="k")
    server.complete(prompt, penstock={"over": True}, prompt_cache_retention="24h")

    blocks = kept["usage"]["prompt_tokens"] // 8
    eventually(lambda: let_go(server) - before >= blocks, wanted=True)


def test_tenants_share_nothing(server: Running) -> None:
    body = {"prompt": "A sentence that two tenants happen to have in common.", "max_tokens": 1}

    for _ in range(2):
        found = [
            server.client.post("/v1/completions", json=body, headers={"x-penstock-tenant": name})
            for name in ("one", "two")
        ]

    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in found]
    assert cached[0] == cached[1] > 0
    plain = server.client.post("/v1/completions", json=body).json()
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_several_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    first = ask(client, n=3, temperature=1.0, seed=5)
    again = ask(client, n=3, temperature=1.0, seed=5)

    answers = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(answers)) == 3
    assert answers == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 36


def test_several_answers_in_a_stream_can_be_distinguished(client: openai.OpenAI) -> None:
    whole = ask(client, n=2, temperature=1.0, seed=6)
    said = {0: "", 1: ""}
    for chunk in ask(client, n=2, temperature=1.0, seed=6, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""

    assert said == {choice.index: choice.message.content for choice in whole.choices}


def test_a_stop_string_ends_the_answer_wherever_tokens_end(client: openai.OpenAI) -> None:
    said = ask(client, max_tokens=24).choices[0].message.content
    # It begins in the middle of one token and ends in the middle of another.
    stop = said[5:9]

    stopped = ask(client, max_tokens=24, stop=[stop])
    stream = ask(client, max_tokens=24, stop=stop, stream=True)

    expected = said[: said.index(stop)]
    assert stopped.choices[0].message.content == expected
    assert stopped.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_log_probabilities_come_with_each_token(client: openai.OpenAI) -> None:
    chat = ask(client, logprobs=True, top_logprobs=3, max_tokens=5)
    plain = client.completions.create(
        model="small-model", prompt="A lease", logprobs=2, max_tokens=5, temperature=0
    )

    rows = chat.choices[0].logprobs.content
    assert len(rows) == 5
    assert all(row.logprob == row.top_logprobs[0].logprob <= 0 for row in rows)
    reported = plain.choices[0].logprobs
    assert reported is not None
    assert reported.tokens is not None
    assert reported.text_offset is not None
    assert len(reported.tokens) == len(reported.text_offset) == 5
    assert reported.text_offset[0] == 0
    assert reported.text_offset == sorted(reported.text_offset)


def test_tokens_are_returned_by_number_too(server: Running) -> None:
    found = server.complete("Which tokens?", logprobs=2)["choices"][0]["logprobs"]

    again = server.complete(found["token_ids"], logprobs=0)

    assert again["usage"]["prompt_tokens"] == len(found["token_ids"]) == len(found["tokens"])


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small-model"]
    assert client.models.retrieve("small-model").owned_by == "penstock"


def test_the_listed_model_has_the_longest_context(server: Running) -> None:
    listed = server.client.get("/v1/models").json()["data"][0]["max_model_len"]

    def asked(prompt_tokens: int) -> int:
        body = {"prompt": [5] * prompt_tokens, "max_tokens": 1}
        return server.client.post("/v1/completions", json=body).status_code

    assert (asked(listed - 1), asked(listed)) == (200, 400)


def test_a_load_test_respects_the_context_of_a_running_server(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--system-tokens", "8", "--turn-tokens", "6", "--output-tokens", "10", "--gap-s", "0")

    status = run(["load", server.address, *shape, "--turns", "40", "--requests", "12"])

    told = capsys.readouterr()
    assert status == 0, told
    assert re.fullmatch(r"penstock: sessions have \d+ turns? instead of 40: .*\n", told.err)


def test_a_client_that_goes_away_takes_its_request_along(server: Running) -> None:
    body = {"prompt": "A long story begins", "max_tokens": 400, "temperature": 0}

    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    eventually(lambda: server.cache()["cache"]["leases"], 0)
    # It asks, however long that takes, and does not wait for an answer of so many tokens.
    hasty = httpx.Timeout(60, read=0.02)
    with (
        openai.OpenAI(
            base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=hasty
        ) as client,
        pytest.raises(openai.APITimeoutError),
    ):
        client.completions.create(model="small-model", prompt="Another one", max_tokens=450)
    eventually(lambda: server.cache()["cache"]["leases"], 0)

    assert server.cache()["running"] == 0
    assert server.client.post("/admin/audit").json() == {"in_order": ["instance-0"]}


def test_a_story_lists_what_happened_to_a_request(server: Running) -> None:
    answer = server.complete("Tell me the story of this request, with all its blocks, please.")

    reported = server.client.get("/cache/story", params={"request": answer["id"]}).json()

    assert reported["request"] == answer["id"]
    assert reported["story"]


def test_there_is_no_story_of_a_request_that_nobody_knows(server: Running) -> None:
    found = server.client.get("/cache/story", params={"request": "cmpl-nobody"})

    assert found.status_code == 404
    assert found.json()["error"]["param"] == "request"
    assert "'cmpl-nobody'" in found.json()["error"]["message"]


def test_an_answer_says_where_its_time_went(server: Running) -> None:
    began = time.monotonic()
    answer = server.complete("where does the time of this request go?")
    took_ms = 1000 * (time.monotonic() - began)

    spent = answer["usage"]["timings_ms"]
    assert tuple(spent) == PHASES
    assert all(each >= 0 for each in spent.values())
    assert spent["prefill"] > 0
    assert spent["decode"] > 0
    assert spent["handed_over"] == 0
    # Rounded to a tenth, each of five.
    assert sum(spent.values()) <= took_ms + 0.5


def test_responses_are_counted_by_endpoint_and_status(server: Running) -> None:
    def counted(endpoint: str, status: int) -> float:
        text = server.client.get("/metrics").text
        name = f'penstock_http_responses_total{{endpoint="{endpoint}",status="{status}"}} '
        return float(text.partition(name)[2].partition("\n")[0] or 0)

    before = counted("completions", 200)
    server.complete("count this response")
    assert server.client.get("/a/path/of/a/stranger").status_code == 404
    assert server.client.post("/v1/completions", json={}).status_code == 400

    eventually(lambda: counted("completions", 200), before + 1)
    assert counted("completions", 400) >= 1
    assert counted("none", 404) >= 1
    assert "stranger" not in server.client.get("/metrics").text


def test_metrics_can_be_read_by_prometheus(server: Running) -> None:
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    server.complete("Something to count")
    text = server.client.get("/metrics").text

    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert found["penstock_generated_tokens"].samples[0].value >= 8
    tiers = {sample.labels["tier"] for sample in found["penstock_tier_slots"].samples}
    assert tiers == {"device", "host"}
    assert found["penstock_healthy"].samples[0].value == 1


def test_a_reset_voids_what_was_cached(server: Running) -> None:
    prompt = "This sentence is remembered until somebody says that it must not be."
    server.complete(prompt)
    assert server.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    assert server.client.post("/admin/reset").json() == {"reset": ["instance-0"]}

    assert server.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_other_weights_void_what_was_cached_and_name_new_keys(server: Running) -> None:
    prompt = "This sentence was computed with weights that nobody uses any more, alas."
    server.complete(prompt)

    changed = server.client.post("/admin/weights", json={"version": "second"}).json()

    assert changed == {"reset": ["instance-0"], "weights_version": "second"}
    assert server.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_stream_is_made_of_events(server: Running) -> None:
    body = {"prompt": "One", "max_tokens": 3, "temperature": 0, "stream": True}

    answer = server.client.post("/v1/completions", json=body)

    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
