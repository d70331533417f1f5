"""Models and SGLang engines for the tests here, each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from processes import ForkServer

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "vllm"
"""The tests of vLLM have the small model, and run engines in processes that end."""
sys.path += [str(HERE), str(SHARED)]

QUIET = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "0"}
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
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Has imported SGLang, when it is first needed, for all engines of the session."""
    from processes import ForkServer  # noqa: PLC0415 - from the folder of vLLM's tests

    server = ForkServer(
        tmp_path_factory.mktemp("forked"),
        {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join([str(HERE), str(SHARED)])},
        HERE / "fork_server.py",
    )
    yield server
    server.close()


@pytest.fixture(scope="session")
def run(model: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs an engine through a list of acts: the result of each, and all that was printed.

    With `dies`, the last act kills the engine.
    """

    def run_engine(acts: list[dict[str, Any]], **script: Any) -> tuple[Results, str]:
        expected = -signal.SIGKILL if script.pop("dies", False) else 0
        folder = tmp_path_factory.mktemp("watched")
        environment = {
            **os.environ,
            **QUIET,
            "PYTHONPATH": str(HERE),
            "PENSTOCK_TAMPER": str(folder / "word"),
            "PENSTOCK_COUNTS": str(folder / "counts"),
            **script.pop("environment", {}),
        }
        arguments = [str(model), {"acts": acts, **script}]
        status, printed = fork_server.run("run_engine", arguments, environment)
        assert status == expected, printed[-6000:]
        lines = [line for line in printed.splitlines() if line.startswith("ACT ")]
        return [json.loads(line.removeprefix("ACT ")) for line in lines], printed

    return run_engine
