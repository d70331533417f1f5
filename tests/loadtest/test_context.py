"""What a load test asks fits into the context of the model, whatever its words become as tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli.app import run
from penstock.errors import ConfigError
from penstock_serve.loadtest.context import TokenCounts, count_tokens, fit_profile
from penstock_serve.loadtest.workloads import PROFILES
from tests.loadtest.conftest import USAGE, WHOLE, event

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_serve.loadtest.exchange import LoadTarget
    from tests.serve.vllm_servers import Conversation, FakeVllm

LETTERS_MAX = 8
"""A longer word is two tokens of this server."""
ROLE_TOKENS = 5
TEMPLATE_TOKENS = 30


def tokens_of(asked: dict[str, Any]) -> int:
    """As a server counts a prompt: some words are two tokens, messages and templates cost some."""
    texts = [each["content"] for each in asked.get("messages", ())] or [asked["prompt"]]
    words = [word for text in texts for word in text.split()]
    long = sum(len(word) > LETTERS_MAX for word in words)
    return TEMPLATE_TOKENS + ROLE_TOKENS * len(texts) + len(words) + long


class Context:
    """Has a server take so many tokens, and refuse more as vLLM does."""

    def __init__(self, server: FakeVllm, tokens: int, patch: pytest.MonkeyPatch) -> None:
        self.tokens = tokens
        self.longest = 0
        self.refused = 0
        server.always = self.answer

        def models(conversation: Conversation) -> None:
            model = {"id": "small", "max_model_len": tokens}
            conversation.answer(200, {"object": "list", "data": [model]})

        patch.setattr(server.RequestHandlerClass, "do_GET", models)

    def answer(self, conversation: Conversation) -> None:
        counted = tokens_of(conversation.asked)
        needed = counted + conversation.asked["max_tokens"]
        self.longest = max(self.longest, needed)
        if needed > self.tokens:
            self.refused += 1
            conversation.answer(400, {"error": {"message": "longer than the context"}})
            return
        usage = {**USAGE, "prompt_tokens": counted}
        conversation.stream(*WHOLE[:-2], event(choices=[], usage=usage), WHOLE[-1])


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("options", "context", "said"),
    [
        (["--gap-s", "0"], 2000, "sessions have 3 turns instead of 5"),
        (["--gap-s", "0", "--own-answers"], 2000, "sessions have 3 turns instead of 5"),
        (["--workload", "agents", "--gap-s", "0"], 8192, "sessions have"),
        (["--workload", "shared"], 4096, ""),
        (["--workload", "shared"], 1 << 20, ""),
        (["--trace", "conversation", "--rate", "10000"], 2048, "of the trace had to be cut"),
    ],
)
def test_no_prompt_with_its_answer_is_longer_than_the_context(
    options: list[str],
    context: int,
    said: str,
    api: str,
    openai: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Context(openai, context, monkeypatch)

    status = run(["load", openai.url, *options, "--api", api, "--requests", "20"])

    told = capsys.readouterr()
    assert (status, server.refused) == (0, 0), told
    assert said in told.err
    assert told.err.count("\n") == bool(said)
    # It is not cut to nothing either.
    if said:
        assert server.longest > context / 3


def test_a_workload_that_cannot_fit_is_refused_in_one_line_before_it_is_asked(
    openai: FakeVllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Context(openai, 2048, monkeypatch)

    status = run(["load", openai.url, "--workload", "documents"])

    told = capsys.readouterr().err
    assert status == 2
    assert told.startswith("penstock: --workload: asks for up to ")
    assert "and the model takes 2,048: give less by --system-tokens, " in told
    assert told.count("\n") == 1
    assert len(openai.bodies) == 3, "only how many tokens words become"


def test_nothing_more_is_asked_of_a_server_whose_context_is_unknown_or_large_enough(
    openai: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["load", openai.url, "--model", "small", "--requests", "4", "--gap-s", "0"]

    assert run(command) == 0
    Context(openai, 1 << 20, monkeypatch)
    assert run(command) == 0

    assert openai.bodies[:4] == openai.bodies[4:]


def test_a_report_has_the_turns_that_were_asked(
    openai: FakeVllm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Context(openai, 2000, monkeypatch)
    report = tmp_path / "run.json"

    assert run(["load", openai.url, "--gap-s", "0", "--requests", "9", "--json", str(report)]) == 0

    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["settings"]["turns"] == 3
    assert written["requests"] == 9


def test_what_words_become_is_asked_of_the_server(
    openai: FakeVllm, target: LoadTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    Context(openai, 1 << 20, monkeypatch)

    counts = asyncio.run(count_tokens(target))

    assert 1 < counts.per_word < 1.1
    assert counts.per_message >= ROLE_TOKENS
    assert counts.fixed >= TEMPLATE_TOKENS
    assert counts.tokens(counts.words(1000, 3), 3) <= 1000 < counts.tokens(1000, 3)


def test_a_server_that_does_not_count_is_expected_to_make_many_tokens(target: LoadTarget) -> None:
    silent = replace(target, url=target.url._replace(port=1))

    assert asyncio.run(count_tokens(silent)) == TokenCounts()


def test_turns_that_see_no_history_are_not_taken_away() -> None:
    documents = PROFILES["documents"]

    assert fit_profile(documents, TokenCounts(), 16_384) == documents
    with pytest.raises(ConfigError, match="the model takes 8,192"):
        fit_profile(documents, TokenCounts(), 8192)
