"""docs/vllm.md does what it says, with the blocks that need vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.bench.vllm_engine import worker_cores

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm.md"
FILE = re.compile(r"^```\w+(?: vllm)? file=(?P<name>\S+)\n(?P<text>.*?)^```$", re.S | re.M)


def test_the_page_leads_to_a_hit_after_eviction(
    tmp_path: Path, model: Callable[[str], Path]
) -> None:
    for block in FILE.finditer(PAGE.read_text()):
        (tmp_path / block["name"]).write_text(block["text"])
    penstock = Path(sys.executable).with_name("penstock")
    command = [str(penstock), "vllm-config", "penstock.toml", "--bare"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / "transfer.json").write_text(told.stdout)
    environment = {
        **os.environ,
        "MODEL": str(model("llama")),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": worker_cores(),
    }

    done = subprocess.run(
        [sys.executable, "hit.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
        check=False,
    )

    assert "cached 480 tokens, 480 of them from host memory" in done.stdout, done.stdout[-4000:]
