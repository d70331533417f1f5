"""Requests as standard clients send them, most with fields that other servers have added.

The bodies of `vllm bench serve` were recorded from vLLM 0.32.0, byte for byte; `make test-vllm`
runs the command itself. Those of lm-eval are what its `local-completions` makes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"

BENCH = [
    (
        PLAIN,
        b'{"model": "small-model", "prompt": "The penstock carries water to", '
        b'"repetition_penalty": 1.0, "max_tokens": 9, "logprobs": null, "stream": true, '
        b'"stream_options": {"include_usage": true}, "ignore_eos": true}',
    ),
    (
        PLAIN,
        b'{"model": "small-model", "prompt": [17, 230, 44, 91, 5, 8, 300], '
        b'"repetition_penalty": 1.1, "max_tokens": 9, "logprobs": 3, "stream": true, '
        b'"stream_options": {"include_usage": true}, "ignore_eos": true, "top_p": 0.9, '
        b'"top_k": 20, "min_p": 0.05, "temperature": 0.7, "frequency_penalty": 0.1, '
        b'"presence_penalty": 0.2}',
    ),
    (
        CHAT,
        b'{"model": "small-model", "messages": [{"role": "user", "content": [{"type": "text", '
        b'"text": "What is a penstock?"}]}], "max_completion_tokens": 9, "stream": true, '
        b'"stream_options": {"include_usage": true}, "ignore_eos": true, "temperature": 0.0}',
    ),
]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.mark.parametrize(("path", "body"), BENCH, ids=["text", "tokens", "chat"])
def test_vllm_bench_serve_gets_as_many_tokens_as_it_wants(
    server: Running, path: str, body: bytes
) -> None:
    headers = {"Content-Type": "application/json", "x-request-id": "bench-0"}

    answer = server.client.post(path, content=body, headers=headers)

    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    reported = [json.loads(event) for event in events[:-1]]
    assert all(each["choices"] for each in reported[:-1])
    assert reported[-1]["usage"]["completion_tokens"] == 9
    assert reported[-2]["choices"][0]["finish_reason"] == "length"


def test_lm_eval_scores_tokens_and_continues_texts(server: Running) -> None:
    tokens = [[17, 230, 44, 91, 5], [8, 300, 2]]
    scores = {"model": "small-model", "temperature": 0, "max_tokens": 1, "logprobs": 1}

    scored = server.client.post(
        PLAIN, json={**scores, "prompt": tokens, "seed": 1234, "echo": True}
    ).json()
    continued = server.client.post(
        PLAIN,
        json={
            "prompt": ["A lease is", "A block is"],
            "model": "small-model",
            "max_tokens": 5,
            "temperature": 0,
            "stop": ["\n\n", "Question:", "</s>", "<|im_end|>", "<end>"],
            "seed": 1234,
        },
    ).json()

    for prompt, choice in zip(tokens, scored["choices"], strict=True):
        reported = choice["logprobs"]
        # As lm-eval reads it: what follows a context of one token, without the generated one.
        assert len(reported["token_logprobs"]) == len(prompt) + 1
        assert reported["token_ids"][:-1] == prompt
        assert (reported["token_logprobs"][0], reported["top_logprobs"][0]) == (None, None)
        likely = zip(reported["token_logprobs"][1:-1], reported["top_logprobs"][1:-1], strict=True)
        assert all(own <= max(top.values()) for own, top in likely)
    assert [choice["index"] for choice in continued["choices"]] == [0, 1]
    assert continued["usage"]["completion_tokens"] == 10


def test_what_a_prompt_s_tokens_score_is_what_they_would_be_answered_with(server: Running) -> None:
    prompt = "The cache keeps every prefix that was computed, block by block."
    said = server.complete(prompt, logprobs=2, max_tokens=6)["choices"][0]["logprobs"]
    given = server.complete(prompt, max_tokens=0, echo=True, logprobs=0)
    tokens = [*given["choices"][0]["logprobs"]["token_ids"], *said["token_ids"]]

    again = server.complete(tokens, max_tokens=0, echo=True, logprobs=2)
    with_one = server.complete(tokens, max_tokens=1, echo=True, logprobs=2)

    reported = again["choices"][0]["logprobs"]
    assert reported["token_logprobs"][-6:] == pytest.approx(said["token_logprobs"], abs=1e-3)
    assert reported["top_logprobs"][-1].keys() == said["top_logprobs"][-1].keys()
    assert again["usage"]["completion_tokens"] == 0
    # Scores need every token computed, whatever is cached.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(with_one["choices"][0]["logprobs"]["tokens"]) == len(tokens) + 1
    assert given["choices"][0]["text"] == prompt


def test_an_answer_may_begin_with_its_prompt(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small-model", "temperature": 0, "max_tokens": 6}

    plain = client.completions.create(prompt="A penstock is", **asked).choices[0].text
    whole = client.completions.create(prompt="A penstock is", echo=True, **asked)
    stream = client.completions.create(prompt="A penstock is", echo=True, stream=True, **asked)
    none = client.completions.create(prompt="One", echo=True, **{**asked, "max_tokens": 0})

    assert whole.choices[0].text == f"A penstock is{plain}"
    assert "".join(chunk.choices[0].text for chunk in stream) == f"A penstock is{plain}"
    assert (none.choices[0].text, none.choices[0].finish_reason) == ("One", "length")


def test_offsets_lead_to_where_a_token_is_in_the_text(server: Running) -> None:
    prompt = "Größe, 漢字 and 🙂"

    found = server.complete(prompt, echo=True, logprobs=0, max_tokens=0)["choices"][0]

    reported = found["logprobs"]
    for token, offset in zip(reported["tokens"], reported["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert found["text"][offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\x") for token in reported["tokens"])


def test_a_half_of_a_character_is_returned_as_its_bytes(server: Running) -> None:
    prompt = "漢"
    tokens = server.complete(prompt, echo=True, logprobs=0, max_tokens=0)
    ids = tokens["choices"][0]["logprobs"]["token_ids"]
    assert len(ids) > 1
    bias = {str(token): 100 for token in ids}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": len(ids),
        "logit_bias": bias,
        "temperature": 0,
        "max_tokens": 4,
    }

    answer = server.client.post(CHAT, json=body).json()

    rows = answer["choices"][0]["logprobs"]["content"]
    parts = prompt.encode()
    for row in rows:
        assert row["token_id"] in ids
        assert bytes(row["bytes"]) in parts
        assert row["token"] == "".join(f"\\x{byte:02x}" for byte in row["bytes"])


def test_several_prompts_are_answered_in_their_order(client: openai.OpenAI) -> None:
    prompts = ["A lease is", "A block is", "A tier is"]
    asked: dict[str, Any] = {"model": "small-model", "max_tokens": 5, "temperature": 0}

    alone = [client.completions.create(prompt=each, **asked) for each in prompts]
    whole = client.completions.create(prompt=prompts, n=2, **asked)
    said: dict[int, str] = {}
    options: Any = {"include_usage": True}
    stream = list(
        client.completions.create(prompt=prompts, stream=True, stream_options=options, **asked)
    )
    for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + choice.text

    texts = [each.choices[0].text for each in alone]
    assert [choice.text for choice in whole.choices] == [text for text in texts for _ in range(2)]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert [said[number] for number in range(3)] == texts
    total = sum(each.usage.prompt_tokens for each in alone if each.usage is not None)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == total
    assert stream[-1].usage is not None
    assert stream[-1].usage.completion_tokens == 15


def test_one_wrong_prompt_of_several_refuses_all_of_them(server: Running) -> None:
    answer = server.client.post(PLAIN, json={"prompt": [[1, 2], [1, 9999]], "max_tokens": 400})

    assert answer.status_code == 400
    assert "token 9999" in answer.json()["error"]["message"]
    assert server.client.post("/admin/audit").json() == {"in_order": ["instance-0"]}


NOTHING: dict[str, Any] = {
    "store": False,
    "metadata": {"run": "7"},
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "user": "somebody",
    "logit_bias": {},
    "n": 1,
    "stop": [],
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stream_options": {"include_usage": True},
    "modalities": ["text"],
}
ADDED: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "use_beam_search": False,
    "echo": False,
    "stop_token_ids": [],
    "chat_template_kwargs": {},
    "guided_json": None,
}


def test_agents_send_what_asks_for_nothing(client: openai.OpenAI) -> None:
    right = client.chat.completions.create(
        model="small-model",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=6,
    )
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi", "name": "anna"},
    ]

    found = client.chat.completions.create(
        model="small-model",
        messages=messages,
        temperature=0,
        max_completion_tokens=6,
        extra_body=ADDED,
        **NOTHING,
    )
    plain = client.completions.create(
        model="small-model",
        prompt="x",
        max_tokens=2,
        suffix=None,
        best_of=1,
        echo=False,
        extra_body={**ADDED, "add_special_tokens": True},
    )

    assert found.choices[0].message.content == right.choices[0].message.content
    assert plain.choices[0].finish_reason == "length"


def test_an_end_that_the_model_chooses_can_be_ignored_or_put_off(server: Running) -> None:
    asked: dict[str, Any] = {"logit_bias": {"0": 100}, "max_tokens": 9}

    ended = server.complete("A story", **asked)
    ignored = server.complete("A story", **asked, ignore_eos=True)
    later = server.complete("A story", **asked, min_tokens=5)

    def reported(answer: Any) -> tuple[int, str]:
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert [reported(each) for each in (ended, ignored, later)] == [
        (1, "stop"),
        (9, "length"),
        (6, "stop"),
    ]


def test_stop_strings_and_stop_tokens_wait_for_the_least_number_of_tokens(server: Running) -> None:
    said = server.complete("A story", max_tokens=12, logprobs=0)["choices"][0]
    token = said["logprobs"]["token_ids"][1]
    stop = said["text"][:2]

    soon = server.complete("A story", max_tokens=12, stop=stop)
    late = server.complete("A story", max_tokens=12, stop=stop, min_tokens=4)
    by_token = server.complete("A story", max_tokens=12, stop_token_ids=[token])

    assert soon["choices"][0]["text"] == ""
    assert late["usage"]["completion_tokens"] >= 4
    assert late["choices"][0]["text"].startswith(stop)
    assert by_token["usage"]["completion_tokens"] <= 2
    assert by_token["choices"][0]["finish_reason"] == "stop"


def test_penalties_keep_an_answer_from_repeating_itself(server: Running) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "logprobs": 0, "ignore_eos": True}
    bias = {str(token): 60 for token in range(100, 150)}

    def distinct(**wishes: Any) -> int:
        found = server.complete("Again and again", **asked, logit_bias=bias, **wishes)
        return len(set(found["choices"][0]["logprobs"]["token_ids"]))

    plain = distinct()
    assert distinct(frequency_penalty=2) > plain
    assert distinct(presence_penalty=2) > plain
    assert distinct(repetition_penalty=5) > plain


def test_top_k_of_one_is_the_likeliest_token_at_any_temperature(server: Running) -> None:
    greedy = server.complete("A penstock", max_tokens=8)["choices"][0]["text"]

    for wishes in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-300}):
        found = server.complete("A penstock", max_tokens=8, temperature=2, **wishes)
        assert found["choices"][0]["text"] == greedy
    found = server.complete("A penstock", max_tokens=8, temperature=1e-300)
    assert found["choices"][0]["text"] == greedy
