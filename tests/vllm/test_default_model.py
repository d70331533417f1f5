"""The default model is read as it was meant: our engine against `transformers`, from one file.

Here, because this environment has the model; no engine of vLLM is started. `smollm2.py` expands
the file for vLLM with code of its own, and `transformers` computes: nothing of what is compared
with comes from `penstock_serve.engine`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import LlamaForCausalLM

from penstock.config import parse_config
from penstock_serve.demo.chats import MUSEUM
from penstock_serve.demo.exactness import BOUND
from penstock_serve.engine.batch import TokenSpan, on_device
from penstock_serve.engine.checkpoints import find_model
from penstock_serve.engine.gguf_file import GgufFile
from penstock_serve.engine.instance import build_engine
from penstock_serve.engine.requests import Output, Reason, Request
from penstock_serve.engine.sampling_options import LOGPROBS_MAX, Sampled, Sampling
from penstock_serve.engine.spec import InstanceSpec
from penstock_serve.engine.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock_serve.engine.architecture import Architecture
    from penstock_serve.engine.engine import Engine

pytestmark = pytest.mark.vllm

ANSWER_S = 300.0
ANSWER_TOKENS = 9
"""Two of the answers have ended by then."""
CLOSE_S = 30.0
BLOCKS, BLOCK_TOKENS = 64, 16
CONFIG = f"""
version = 1
model.name = "default"
cache = {{ block_tokens = {BLOCK_TOKENS}, blocks = {BLOCKS} }}
"""
CAPITAL = "What is the capital of France?"
CHATS = {
    "capital": [{"role": "user", "content": CAPITAL}],
    "week": [{"role": "user", "content": "How many days are there in a week?"}],
    "museum": [
        {"role": "system", "content": MUSEUM},
        {"role": "user", "content": "When is the museum open?"},
    ],
}
AS_THE_TEMPLATE_SAYS = f"""\
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
{CAPITAL}<|im_end|>
<|im_start|>assistant
"""


class Said(NamedTuple):
    """A conversation, what our engine answered, and what the reference thinks of it."""

    prompt: list[int]
    answer: list[Sampled]
    reason: Reason | None
    expected: torch.Tensor
    """Log-probabilities after each token of prompt and answer but the last."""

    @property
    def tokens(self) -> list[int]:
        """Those of the answer."""
        return [sampled.token for sampled in self.answer]


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of(find_model(None).path)


@pytest.fixture(scope="module")
def built() -> Iterator[tuple[Engine, Architecture]]:
    """The engine that `penstock serve` builds when it is told of no model."""
    spec = InstanceSpec(name="default", config=parse_config(CONFIG), server="")
    engine, architecture = build_engine(spec)
    yield engine, architecture
    engine.close(CLOSE_S)


@pytest.fixture(scope="module")
def said(
    built: tuple[Engine, Architecture], text: Text, model: Callable[[str], Path]
) -> dict[str, Said]:
    """All conversations at once."""
    engine, architecture = built
    reference = LlamaForCausalLM.from_pretrained(model("smollm2"), dtype=torch.float32).eval()
    prompts = {name: text.encode_chat(messages) for name, messages in CHATS.items()}
    told: dict[str, list[Output]] = {name: [] for name in CHATS}
    for name, prompt in prompts.items():
        request = Request(
            id=name,
            prompt=tuple(prompt),
            max_tokens=ANSWER_TOKENS,
            sampling=Sampling(logprobs=LOGPROBS_MAX),
            stop_tokens=frozenset(architecture.stop_tokens),
        )
        engine.add(request)
    deadline = time.monotonic() + ANSWER_S
    while engine.unfinished:
        assert time.monotonic() < deadline
        for output in engine.step():
            told[output.request].append(output)
    return {name: thought_of(prompts[name], told[name], reference) for name in CHATS}


def thought_of(prompt: list[int], told: list[Output], reference: Any) -> Said:
    answer = [output.sampled for output in told if output.sampled is not None]
    tokens = [*prompt, *(sampled.token for sampled in answer)]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens[:-1]])).logits[0]
    return Said(prompt, answer, told[-1].reason, logits.log_softmax(-1))


def computed(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the engine's own model after each of these tokens."""
    workers: Any = engine.workers
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    kv = [torch.zeros_like(layer[:, :blocks]) for layer in workers.worker.kv]
    span = TokenSpan(0, 0, tokens, list(range(blocks)))
    batch = on_device([span], block_tokens=BLOCK_TOKENS, device=torch.device("cpu"))
    every = replace(batch, outputs=torch.arange(len(tokens)))
    logits: torch.Tensor = workers.worker.decoder.forward(every, kv)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("chat", CHATS)
def test_every_log_probability_is_that_of_the_reference(
    said: dict[str, Said], built: tuple[Engine, Architecture], chat: str
) -> None:
    one = said[chat]

    found = computed(built[0], [*one.prompt, *one.tokens[:-1]])

    torch.testing.assert_close(found, one.expected, atol=BOUND, rtol=0)


@pytest.mark.parametrize("chat", CHATS)
def test_the_engine_says_what_the_reference_finds_most_probable(
    said: dict[str, Said], chat: str
) -> None:
    one = said[chat]

    rows = one.expected[-len(one.answer) :]

    # In these answers the first two are at least 0.05 apart: no rounding exchanges them.
    assert one.tokens == rows.argmax(-1).tolist()
    for sampled, row in zip(one.answer, rows, strict=True):
        told = dict(sampled.alternatives)
        assert len(told) == LOGPROBS_MAX
        torch.testing.assert_close(
            torch.tensor(list(told.values())), row[list(told)], atol=BOUND, rtol=0
        )


def test_it_knows_the_capital_of_france(said: dict[str, Said], text: Text) -> None:
    assert text.decode(said["capital"].tokens) == "The capital of France is Paris."
    assert said["capital"].reason is Reason.STOP


def test_a_prompt_is_what_the_chat_template_says_in_tokens_of_the_file(text: Text) -> None:
    pieces: Any = GgufFile(find_model(None).path).field("tokenizer.ggml.tokens")

    spelled = "".join(pieces[token] for token in text.encode_chat(CHATS["capital"]))

    # The vocabulary writes a space and a line's end as letters of their own.
    assert spelled.replace("Ġ", " ").replace("Ċ", "\n") == AS_THE_TEMPLATE_SAYS
