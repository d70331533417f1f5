"""docs/vllm.md does what it says: its commands, with its files, on a machine as it is.

Nothing is set that the page does not set, but for where the model lies, ports that are free, and
that vLLM reports nothing home. Servers on a processor without bfloat16 get the option that the page
names for it; those that hand prompts over compile nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import END_S, ENGINE_S, ends, kill_session, run_to_the_end, session_of

from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
SECTION = re.compile(r"^## Ten minutes to a hit$(?P<text>.*?)^## ", re.S | re.M)
PAIR = re.compile(r"^## Prefill and decode$(?P<text>.*?)^## ", re.S | re.M)
PORTS = ("8000", "8100", "8200")
"""Of the router, the prefill server and the decode server."""
READY = "Application startup complete"
START_S = 2 * ENGINE_S
"""Two servers start at once."""
UP = "up: 1 of 1 prefill server, 1 of 1 decode server"
BLOCK = re.compile(r"^```(?P<fence>\w+)(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.S | re.M)
FILE = re.compile(r"file=(?P<name>\S+)")
ELSEWHERE = ("pip install", "vllm serve")
"""The environment has been built, and `test_serving.py` starts the server."""
OPTION = "        enforce_eager=True,\n"


def needs_float32() -> bool:
    """Whether vLLM's CPU build cannot compute with bfloat16 here; the page says what to do then."""
    features = Path("/proc/cpuinfo").read_text()
    return platform.machine() == "aarch64" and " bf16" not in features


def decode_needs_float32() -> bool:
    """Whether a server that computes no prompts dies there of an illegal instruction."""
    return needs_float32() or "amx_tile" in Path("/proc/cpuinfo").read_text()


def as_on_the_page() -> dict[str, str]:
    """The environment of the commands."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_NO_USAGE_STATS": "1",
    }


def test_the_page_leads_to_a_hit_after_eviction(
    tmp_path: Path, model: Callable[[str], Path]
) -> None:
    (section,) = SECTION.finditer(PAGE.read_text())
    environment = as_on_the_page()
    commands, printed, promised = [], "", ""
    for block in BLOCK.finditer(section["text"]):
        if file := FILE.search(block["words"]):
            text = block["text"]
            if needs_float32():
                text = text.replace(OPTION, f'{OPTION}        dtype="float32",\n')
            (tmp_path / file["name"]).write_text(text)
        elif block["fence"] in {"console", "sh"}:
            commands += re.findall(r"^\$ (.*)$", block["text"], re.M)
        elif block["fence"] == "text" and not block["text"].startswith("$ "):
            promised += block["text"]

    for command in commands:
        if not command.startswith(ELSEWHERE):
            typed = command.replace("path/to/a/model", str(model("llama")))
            shell = ["bash", "-c", f"cd {tmp_path} && {typed}"]
            status, printed = run_to_the_end(shell, environment)
            assert status == 0, printed[-4000:]

    assert len(commands) == 4
    assert promised == "cached 480 tokens, 480 of them from host memory\n"
    assert promised in printed, printed[-4000:]


class Running:
    """A command of the page that goes on until it is ended."""

    def __init__(self, command: str, folder: Path, *, ready: str) -> None:
        """Starts it; `ready` is in the line that says that it is."""
        self._process = subprocess.Popen(
            ["bash", "-c", f"cd {folder} && exec {command}"],
            # What torch compiles for a model takes minutes of a small machine.
            env={**as_on_the_page(), "TORCH_COMPILE_DISABLE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Whatever it starts is in its session.
            start_new_session=True,
        )
        self._printed: list[str] = []
        self._is_ready = threading.Event()
        # It goes on talking, and somebody must listen.
        self._listening = threading.Thread(target=self._listen, args=(ready,))
        self._listening.start()

    def _listen(self, ready: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.append(line)
            if ready in line:
                self._is_ready.set()
        # It has ended: nobody need wait for it.
        self._is_ready.set()

    @property
    def printed(self) -> str:
        """The last of what it has said."""
        return "".join(self._printed)[-6000:]

    def wait_ready(self) -> None:
        is_ready = self._is_ready.wait(START_S)
        assert is_ready, self.printed
        assert self._process.poll() is None, self.printed

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(END_S)
        assert all(ends(pid) for pid in session_of(self._process.pid))

    def kill(self) -> None:
        """Leaves nothing behind, however it has ended."""
        kill_session(self._process.pid)
        self._listening.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(END_S)


def test_the_commands_for_prefill_and_decode_start_both_and_hand_a_prompt_over(
    tmp_path: Path, model: Callable[[str], Path]
) -> None:
    page = PAGE.read_text()
    (section,) = PAIR.finditer(page)
    (settings,) = [each for each in BLOCK.finditer(page) if "file=penstock.toml" in each["words"]]
    (tmp_path / "penstock.toml").write_text(settings["text"])
    commands = [
        command
        for block in BLOCK.finditer(section["text"])
        if block["fence"] in {"console", "sh"}
        for command in re.findall(r"^\$ (.*)$", block["text"], re.M)
    ]
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    typed = [command.replace("MODEL", str(model("seeing"))) for command in commands]
    for printed, free in ports.items():
        typed = [re.sub(rf"\b{printed}\b", str(free), command) for command in typed]
    if decode_needs_float32():
        typed = [re.sub(r"^vllm serve", "vllm serve --dtype float32", each) for each in typed]
    *prepare, prefill, decode, router = typed

    for command in prepare:
        shell = ["bash", "-c", f"cd {tmp_path} && {command}"]
        status, said = run_to_the_end(shell, as_on_the_page())
        assert status == 0, said[-4000:]
    with ExitStack() as left:
        servers = [Running(command, tmp_path, ready=READY) for command in (prefill, decode)]
        for server in servers:
            left.callback(server.kill)
        for server in servers:
            server.wait_ready()
        routing = Running(router, tmp_path, ready=UP)
        left.callback(routing.kill)
        routing.wait_ready()
        # On a starved machine a rank may be silent for too long: then decode computes the prompt.
        for attempt in range(ATTEMPTS):
            answer = complete(ports["8000"], PROMPT[attempt:])
            ended = ended_handoffs(ports["8200"], attempt + 1)
            if ended["prompts_received"]:
                break
        said = "".join(each.printed for each in (routing, *servers))
        for each in (routing, *servers):
            each.end()

    assert len(prepare) == 2
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) - attempt
    assert ended == {"prompts_received": 1, "prompts_not_received": attempt}, said


PROMPT = [10 + (7 * each) % 1000 for each in range(300)]
"""More than two blocks of vLLM on CPUs, which have 128 tokens."""
ATTEMPTS = 5
"""A pair that hands none of so many prompts over does not do what the page says."""


def complete(port: int, prompt: list[int]) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ENGINE_S) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def ended_handoffs(port: int, count: int) -> dict[str, float]:
    """How handoffs have ended, when so many have: the page shows it a moment after the answer."""
    deadline = time.monotonic() + END_S
    while True:
        found = {name: counted(port, name) for name in ("prompts_received", "prompts_not_received")}
        if sum(found.values()) >= count or time.monotonic() > deadline:
            return found


def counted(port: int, name: str) -> float:
    """A number of the connector's on the page of a server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ENGINE_S) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"vllm:penstock_{name}_total{{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)
