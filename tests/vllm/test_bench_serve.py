"""`vllm bench serve` itself, against `penstock serve`: every request gets all its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import ENGINE_S

from tests.serve.conftest import make_checkpoint, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Running

pytestmark = pytest.mark.vllm

VLLM = Path(sys.executable).parent / "vllm"
PROMPTS, TOKENS = 6, 9


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("bench") / "small-model"
    make_checkpoint(folder)
    options = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
    with serving(folder, *options) as running:
        yield running, folder


def bench(served: tuple[Running, Path], results: Path, *options: str) -> Any:
    running, folder = served
    command = [
        *(str(VLLM), "bench", "serve", "--base-url", running.address),
        *("--model", "small-model", "--tokenizer", str(folder)),
        *("--dataset-name", "random", "--random-input-len", "40"),
        *("--random-output-len", str(TOKENS), "--num-prompts", str(PROMPTS)),
        *("--save-result", "--result-dir", str(results), "--result-filename", "told.json"),
        *options,
    ]
    ended = subprocess.run(command, timeout=ENGINE_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return json.loads((results / "told.json").read_text())


COMPLETIONS = ("--backend", "openai", "--endpoint", "/v1/completions", "--ignore-eos")


@pytest.mark.parametrize(
    "options",
    [
        # Those with sampling are completions as well.
        pytest.param(COMPLETIONS, id="completions", marks=pytest.mark.long),
        pytest.param(
            ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--ignore-eos"),
            id="chat",
        ),
        pytest.param(
            (
                *COMPLETIONS,
                *("--temperature", "0.7", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.05"),
                *("--repetition-penalty", "1.1", "--logprobs", "2"),
            ),
            id="sampling",
        ),
    ],
)
def test_vllm_bench_serve_is_answered(
    served: tuple[Running, Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    told = bench(served, tmp_path, *options)

    assert told["completed"] == PROMPTS
    assert told.get("failed", 0) == 0
    assert told["total_output_tokens"] == PROMPTS * TOKENS
