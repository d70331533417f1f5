"""`vllm serve` as docs/vllm.md starts it: requests over HTTP, and Penstock on vLLM's own page."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import END_S, ENGINE_S, ends, kill_session, session_of

from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
FILE = re.compile(r"^```toml file=(?P<name>\S+)\n(?P<text>.*?)^```$", re.S | re.M)
COMMAND = re.compile(r"^```sh vllm\n\$ (?P<command>vllm serve .*)$", re.M)
BIN = Path(sys.executable).parent
BLOCK = 32
READY = "Application startup complete"
# A device cache that one long prompt fills, so that the next one evicts it.
SMALL = (
    "--dtype float32 --block-size 32 --num-gpu-blocks-override 20 --max-model-len 512 "
    "--enforce-eager --enable-prompt-tokens-details"
)


class Server:
    """A server, as a client sees it."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def complete(self, first: int, **more: Any) -> Any:
        """Asks with a prompt of twelve blocks and a token."""
        prompt = [10 + (first * 7 + 13 * each) % 2000 for each in range(12 * BLOCK + 1)]
        asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1, **more}
        request = urllib.request.Request(
            f"{self._address}/v1/completions",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ENGINE_S) as answer:
            return json.load(answer)

    def reset(self) -> None:
        """Has everything forgotten, also below the device."""
        address = f"{self._address}/reset_prefix_cache?reset_external=true"
        request = urllib.request.Request(address, method="POST")
        urllib.request.urlopen(request, timeout=ENGINE_S).close()

    def shown(self, name: str) -> float:
        """A number of Penstock's on the page that vLLM serves."""
        with urllib.request.urlopen(f"{self._address}/metrics", timeout=ENGINE_S) as page:
            lines = page.read().decode().splitlines()
        found = [line for line in lines if line.startswith(f"vllm:penstock_{name}{{")]
        assert found, name
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def counted(self, name: str) -> float:
        return self.shown(f"{name}_total")

    def comes_to_show(self, name: str, value: float) -> bool:
        """Whether a number comes to a value without another request: saves end after answers."""
        deadline = time.monotonic() + END_S
        while self.shown(name) != value:
            if time.monotonic() > deadline:
                return False
        return True

    def has_counted(self, name: str, value: float) -> bool:
        return self.comes_to_show(f"{name}_total", value)


def accepts(port: int) -> bool:
    """Whether the server listens, by and by: it says that it is ready just before it does."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)) == 0:
                return True
    return False


@pytest.fixture(scope="module")
def server(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    page = PAGE.read_text()
    for block in FILE.finditer(page):
        (folder / block["name"]).write_text(block["text"])
    [port] = free_ports(1)
    # The first one; `test_page.py` starts those of prefill and decode.
    found = next(COMMAND.finditer(page))
    served = found["command"].replace("MODEL", str(model("seeing")))
    process = subprocess.Popen(
        f"penstock vllm-config penstock.toml --bare > transfer.json && "
        f"exec {served} {SMALL} --host 127.0.0.1 --port {port}",
        shell=True,
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # For the endpoint that resets caches.
            "VLLM_SERVER_DEV_MODE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # It says nothing for long: only a clock beside it can end that.
    overdue = threading.Timer(ENGINE_S, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if READY in line:
                break
        else:
            raise AssertionError("".join(printed)[-6000:])
        overdue.cancel()
        # It goes on talking, and somebody must listen.
        listening = threading.Thread(target=process.stdout.read)
        listening.start()
        assert accepts(port)
        yield Server(port)
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)
        assert all(ends(pid) for pid in session_of(process.pid))
        listening.join(END_S)
    finally:
        overdue.cancel()
        kill_session(process.pid)
        if process.stdout is not None:
            process.stdout.close()


def test_a_prompt_comes_back_from_host_memory_and_the_metrics_say_so(server: Server) -> None:
    first = server.complete(1)
    for other in (2, 3):
        server.complete(other)

    again = server.complete(1)

    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 12 * BLOCK
    assert server.has_counted("tokens_loaded", 12 * BLOCK)
    assert server.has_counted("blocks_saved", 3 * 12)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    told, before = (each["choices"][0]["logprobs"]["token_logprobs"] for each in (again, first))
    assert told == pytest.approx(before, abs=5e-5)


def test_a_request_stays_out_when_its_body_says_so(server: Server) -> None:
    saved = server.counted("blocks_saved")

    server.complete(4, kv_transfer_params={"penstock": False})
    server.complete(5)

    assert server.has_counted("blocks_saved", saved + 12)


@pytest.mark.parametrize(
    "asked",
    [
        {"penstock": {"save": "false"}},
        {"penstock": {"save": 0}},
        {"penstock": None},
        {"penstock": {"Save": False}},
        {"Penstock": False},
    ],
)
def test_a_request_that_asks_wrongly_stays_out(server: Server, asked: Any) -> None:
    saved, refused = server.counted("blocks_saved"), server.counted("requests_refused")
    loaded = server.counted("tokens_loaded")

    answer = server.complete(6, kv_transfer_params=asked)

    assert answer["choices"][0]["text"]
    assert server.has_counted("requests_refused", refused + 1)
    assert server.counted("blocks_saved") == saved
    assert server.counted("tokens_loaded") == loaded


def test_sizes_are_those_of_now_while_the_server_is_idle_and_after_a_reset(
    server: Server,
) -> None:
    server.complete(7)
    held = server.comes_to_show("host_slots_ready", server.counted("blocks_saved"))
    bytes_a_block = server.counted("bytes_saved") / server.counted("blocks_saved")

    server.reset()

    assert held
    assert server.comes_to_show("host_slots_ready", 0)
    assert server.shown("host_slots") > 0
    assert server.counted("blocks_evicted") == 0
    assert server.shown("load_seconds_count") == 1
    assert server.shown("load_seconds_sum") > 0
    assert server.counted("bytes_loaded") == 12 * bytes_a_block
    assert server.counted("checksum_failures") == server.counted("timeouts") == 0
