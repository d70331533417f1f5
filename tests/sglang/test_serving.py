"""SGLang as docs/sglang.md starts it: its commands, over HTTP and in Python, and its metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import ENGINE_S, kill_session, run_to_the_end

from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.sglang

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sglang.md"
FILE = re.compile(r"^```\w+ (?:sglang )?file=(?P<name>\S+)\n(?P<text>.*?)^```$", re.S | re.M)
COMMAND = re.compile(r"^\$ (?P<command>.*)$", re.M)
BIN = Path(sys.executable).parent
TOKENS = 500
# What SGLang needs beside the page on a machine without a GPU, for a model without a tokenizer.
HERE = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page has written by its first commands."""
    made = tmp_path_factory.mktemp("page")
    for block in FILE.finditer(PAGE.read_text()):
        (made / block["name"]).write_text(block["text"])
    for command in commands("penstock sglang-config"):
        subprocess.run(command, shell=True, cwd=made, env=ENVIRONMENT, check=True)
    return made


def commands(word: str) -> list[str]:
    found = [each for each in COMMAND.findall(PAGE.read_text()) if word in each]
    assert found, word
    return found


def test_every_command_of_the_page_is_run_here() -> None:
    elsewhere = ("pip install",)
    known = ("penstock sglang-config", "sglang.launch_server", "python hit.py", *elsewhere)

    assert all(any(word in each for word in known) for each in COMMAND.findall(PAGE.read_text()))


def test_the_script_of_the_page_prints_what_the_page_says(folder: Path, model: Path) -> None:
    [command] = commands("python hit.py")
    typed = command.replace("path/to/a/model", str(model))

    status, printed = run_to_the_end(
        ["sh", "-c", f"cd {folder} && {typed}"], {**ENVIRONMENT, "OPTIONS": json.dumps(HERE)}
    )

    assert status == 0, printed[-6000:]
    [said] = [line for line in PAGE.read_text().splitlines() if line.startswith("cached {")]
    assert said in printed.splitlines()


@pytest.fixture(scope="module")
def server(folder: Path, model: Path) -> Iterator[str]:
    [command] = [each for each in commands("sglang.launch_server") if "hicache" not in each]
    [port] = free_ports(1)
    options = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in HERE.items()
    )
    with (folder / "printed").open("w") as printing:
        process = subprocess.Popen(
            f"exec {command.replace('MODEL', str(model))} {options} --max-total-tokens 1024 "
            f"--skip-tokenizer-init --port {port}",
            shell=True,
            cwd=folder,
            env=ENVIRONMENT,
            stdout=printing,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + ENGINE_S
        while not answers(f"{address}/health"):
            printed = (folder / "printed").read_text()
            assert process.poll() is None, printed[-6000:]
            assert time.monotonic() < deadline, printed[-6000:]
            time.sleep(0.2)
        yield address
    finally:
        kill_session(process.pid)
        process.wait(ENGINE_S)


def answers(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=ENGINE_S) as answer:
        return bool(answer.status == 200)
    return False


def ask(server: str, first: int) -> dict[str, Any]:
    tokens = [10 + (first * 7 + 13 * each) % 2000 for each in range(TOKENS)]
    asked = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    request = urllib.request.Request(
        f"{server}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ENGINE_S) as answer:
        found: dict[str, Any] = json.load(answer)["meta_info"]
    return found


def shown(server: str, name: str) -> float:
    """A number of Penstock's on the page that SGLang serves."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=ENGINE_S) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"sglang:penstock_{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_the_server_of_the_page_has_hits_and_shows_them(server: str) -> None:
    cold = [ask(server, first)["cached_tokens"] for first in (1, 200, 400)]
    again = ask(server, 1)

    assert cold == [0, 0, 0]
    assert again["cached_tokens_details"] == {"device": 0, "host": 448}
    deadline = time.monotonic() + ENGINE_S
    # SGLang's processes write what they count at most once a second.
    while shown(server, "tokens_loaded_total") < 448:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert shown(server, "tokens_loaded_total") == 448
    assert shown(server, "host_slots") > 0
    assert shown(server, "load_seconds_count") == 1
