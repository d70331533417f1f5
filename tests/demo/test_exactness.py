"""The check of answers: it accepts what is right and finds one block that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock_serve.demo.clients import AnsweredToken, ChatTurn
from penstock_serve.demo.exactness import BOUND, Fresh, check, difference
from penstock_serve.engine.requests import Request
from penstock_serve.engine.sampling_options import Sampling
from tests.engine.test_engine import make_engine
from tests.serve.conftest import make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_serve.engine.engine import Engine

MESSAGES = [
    {
        "role": "system",
        "content": "A block is looked for in every tier, from the first to the last.",
    },
    {"role": "user", "content": "Where is it now?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("exactness") / "small-model"
    make_checkpoint(made)
    return made


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Fresh:
    return Fresh(str(folder))


def asked(engine: Engine, prompt: list[int], name: str) -> ChatTurn:
    """The turn as a client would have received it."""
    engine.add(Request(id=name, prompt=tuple(prompt), max_tokens=12, sampling=Sampling(logprobs=5)))
    tokens: list[AnsweredToken] = []
    cached = 0
    while engine.unfinished:
        for output in engine.step():
            assert output.sampled is not None
            reported = output.sampled
            cached += sum(output.cached_by_tier)
            logprobs = {reported.token: reported.logprob, **dict(reported.alternatives)}
            tokens.append(AnsweredToken(token=reported.token, logprobs=logprobs))
    return ChatTurn(
        chat=name,
        number=0,
        client=0,
        request=name,
        messages=MESSAGES,
        text="",
        tokens=tuple(tokens),
        prompt_tokens=len(prompt),
        cached_by_tier={"device": cached},
        sent=0.0,
        first=0.0,
        ended=0.0,
    )


def kv_of(engine: Engine) -> list[torch.Tensor]:
    workers: Any = engine.workers
    found: list[torch.Tensor] = workers.worker.kv
    return found


def test_an_answer_from_the_cache_is_as_good_as_a_fresh_one(folder: Path, fresh: Fresh) -> None:
    engine = make_engine(folder)
    prompt = fresh.text.encode_chat(MESSAGES)

    turns = [asked(engine, prompt, name) for name in ("computed", "cached")]
    verdict = check(turns, fresh)

    assert turns[1].cached_by_tier["device"] > 0
    assert verdict.findings == ()
    assert verdict.values >= 2 * 12 * 5
    assert verdict.largest < BOUND / 10


def test_a_turn_that_a_later_one_begins_with_is_computed_together_with_it(
    folder: Path, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    prompt = fresh.text.encode_chat(MESSAGES)
    first = asked(engine, prompt, "first")
    longer = [*prompt, *(each.token for each in first.tokens), *prompt[:9]]
    later = asked(engine, longer, "later")
    computed: list[int] = []
    logprobs = fresh.logprobs
    monkeypatch.setattr(
        fresh,
        "logprobs",
        lambda tokens, rows: computed.append(len(tokens)) or logprobs(tokens, rows),
    )
    prompts = {"first": prompt, "later": longer}
    monkeypatch.setattr(fresh.text, "encode_chat", lambda messages: prompts[messages[0]["content"]])
    named = [
        replace(turn, messages=[{"role": "user", "content": turn.chat}]) for turn in (first, later)
    ]

    verdict = check(named, fresh)

    assert computed == [len(longer) + len(later.tokens) - 1]
    assert verdict.findings == ()
    assert verdict.largest < BOUND / 10


def test_one_block_that_was_mixed_up_is_found(folder: Path, fresh: Fresh) -> None:
    engine = make_engine(folder)
    prompt = fresh.text.encode_chat(MESSAGES)
    asked(engine, prompt, "computed")
    with engine.cache.acquire(prompt) as lease:
        one, other = lease.block_table.tolist()[1:3]
    for layer in kv_of(engine):
        layer[:, one] = layer[:, other].clone()

    verdict = check([asked(engine, prompt, "mixed up")], fresh)

    assert verdict.findings
    assert verdict.largest > 100 * BOUND


def test_another_token_is_a_finding_unless_two_are_as_good_as_equal() -> None:
    row = torch.tensor([[2.0, 2.0 - BOUND / 2, 1.0]]).log_softmax(-1)

    def of(token: int) -> Any:
        logprobs = {at: row[0, at].item() for at in range(3)}
        return difference([AnsweredToken(token=token, logprobs=logprobs)], row, name="it")

    best, close, worse = (of(token) for token in range(3))

    assert (best.near_ties, best.findings) == (0, [])
    assert (close.near_ties, close.findings) == (1, [])
    assert worse.near_ties == 0
    assert "token 0 is 2, must be 0" in worse.findings[0]


def test_what_is_no_number_is_a_finding() -> None:
    row = torch.tensor([[2.0, 1.0]]).log_softmax(-1)
    tokens = AnsweredToken(token=0, logprobs={0: row[0, 0].item(), 1: float("nan")})

    assert difference([tokens], row, name="it").findings


def test_a_prompt_that_is_not_the_one_that_was_sent_is_a_finding(
    folder: Path, fresh: Fresh
) -> None:
    engine = make_engine(folder)
    prompt = fresh.text.encode_chat(MESSAGES)
    turn = asked(engine, prompt, "right")

    verdict = check([replace(turn, prompt_tokens=len(prompt) + 1)], fresh)

    assert "tokens of prompt and answer" in verdict.findings[0]
