"""What the router's own process costs: requests over HTTP, and KV events over its channels.

`penstock serve --role router` as it is started for users, instances that answer at once, and
clients, each in a process of its own. CPU time of the router is that of its whole process, from
`/proc`: so other load on the machine changes little.

| row     | is                                                                             |
|---------|--------------------------------------------------------------------------------|
| request | a completion of one token, whole; its prompt has `PROMPT_TOKENS` ids             |
| stream  | the same as a stream                                                            |
| models  | `GET /v1/models`: what HTTP alone costs in this process                          |
| event   | a KV event of `EVENT_KEYS` blocks                                                |
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.engine_model import EIGHT_B
from lab.bench.measure import summarize
from lab.bench.pair import Scale, write_model
from lab.bench.router_http_child import CLIENTS
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from lab.bench.report import BenchReport

INSTANCES = 8
SECONDS = 5.0
ROUNDS = 3
START_S = 60.0
REQUESTS_A_SECOND = 5_000
EVENTS_A_SECOND = 20_000
PATHS = ("request", "stream", "models")
SMALL = replace(
    EIGHT_B, layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32, intermediate=64, vocabulary=256
)


def run_router_http(
    report: BenchReport,
    *,
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
    instances: int = INSTANCES,
) -> None:
    """Measures CPU time of the router's process for each kind of work."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address = f"tcp://127.0.0.1:{_free_port()}"
        os_state = {"XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1"}
        model = Path(folder) / "model"
        write_model(model, Scale(SMALL, "float32", (), 0, 0.0), device="cpu")
        router = stack.enter_context(
            _started(
                os_state,
                "penstock.cli.entry",
                "serve",
                "--role",
                "router",
                "--router",
                address,
                "--model",
                str(model),
                "--port",
                "0",
                "--log-level",
                "error",
            )
        )
        server = _line(router).partition(" at http://")[2].split("/")[0]
        answering = stack.enter_context(_child(os_state, "instances", address, str(instances)))
        _line(answering)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for path in PATHS:
                report.progress(path)
                asking = stack.enter_context(_child(os_state, path, server, str(seconds)))
                found.setdefault(path, []).append(_cpu_s_each(router, asking))
            sending = stack.enter_context(_child(os_state, "events", address, str(seconds)))
            found.setdefault("event", []).append(_cpu_s_each(router, sending))
        for metric, times in found.items():
            report.add_row(
                bench="router-http",
                side="penstock",
                params={"instances": instances, "clients": CLIENTS},
                metric=metric,
                unit="s",
                summary=summarize(times),
            )
        for metric, least in (("request", REQUESTS_A_SECOND), ("event", EVENTS_A_SECOND)):
            rate = 1 / summarize(found[metric]).median
            report.add_ratio(f"{metric}s a second of CPU", rate, at_least=least)


def _cpu_s_each(router: subprocess.Popen[str], child: subprocess.Popen[str]) -> float:
    """CPU seconds of the router for each thing that a child has it do."""
    _line(child)
    before = _cpu_s(router.pid)
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    count = int(_line(child))
    return (_cpu_s(router.pid) - before) / count


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _child(state: dict[str, str], *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return _started(state, "lab.bench.router_http_child", *arguments)


@contextmanager
def _started(
    state: dict[str, str], module: str, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **state, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UnavailableError(f"a process ended: {process.args!r}")
    return line
