"""`penstock router` in front of vLLM servers, whose processes tests kill and stop.

One prefill server, two decode servers, and a plain one beside them that says what is right. The one
rule: every wait has an end, and no process is left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from processes import END_S, ENGINE_S, ends

from lab.bench.vllm_servers import (
    BLOCK_TOKENS,
    VllmForks,
    penstock_settings,
    plain_settings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PREFILL, DECODE, ROUTER = "prefill", ("decode", "decode 2"), "router"
TOKENS = 3 * BLOCK_TOKENS + 17
LOOK_S = 0.05
"""Between two looks at a page of a server: nobody tells when it changes."""


class Routed:
    """The servers and the router."""

    def __init__(self, forks: VllmForks) -> None:
        """Starts them; they are ready when it returns."""
        self._forks = forks
        cores = sorted(os.sched_getaffinity(0))
        self._settings = {
            PREFILL: penstock_settings("kv_producer", cores[-1]),
            **{name: penstock_settings("kv_consumer", cores[0]) for name in DECODE},
        }
        self.plain = forks.start(plain_settings(cores[0]))
        self.servers = {name: forks.start(each) for name, each in self._settings.items()}
        for server in (self.plain, *self.servers.values()):
            server.wait_ready()
        self._router: subprocess.Popen[str] | None = None
        self.port = 0
        self.open_router()

    def open_router(self) -> None:
        """Starts a router, if none runs: it is ready when every server is."""
        if self._router is not None and self._router.poll() is None:
            return
        self.close_router()
        ports = {name: server.port for name, server in self.servers.items()}
        command = [sys.executable, "-m", "penstock.cli.entry", "router", "--port", "0"]
        for name, port in ports.items():
            command += [f"--vllm-{name.split()[0]}", f"http://127.0.0.1:{port}"]
        self._router = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._router.stdout is not None
        # It is printed at once: the servers are there.
        line = self._router.stdout.readline()
        found = re.search(r":(\d+)/v1", line)
        assert found, line
        self.port = int(found[1])
        self.until_up()

    def close_router(self) -> None:
        """Kills it, if it has not ended; a second call changes nothing."""
        if self._router is not None:
            self._router.kill()
            self._router.communicate()

    def end_router(self) -> int:
        """Ends it as an operator does: its exit status."""
        assert self._router is not None
        self._router.terminate()
        return self._router.wait(END_S)

    def until_up(self) -> None:
        """Waits until the router uses every server."""
        until(lambda: b'"up":false' not in page(self.port, "/health"))

    def send(self, number: int, target: str, role: str = "") -> None:
        """Sends a signal to the router, or to the processes of a server with a role."""
        if target == ROUTER:
            assert self._router is not None
            self._router.send_signal(number)
            return
        server = self.servers[target]
        # A server has other processes that serve it, but HTTP is served by the first.
        found = [pid for pid, does in server.processes().items() if does == role]
        pids = [server.pid] if role == "http" else found
        # What was killed meanwhile does not go on.
        assert pids or number == signal.SIGCONT
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def revive(self, target: str) -> None:
        """Starts anew what was killed: where it was, so that the router finds it again."""
        if target == ROUTER:
            self.open_router()
            return
        server = self.servers[target]
        left = list(server.processes())
        server.kill()
        # Until then they hold its port.
        assert all(ends(pid) for pid in left)
        self.servers[target] = self._forks.start(self._settings[target], server.port)
        self.servers[target].wait_ready()
        self.until_up()

    def prompts_received(self) -> float:
        """How many prompts the decode servers have taken from the prefill server."""
        return self.decode_counted("vllm:penstock_prompts_received_total")

    def decode_counted(self, metric: str) -> float:
        """A metric of the decode servers, added up."""
        return sum(self.servers[name].counted(metric) for name in DECODE)

    def in_hand(self) -> dict[str, float]:
        """Requests of the router at each server."""
        lines = page(self.port, "/metrics").decode().splitlines()
        found = {}
        for name, server in self.servers.items():
            own = [
                line
                for line in lines
                if line.startswith("penstock_router_requests_now{") and f":{server.port}" in line
            ]
            found[name] = sum(float(line.rpartition(" ")[2]) for line in own)
        return found

    def decoding(self) -> str:
        """Waits until a decode server has a request of the router in hand: its name."""
        found: list[str] = []

        def is_asked() -> bool:
            now = self.in_hand()
            found[:] = [name for name in DECODE if now[name]]
            return bool(found)

        until(is_asked)
        return found[0]


def page(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=END_S) as answer:
        content: bytes = answer.read()
        return content


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_S
    while not holds():
        assert time.monotonic() < deadline
        Event().wait(LOOK_S)


def ask(port: int, number: int, **more: Any) -> bytes:
    """Asks with a prompt of tokens that no other number has."""
    length = more.pop("tokens", TOKENS)
    prompt = [10 + (number * 397 + 13 * each) % 2000 for each in range(length)]
    asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**asked, "return_tokens_as_token_ids": True, **more}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ENGINE_S) as answer:
        content: bytes = answer.read()
        return content


def told_in(body: bytes) -> tuple[list[str], list[float]]:
    """Tokens and log-probabilities of an answer, whole or streamed, or of what there is of it."""
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.strip()]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    found = [each["logprobs"] for event in events for each in event.get("choices", ())]
    tokens = [token for each in found for token in each["tokens"]]
    return tokens, [value for each in found for value in each["token_logprobs"]]


def agree(one: bytes, other: bytes) -> bool:
    """Whether two answers are the same: to four digits, as two of plain vLLM are."""
    (tokens, values), (other_tokens, expected) = told_in(one), told_in(other)
    return tokens == other_tokens and values == pytest.approx(expected, abs=5e-5)


def begins(one: bytes, other: bytes) -> bool:
    """Whether the first answer is the beginning of the second one."""
    (tokens, values), (other_tokens, expected) = told_in(one), told_in(other)
    count = len(tokens)
    same = tokens == other_tokens[:count]
    return same and values == pytest.approx(expected[:count], abs=5e-5)
