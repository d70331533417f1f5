"""A process that imports vLLM once, and forks for every server of `lab bench vllm --handoff`.

    python -m lab.bench.vllm_fork

A server has three processes, each of which imports vLLM for about ten CPU seconds when it is
started on its own. Here they are forks of one process that has imported it; otherwise a server is
what `vllm serve` starts.

It reads one job a line from its input, as JSON, and answers with a line. For a model: the exit
status of the fork that made it. For a server: the id of its process, which leads a session of its
own. When its input ends, it kills all servers and ends.

The one rule: this process starts no thread and computes nothing, because neither survives a fork.
"""

# vLLM has no types that mypy could see from here.
# ruff: noqa: ANN401

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import uvloop  # type: ignore[import-not-found]
import vllm.utils.system_utils

# Before the modules below import it by name. On the CPU, vLLM would spawn.
vllm.utils.system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

import vllm.model_executor.models.llama  # noqa: E402
import vllm.v1.engine.core  # noqa: E402
import vllm.v1.executor.multiproc_executor  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402
from vllm.entrypoints.launchers.api_server.entry import run_server  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:
    # Until vLLM 0.32.
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

import penstock.connectors.vllm.adapter  # noqa: E402, F401
from lab.bench.vllm_model import HandoffModel, make_handoff_model  # noqa: E402
from lab.bench.vllm_servers import session_of  # noqa: E402

SPAWNED_WORKER = vllm.v1.executor.multiproc_executor.WorkerProc.worker_main


def run_worker(*args: Any, **kwargs: Any) -> None:
    """Binds a worker to its cores: OpenMP has read vLLM's variables before the fork."""
    chosen = os.environ.get("GOMP_CPU_AFFINITY") or os.environ["OMP_PLACES"]
    cores = {int(number) for number in re.findall(r"\d+", chosen)}
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    SPAWNED_WORKER(*args, **kwargs)


vllm.v1.executor.multiproc_executor.WorkerProc.worker_main = staticmethod(run_worker)


def make_model(job: dict[str, Any]) -> None:
    """Writes the model of the benchmark."""
    make_handoff_model(Path(job["folder"]), HandoffModel(**job["sizes"]))


def serve(job: dict[str, Any]) -> None:
    """In the fork: is a server, with a session, an environment and an output of its own."""
    os.setsid()
    output = os.open(job["output"], os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.update(job["environment"])
    parser = make_arg_parser(FlexibleArgumentParser())
    reported = parser.parse_args(job["words"])
    validate_parsed_serve_args(reported)
    uvloop.run(run_server(reported))


def main() -> None:
    """Takes jobs until its input ends."""
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports: forks would miss them"
    # Its end is the end of its input: terminals and `timeout` send these to the benchmark as well.
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    servers: list[int] = []
    while line := sys.stdin.readline():
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            for number, reaction in before.items():
                signal.signal(number, reaction)
            {"make_model": make_model, "serve": serve}[job["call"]](job)
            return
        answer = pid
        if job["call"] == "make_model":
            _, status = os.waitpid(pid, 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            servers.append(pid)
        sys.stdout.write(f"FORKED {answer}\n")
        sys.stdout.flush()
    for server in servers:
        for pid in session_of(server):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
