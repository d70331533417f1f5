"""A pair of `penstock serve` beside one instance: what the handoff adds to the first token.

Two servers over the same model, one with a prefill and a decode instance, one with an instance
that does both, asked in turn; on a GPU all of them share it.

| row              | what is measured                                                            |
|------------------|-----------------------------------------------------------------------------|
| `first token`    | from the request until its first token came, nothing else under way          |
| `prompts`        | prompts a second, several at a time, with one token each: the prefill side's |
|                  | compute, which is all that one instance does, too                            |

The one rule: every answer of the pair is compared with that of the one instance. Probabilities
differ by rounding, so the first tokens are compared by their log-probabilities.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lab.bench.engine_model import EIGHT_B, RandomCheckpoint
from lab.bench.measure import summarize
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lab.bench.report import BenchReport
    from penstock_serve.engine.architecture import Architecture

START_S = 600.0
ANSWER_S = 300.0
AT_ONCE = 4
PROMPTS = 12
"""Of one round of `prompts`."""
BLOCK_TOKENS = 16
ADDED_MAX = 1.5
KEPT_MIN = 0.9


class Scale(NamedTuple):
    """A model, and what is asked of it."""

    architecture: Architecture
    dtype: str
    lengths: tuple[int, ...]
    blocks: int
    bound: float
    """By which log-probabilities may differ."""


SCALES = {
    "cuda": Scale(EIGHT_B, "bfloat16", (512, 2048, 8192), 4096, 0.2),
    "cpu": Scale(
        replace(
            EIGHT_B,
            layers=4,
            hidden=256,
            heads=8,
            kv_heads=4,
            head_dim=32,
            intermediate=512,
            vocabulary=1024,
        ),
        "float32",
        (128, 512),
        1024,
        1e-3,
    ),
}


class Answer(NamedTuple):
    """What a client got, and when its first token came."""

    first_s: float
    token: str
    logprob: float


def run_pair(report: BenchReport, *, device: str, rounds: int, transport: str = "auto") -> None:
    """Measures both servers in turn, and adds rows and ratios.

    Raises:
        UnavailableError: a server does not start, or the pair gives other answers.
    """
    scale = SCALES[device]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        model = Path(folder) / "model"
        write_model(model, scale, device=device)
        options = _options(scale, device)
        config = Path(folder) / "penstock.toml"
        config.write_text(f'version = 1\n[handoff]\ntransport = "{transport}"\n')
        roles = ("--prefill-tp", "1", "--decode-tp", "1", "--config", str(config))
        with (
            serving(model, *options) as one,
            serving(model, *options, *roles) as pair,
        ):
            for length in scale.lengths:
                _first_tokens(report, one, pair, scale, length, rounds, device)
            _prompts(report, one, pair, scale, rounds, device)
            _require_handed(pair)
    report.add_note(f"transport of the pair: {transport}")


def write_model(folder: Path, scale: Scale, *, device: str) -> None:
    """A checkpoint with random weights, a file a layer, and a tokenizer of bytes."""
    of = scale.architecture
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of.hidden,
        "intermediate_size": of.intermediate,
        "num_hidden_layers": of.layers,
        "num_attention_heads": of.heads,
        "num_key_value_heads": of.kv_heads,
        "head_dim": of.head_dim,
        "vocab_size": of.vocabulary,
        "rms_norm_eps": of.norm_epsilon,
        "rope_theta": of.rope_theta,
        "max_position_embeddings": of.positions,
        "tie_word_embeddings": False,
        "torch_dtype": scale.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    drawn = RandomCheckpoint(of, device=torch.device(device))
    dtype = getattr(torch, scale.dtype)
    files: dict[str, list[str]] = {
        "model-ends.safetensors": ["model.embed_tokens", "model.norm", "lm_head"]
    }
    for layer in range(of.layers):
        files[f"model-{layer}.safetensors"] = [
            f"model.layers.{layer}.{name}"
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                *(f"self_attn.{part}_proj" for part in "qkvo"),
                *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
            )
        ]
    index = {f"{name}.weight": file for file, names in files.items() for name in names}
    for file, names in files.items():
        tensors = {f"{name}.weight": drawn.rows(f"{name}.weight").to(dtype).cpu() for name in names}
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _options(scale: Scale, device: str) -> list[str]:
    return [
        *("--device", device, "--dtype", scale.dtype, "--blocks", str(scale.blocks)),
        *("--block-tokens", str(BLOCK_TOKENS), "--host-gib", "0", "--log-level", "warning"),
    ]


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """A server, as `host:port`; it is gone at the end of the `with`."""
    command = ["-m", "penstock.cli.entry", "serve", "--model", str(model), "--port", "0", *options]
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_S)
            line = process.stdout.readline() if ready else ""
            if " at http://" not in line:
                raise UnavailableError(f"the server did not start: {' '.join(options)}")
            yield line.partition(" at http://")[2].split("/")[0]
        finally:
            process.terminate()
            process.wait(START_S)


def ask(server: str, prompt: list[int], *, max_tokens: int) -> Answer:
    """Asks for a stream of tokens, and reads it to its end.

    Raises:
        UnavailableError: the server refuses.
    """
    connection = http.client.HTTPConnection(server, timeout=ANSWER_S)
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
        "ignore_eos": True,
    }
    began = time.monotonic()
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise UnavailableError(f"the server answered {response.status}: {response.read()!r}")
        found: Answer | None = None
        for line in response:
            text = line.decode().strip()
            if found is None and text.startswith("data: {"):
                found = _first(json.loads(text.removeprefix("data: ")), time.monotonic() - began)
        if found is None:
            raise UnavailableError("the answer has no token")
        return found
    finally:
        connection.close()


def _first(chunk: Any, seconds: float) -> Answer | None:  # noqa: ANN401 - JSON
    logprobs = chunk["choices"][0].get("logprobs") if chunk.get("choices") else None
    if not logprobs or not logprobs["tokens"]:
        return None
    return Answer(seconds, logprobs["tokens"][0], logprobs["token_logprobs"][0])


def _prompt(scale: Scale, length: int, seed: int) -> list[int]:
    """One that nobody has asked for before."""
    draw = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(
        0, scale.architecture.vocabulary, (length,), generator=draw
    ).tolist()
    return tokens


def _first_tokens(
    report: BenchReport,
    one: str,
    pair: str,
    scale: Scale,
    length: int,
    rounds: int,
    device: str,
) -> None:
    times: dict[str, list[float]] = {"one instance": [], "pair": []}
    for number in range(-2, rounds):  # The first two compile and fill what is used from then on.
        prompt = _prompt(scale, length, length * 1000 + number + 2)
        sides = [("one instance", one), ("pair", pair)]
        answers = {
            side: ask(server, prompt, max_tokens=1)
            for side, server in (sides if number % 2 else sides[::-1])
        }
        _require_same(answers["one instance"], answers["pair"], scale)
        if number >= 0:
            for side, answer in answers.items():
                times[side].append(answer.first_s)
    for side, found in times.items():
        report.add_row(
            bench=f"pair on {device}",
            side=side,
            params={"tokens": length, "dtype": scale.dtype},
            metric="first token",
            unit="ns",
            summary=summarize([1e9 * each for each in found]),
        )
    report.add_ratio(
        f"first token of a pair, of one instance, {length} tokens",
        statistics.median(
            mine / theirs for mine, theirs in zip(times["pair"], times["one instance"], strict=True)
        ),
        at_most=ADDED_MAX,
    )


def _require_same(expected: Answer, found: Answer, scale: Scale) -> None:
    """The first tokens are equal, or so likely alike that rounding decides."""
    if abs(expected.logprob - found.logprob) > scale.bound:
        raise UnavailableError(f"the pair answers {found}, one instance {expected}")


def _prompts(
    report: BenchReport, one: str, pair: str, scale: Scale, rounds: int, device: str
) -> None:
    length = scale.lengths[1]
    rates: dict[str, list[float]] = {"one instance": [], "pair": []}
    with ThreadPoolExecutor(AT_ONCE) as clients:
        for number in range(rounds):
            sides = [("one instance", one), ("pair", pair)]
            for side, server in sides if number % 2 else sides[::-1]:
                seeds = range(10**6 + number * PROMPTS, 10**6 + (number + 1) * PROMPTS)
                prompts = [_prompt(scale, length, seed) for seed in seeds]
                began = time.monotonic()
                list(clients.map(lambda each, at=server: ask(at, each, max_tokens=1), prompts))
                rates[side].append(PROMPTS / (time.monotonic() - began))
    for side, found in rates.items():
        report.add_row(
            bench=f"pair on {device}",
            side=side,
            params={"tokens": length, "at_once": AT_ONCE, "dtype": scale.dtype},
            metric="prompts",
            unit="/s",
            summary=summarize(found),
        )
    report.add_ratio(
        "prompts a second of a pair, of one instance",
        statistics.median(
            mine / theirs for mine, theirs in zip(rates["pair"], rates["one instance"], strict=True)
        ),
        at_least=KEPT_MIN,
    )


def _require_handed(pair: str) -> None:
    """What was measured was handed over, and not computed where it was answered."""
    connection = http.client.HTTPConnection(pair, timeout=ANSWER_S)
    try:
        connection.request("GET", "/cache")
        instances = json.loads(connection.getresponse().read())["instances"]
    finally:
        connection.close()
    [decode] = [each for each in instances if each["instance"].startswith("decode")]
    outcomes = decode["handoffs"]
    if set(outcomes) != {"delivered"}:
        raise UnavailableError(f"handoffs ended as {outcomes}, must all be delivered")
