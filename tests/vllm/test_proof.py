"""The offload layer inside a real vLLM: scheduler and worker are separate processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.vllm_engine import worker_cores

pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
BLOCK = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    # In a process of its own, so that this file can be read where vLLM is not installed.
    subprocess.run([sys.executable, str(HERE / "tiny_llama.py"), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Any]:
    return passes(model, "plain")


def test_loaded_blocks_give_the_same_tokens_and_log_probabilities(
    model: Path, plain: list[Any]
) -> None:
    first, second = passes(model, "proof")

    assert agree(first, plain[0])
    assert agree(second, plain[1])
    assert [row["cached"] for row in first] == [0, 0, 0]
    assert [row["cached"] for row in second] == [9 * BLOCK, 6 * BLOCK, 3 * BLOCK]


def test_two_ranks_load_what_each_of_them_saved(model: Path) -> None:
    plain, proof = passes(model, "plain", ranks=2), passes(model, "proof", ranks=2)

    assert agree(proof[0], plain[0])
    assert agree(proof[1], plain[1])
    assert [row["cached"] for row in proof[1]] == [9 * BLOCK, 6 * BLOCK, 3 * BLOCK]


def test_a_block_that_changed_in_host_memory_is_computed_again(
    model: Path, plain: list[Any]
) -> None:
    told = run(model, "sabotaged", sabotage="flip")

    first, second = passes_of(told)
    assert agree(first, plain[0])
    assert agree(second, plain[1])
    recovered = re.findall(r"KV load failure: (\d+) request\(s\) rescheduled", told)
    assert sum(map(int, recovered)) == 3


def test_a_block_that_changed_on_the_device_spoils_the_output(
    model: Path, plain: list[Any]
) -> None:
    """The control: the comparison is able to fail."""
    _, second = passes(model, "sabotaged", sabotage="zero")

    assert not agree(second, plain[1])


def passes(model: Path, way: str, *, ranks: int = 1, sabotage: str = "") -> list[Any]:
    return passes_of(run(model, way, ranks=ranks, sabotage=sabotage))


def passes_of(told: str) -> list[Any]:
    lines = [line for line in told.splitlines() if line.startswith("PASS ")]
    return [json.loads(line.removeprefix("PASS ")) for line in lines]


def run(model: Path, way: str, *, ranks: int = 1, sabotage: str = "") -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": worker_cores() if ranks == 1 else "0|1",
        "PROOF_SABOTAGE": sabotage,
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "proof_run.py"), str(model), way, str(ranks)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def agree(one: list[Any], other: list[Any]) -> bool:
    """Whether tokens are the same, and log-probabilities to four digits."""
    return all(
        a["tokens"] == b["tokens"] and a["logprobs"] == pytest.approx(b["logprobs"], abs=5e-5)
        for a, b in zip(one, other, strict=True)
    )
