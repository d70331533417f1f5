"""A pair of instances on one GPU answers as one instance does, by `penstock serve`."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

for needed in ("httpx", "uvicorn", "starlette", "transformers"):
    pytest.importorskip(needed)

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from tests.relay.relays import needs_nixl  # noqa: E402
from tests.serve.conftest import eventually, make_tokenizer, pids_of, serving  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Running

pytestmark = pytest.mark.gpu

OPTIONS = (
    *("--device", "cuda", "--dtype", "float32", "--blocks", "256"),
    *("--block-tokens", "16", "--host-gib", "0.05"),
)
BOUND = 2e-3
"""Of a log-probability in float32: sums of other shapes have another order."""
STORY = "A block that is not where it should be is looked for in every tier below. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "small-model"
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[Running]:
    with serving(model, *OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Running]:
    with serving(model, *OPTIONS, "--prefill-tp", "1", "--decode-tp", "1") as running:
        yield running


def told(running: Running, prompt: str) -> Any:
    return running.complete(prompt, max_tokens=12, logprobs=5)["choices"][0]["logprobs"]


def handoffs(running: Running) -> dict[str, int]:
    instances = running.client.get("/cache").json()["instances"]
    [decode] = [each for each in instances if each["instance"] == "decode-0"]
    outcomes: dict[str, int] = decode["handoffs"]
    return outcomes


def test_a_prompt_that_was_handed_over_gets_the_same_answer(one: Running, pair: Running) -> None:
    for number in range(8):
        prompt = f"{number}. " + STORY[: 60 * number + 40]
        expected, found = told(one, prompt), told(pair, prompt)

        assert found["tokens"] == expected["tokens"]
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=BOUND)

    assert handoffs(pair) == {"delivered": 8}
    audited = pair.client.post("/admin/audit").json()["in_order"]
    assert sorted(audited) == ["decode-0", "prefill-0"]


@needs_nixl
def test_prompts_go_over_nixl_as_well(one: Running, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('version = 1\n[handoff]\ntransport = "nixl"\n')
    roles = ("--prefill-tp", "1", "--decode-tp", "1", "--config", str(config))
    with serving(model, *OPTIONS, *roles) as pair:
        for number in range(4):
            prompt = f"Over NIXL, {number}. " + STORY[: 90 * number + 40]
            expected, found = told(one, prompt), told(pair, prompt)

            assert found["tokens"] == expected["tokens"]
            assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=BOUND)
        assert handoffs(pair) == {"delivered": 4}


def test_a_prefill_instance_that_is_killed_on_a_gpu_is_not_missed(
    one: Running, pair: Running
) -> None:
    for pid in pids_of("prefill-0", pair):
        os.kill(pid, signal.SIGKILL)

    prompt = "Meanwhile. " + STORY
    assert told(pair, prompt)["tokens"] == told(one, prompt)["tokens"]
    eventually(
        lambda: pair.client.get("/health").json()["instances"],
        {"prefill-0": True, "decode-0": True},
    )
    # It is met a moment after it is back.
    numbers, delivered = count(), handoffs(pair)["delivered"]
    eventually(
        lambda: told(pair, f"Again, {next(numbers)}. " + STORY) and handoffs(pair)["delivered"],
        delivered + 1,
    )
