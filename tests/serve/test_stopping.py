"""Real servers: what they log, how they stop, and what a stranger's connections do to them."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock_serve.observe.live import PHASES
from tests.serve.conftest import (
    ENDLESS,
    ENDLESS_TOKENS,
    SOON_S,
    Running,
    _ready_line,
    command,
    descendants,
    eventually,
)
from tests.serve.test_lives import nobody_comes_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = ("--port", "0", "--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
LONG = {"prompt": "A story without an end", "max_tokens": 450, "temperature": 0, "stream": True}


@contextmanager
def logging_server(
    folder: Path,
    log: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Running]:
    """A server whose standard error goes to a file; whoever uses it stops it."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "penstock.cli.entry",
                "serve",
                "--model",
                str(folder),
                *SIZES,
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            preexec_fn=prepare,  # noqa: PLW1509 - it only sets a limit
        )
    try:
        address = _ready_line(process).partition(" at ")[2].split("/v1")[0]
        running = Running(process, address)
        with running.client:
            yield running
    finally:
        process.kill()
        process.wait(timeout=SOON_S)
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def stream(running: Running, **wishes: Any) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    with running.client.stream("POST", "/v1/completions", json={**LONG, **wishes}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        yield lines


def dial(running: Running, say: bytes) -> socket.socket:
    host, _, port = running.address.removeprefix("http://").partition(":")
    found = socket.create_connection((host, int(port)), timeout=SOON_S)
    found.sendall(say)
    return found


def rude_clients(running: Running, held: ExitStack) -> None:
    """Clients that say nothing, half a head, half a body, or that read nothing."""
    body = json.dumps(LONG).encode()
    kind = b"Content-Type: application/json\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + kind + b"Content-Length: %d\r\n\r\n"
    for say in (
        b"",
        b"GET /health HT",
        head % len(body) + body[:10],
        head % len(body) + body,
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3,
    ):
        held.enter_context(dial(running, say))


def test_a_stop_lets_answers_end_and_logs_no_warning(model_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with logging_server(model_folder, log, "--drain-s", "600") as running:
        with stream(running, max_tokens=200) as lines:
            running.process.send_signal(signal.SIGTERM)
            said = list(lines)

        assert said[-1] == "data: [DONE]"
        assert running.process.wait(timeout=SOON_S) == 0
    reported = log.read_text()
    assert "Traceback" not in reported
    assert " WARNING " not in reported
    assert " ERROR " not in reported
    [access] = [line for line in reported.splitlines() if " penstock.serve.access " in line]
    assert " method=POST path=/v1/completions status=200 complete=true latency_ms=" in access
    numbers = dict(pair.split("=") for pair in access.partition(" cached_tokens=")[2].split()[1:])
    assert numbers.pop("completion_tokens") == "200"
    assert list(numbers) == [f"{phase}_ms" for phase in PHASES]
    assert float(numbers["prefill_ms"]) > 0
    assert float(numbers["decode_ms"]) > 0
    # The progress is logged without a terminal, too.
    assert "loading: instance-0 rank 0: 2 of 2 layers" in reported


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGTERM,), marks=pytest.mark.long),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
def test_what_does_not_end_in_time_gets_an_error_and_ends(
    endless_model_folder: Path, tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    log = tmp_path / "log"
    drain_s = "0" if len(signals) == 1 else "600"
    options = ("--drain-s", drain_s, "--log-json", *ENDLESS)
    with logging_server(endless_model_folder, log, *options) as running, ExitStack() as held:
        rude_clients(running, held)
        with stream(running, max_tokens=ENDLESS_TOKENS) as lines:
            for each in signals:
                running.process.send_signal(each)
                # One that comes before the first was taken is the same signal.
                eventually(lambda: "stopping" in log.read_text(), True)  # noqa: FBT003
            said = list(lines)

        last = json.loads(said[-1].removeprefix("data: "))
        assert last["error"]["message"] == "the server stops, in the middle of the answer"
        # Who asks twice does not get an end in order, and is told so by the second signal's status.
        ended = 0 if len(signals) == 1 else 128 + signals[-1]
        assert running.process.wait(timeout=SOON_S) == ended
    reported = [json.loads(line) for line in log.read_text().splitlines()]
    assert not [each for each in reported if "exception" in each]
    assert "Traceback" not in log.read_text()
    assert {"time", "level", "logger"} <= set(reported[0])
    cut = [each for each in reported if each.get("status") == 200 and not each["complete"]]
    assert cut


def test_connections_without_number_do_not_take_the_descriptors_of_others(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def few_descriptors() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    with (
        logging_server(model_folder, log, prepare=few_descriptors) as running,
        ExitStack() as held,
    ):
        for _ in range(300):
            held.enter_context(dial(running, b"GET /"))

        with nobody_comes_back(running):
            os.kill(running.children()["instance"], signal.SIGKILL)
            eventually(lambda: running.client.get("/health").status_code, 503)

        # It comes back, which takes descriptors, and clients are served beside the others.
        eventually(lambda: running.client.get("/health").status_code, 200)
        assert running.complete("Is anybody there?")["usage"]["completion_tokens"] == 8
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=SOON_S) == 0
    reported = log.read_text()
    assert "Traceback" not in reported
    assert "Assertion" not in reported
    assert "fewer connections than asked for: serve.connections_max=1024 allowed=100" in reported


def test_a_key_of_the_environment_or_of_a_file_is_nowhere_to_be_seen(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    secret = "sesame-9d1f"
    options = ("--host", "0.0.0.0", "--log-level", "debug")
    environment = {"PENSTOCK_API_KEY": secret}
    with logging_server(model_folder, log, *options, environment=environment) as running:
        client = httpx.Client(base_url=running.address, timeout=SOON_S)
        with client:
            unknown = client.post("/admin/reset")
            known = client.post("/admin/reset", headers={"Authorization": f"Bearer {secret}"})
            forged = client.get("/cache?x=%0aforged", headers={"X-Request-Id": "a status=200"})

        assert unknown.status_code == forged.status_code == 401
        assert known.status_code == 200
        processes = descendants(running.process.pid)
        assert processes
        for pid in [running.process.pid, *processes]:
            assert secret not in command(pid)
        for pid in processes:
            assert secret not in Path(f"/proc/{pid}/environ").read_text()
    assert secret not in log.read_text()
    assert 'client_request="a status=200"' in log.read_text()
    assert "WITHOUT AN API KEY" not in log.read_text()


def test_an_open_server_warns_in_capitals_and_has_no_torch(
    model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with logging_server(model_folder, log, "--host", "0.0.0.0") as running:
        port = running.address.rpartition(":")[2]
        audit = f"http://127.0.0.1:{port}/admin/audit"
        # An instance that a busy machine keeps from answering within 10 s is a 503.
        eventually(lambda: httpx.post(audit, timeout=SOON_S).status_code, 200)
        rebound = httpx.post(audit, headers={"Host": "a.example"}, timeout=SOON_S)
        page = httpx.post(audit, headers={"Origin": "http://a.example"}, timeout=SOON_S)

        # What computes has torch; what answers needs none.
        assert "libtorch" not in Path(f"/proc/{running.process.pid}/maps").read_text()
        assert rebound.status_code == page.status_code == 403
        assert page.json()["error"]["type"] == "permission_error"
    assert "LISTENING ON 0.0.0.0 WITHOUT AN API KEY" in log.read_text()
