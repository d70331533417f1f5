"""Models and SGLang engines for the tests here, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "vllm"
"""The tests of vLLM have the small model, and run engines in processes that end."""
sys.path.append(str(SHARED))

QUIET = {"HF_HUB_OFFLINE": "1"}
Results: TypeAlias = list[dict[str, Any]]
Run: TypeAlias = Callable[..., tuple[Results, str]]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights, made from a configuration."""
    folder = tmp_path_factory.mktemp("llama")
    made = [sys.executable, str(SHARED / "tiny_llama.py"), str(folder)]
    subprocess.run(made, check=True, capture_output=True, env={**os.environ, **QUIET})
    return folder


@pytest.fixture(scope="session")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs an engine through a list of acts: the result of each, and all that was printed."""
    from processes import run_to_the_end  # noqa: PLC0415 - from the folder of vLLM's tests

    def run_engine(acts: list[dict[str, Any]], **script: Any) -> tuple[Results, str]:
        given = tmp_path_factory.mktemp("script") / "script.json"
        given.write_text(json.dumps({"acts": acts, **script}))
        command = [sys.executable, str(HERE / "engine_run.py"), str(model), str(given)]
        status, printed = run_to_the_end(command, {**os.environ, **QUIET})
        assert status == 0, printed[-6000:]
        lines = [line for line in printed.splitlines() if line.startswith("ACT ")]
        return [json.loads(line.removeprefix("ACT ")) for line in lines], printed

    return run_engine
