"""Models and engines for the tests here: made once, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from lab.bench.vllm_engine import worker_cores

if TYPE_CHECKING:
    from processes import ForkServer

HERE = Path(__file__).resolve().parent
# What the tests here share lies beside them, and engines import it as well.
sys.path.append(str(HERE))

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
Results: TypeAlias = list[dict[str, Any]]
Run: TypeAlias = Callable[..., tuple[Results, str]]
Plain: TypeAlias = Callable[[str], dict[str, dict[str, Any]]]


def pytest_report_header() -> str | None:
    """How latent attention is computed on this machine, or why its tests are skipped."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from latent_kernels import how_here  # noqa: PLC0415 - from the folder of this file

    return f"latent attention: {how_here()}"


def two_cores() -> str:
    """A core for each of two ranks, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Has imported vLLM, when it is first needed, for all engines of the session."""
    from processes import ForkServer  # noqa: PLC0415 - from the folder of this file

    server = ForkServer(
        tmp_path_factory.mktemp("forked"),
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            **QUIET,
        },
    )
    yield server
    server.close()


@pytest.fixture(scope="session")
def model(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            environment = {"PYTHONPATH": str(HERE), **os.environ}
            status, printed = fork_server.run("make_model", [kind, str(folder)], environment)
            assert status == 0, printed[-6000:]
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """For a model the `PYTHONPATH` of its engines; skips what this machine cannot compute."""
    from latent_kernels import BY_TORCH, NOT_HERE, how_here, make_plugin  # noqa: PLC0415

    plugins: list[str] = []

    def find(kind: str) -> str:
        given = [str(HERE), os.environ.get("PYTHONPATH", "")]
        if kind != "latent":
            return os.pathsep.join(given)
        if how_here().startswith(NOT_HERE):
            pytest.skip(how_here())
        if how_here() == BY_TORCH and not plugins:
            plugins.append(str(make_plugin(tmp_path_factory.mktemp("plugin"))))
        return os.pathsep.join([*plugins, *given])

    return find


@pytest.fixture(scope="session")
def run(
    model: Callable[[str], Path],
    sources: Callable[[str], str],
    fork_server: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Runs an engine through a list of acts: the result of each, and all that was printed.

    With `dies`, the last act kills the engine. With `prefill` and `decode`, which are scripts, it
    runs two engines that hand prompts over.
    """

    from where import why_not_here  # noqa: PLC0415 - from the folder of this file

    def run_engine(kind: str, acts: list[dict[str, Any]], **script: Any) -> tuple[Results, str]:
        expected = -signal.SIGKILL if script.pop("dies", False) else 0
        ranks = script.get("ranks", 1)
        if why_not := why_not_here(kind, script):
            pytest.skip(why_not)
        environment = {
            **os.environ,
            "PYTHONPATH": sources(kind),
            **QUIET,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One core is the scheduler's, which never sleeps while a step runs.
            "VLLM_CPU_OMP_THREADS_BIND": worker_cores() if ranks == 1 else two_cores(),
            "PENSTOCK_TAMPER": str(tmp_path_factory.mktemp("tamper") / "word"),
            **script.pop("environment", {}),
        }
        job = "run_pair" if "prefill" in script else "run_engine"
        arguments = [str(model(kind)), {"acts": acts, **script}]
        status, printed = fork_server.run(job, arguments, environment)
        # What failed first, and how it ended.
        assert status == expected, printed[printed.find("ERROR") :][:6000] + printed[-3000:]
        lines = [line for line in printed.splitlines() if line.startswith("ACT ")]
        return [json.loads(line.removeprefix("ACT ")) for line in lines], printed

    return run_engine


@pytest.fixture(scope="session")
def plain_vllm(run: Run) -> Plain:
    """For a model what plain vLLM told in each act of `references.py`."""
    from references import ACTS, SETUPS  # noqa: PLC0415 - from the folder of this file

    results: dict[str, dict[str, dict[str, Any]]] = {}

    def answer_of(kind: str) -> dict[str, dict[str, Any]]:
        if kind not in results:
            acts = ACTS[kind]
            answers, _ = run(kind, list(acts.values()), **SETUPS[kind])
            results[kind] = dict(zip(acts, answers, strict=True))
        return results[kind]

    return answer_of
