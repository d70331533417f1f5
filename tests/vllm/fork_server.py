"""A process that imports vLLM once and forks for every engine and every model of the tests.

    python fork_server.py

Three processes of an engine import vLLM, each for about ten CPU seconds, which is most of what the
start of an engine costs. Here they are forks of a process that has imported it. vLLM starts its
processes by `fork` on GPUs and by `spawn` on the CPU; here by `fork`. `test_page.py` and
`test_serving.py` start vLLM as a user does.

What it reads and answers, and its one rule, are in `fork_loop.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import torch
import vllm.utils.system_utils

# Before the modules below import it by name.
vllm.utils.system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

import compressed_tensors  # noqa: E402, F401
import engine_run  # noqa: E402
import fork_loop  # noqa: E402
import pair_run  # noqa: E402
import tiny_models  # noqa: E402
import vllm.model_executor.models.deepseek_v2  # noqa: E402
import vllm.model_executor.models.gemma3  # noqa: E402
import vllm.model_executor.models.llama  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
from where import ON_GPU  # noqa: E402

if ON_GPU:
    import vllm.v1.worker.gpu_worker
else:
    import vllm.v1.worker.cpu_worker

import penstock.connectors.vllm.adapter  # noqa: E402, F401

SPAWNED_WORKER = vllm.v1.executor.multiproc_executor.WorkerProc.worker_main


def run_worker(*args: Any, **kwargs: Any) -> None:
    """Binds a worker to the cores that vLLM chose for it.

    vLLM sets variables for this, which OpenMP reads when it is loaded: too early for a fork.
    """
    chosen = os.environ.get("GOMP_CPU_AFFINITY") or os.environ["OMP_PLACES"]
    cores = {int(number) for number in re.findall(r"\d+", chosen)}
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    SPAWNED_WORKER(*args, **kwargs)


if not ON_GPU:
    vllm.v1.executor.multiproc_executor.WorkerProc.worker_main = staticmethod(run_worker)


def make_model(kind: str, folder: str) -> None:
    tiny_models.MAKERS[kind](Path(folder))


def run_engine(model: str, script: dict[str, Any]) -> None:
    engine_run.main(model, script)


def run_pair(model: str, script: dict[str, Any]) -> None:
    pair_run.main(model, script)


JOBS = {each.__name__: each for each in (make_model, run_engine, run_pair)}


if __name__ == "__main__":
    fork_loop.serve(JOBS, threads_allowed=ON_GPU)
