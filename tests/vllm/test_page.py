"""docs/vllm.md does what it says: its commands, with its files, on a machine as it is.

Nothing is set that the page does not set, but for where the model lies and that vLLM reports
nothing home.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import run_to_the_end

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
SECTION = re.compile(r"^## Ten minutes to a hit$(?P<text>.*?)^## ", re.S | re.M)
BLOCK = re.compile(r"^```(?P<fence>\w+)(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.S | re.M)
FILE = re.compile(r"file=(?P<name>\S+)")
ELSEWHERE = ("pip install", "vllm serve")
"""The environment has been built, and `test_serving.py` starts the server."""
OPTION = "        enforce_eager=True,\n"


def needs_float32() -> bool:
    """Whether vLLM's CPU build cannot compute with bfloat16 here; the page says what to do then."""
    features = Path("/proc/cpuinfo").read_text()
    return platform.machine() == "aarch64" and " bf16" not in features


def test_the_page_leads_to_a_hit_after_eviction(
    tmp_path: Path, model: Callable[[str], Path]
) -> None:
    (section,) = SECTION.finditer(PAGE.read_text())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VLLM_NO_USAGE_STATS": "1",
    }
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
