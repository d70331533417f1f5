"""A small model with a tokenizer, and real servers on free ports of the loopback interface."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

READY_S = 900.0
SOON_S = 900.0
"""Longer than anything takes that works: a busy machine is no failure."""
ENDLESS_TOKENS = 16_000
"""An answer of so many takes a minute; those of the other model end after a second."""
ENDLESS = ("--blocks", "4200", "--block-tokens", "8", "--host-gib", "0.01")
"""Options of a server with room for two of them."""
STATE = tempfile.TemporaryDirectory(prefix="penstock-state-")
"""Where roles keep the secret of their user: not that of whoever runs the tests."""
ONE_EACH = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: an idle one may be closed by the server as it is used again."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role is ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and their most common pairs, learnt from the package's own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(Path(penstock.__file__).parent / "errors.py")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE
    return fast


def make_checkpoint(folder: Path, *, positions: int = 512) -> None:
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=74,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 1.0 if "lm_head" in name or "embed" in name else 0.15)
        # So that answers end when their tokens are up, and seldom before.
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Running:
    """A `penstock serve` process."""

    def __init__(self, process: subprocess.Popen[str], address: str, ready_line: str = "") -> None:
        self.process = process
        self.address = address
        self.ready_line = ready_line
        self.client = httpx.Client(base_url=address, timeout=SOON_S, limits=ONE_EACH)

    def complete(self, prompt: str | list[int], **wishes: Any) -> Any:
        wishes = {"temperature": 0, "max_tokens": 8, **wishes}
        answer = self.client.post("/v1/completions", json={"prompt": prompt, **wishes})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def cache(self) -> Any:
        """What its only instance says; one that stands still for 10 s is left out of an answer."""
        said: list[Any] = []

        def ask() -> int:
            said[:] = self.client.get("/cache").json().get("instances", [])
            return len(said)

        eventually(ask, 1)
        return said[0]

    def children(self) -> dict[str, int]:
        """The processes behind it, by the end of their name: `instance-0`, `rank-1`, …"""
        found: dict[str, int] = {}
        for pid in descendants(self.process.pid):
            line = command(pid)
            if "penstock_serve.engine.instance" in line:
                found["instance"] = pid
            elif "penstock_serve.engine.rank_process" in line:
                rank = line.rpartition("-rank-")[2].partition(".")[0]
                found[f"rank-{rank}"] = pid
        return found


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    try:
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []
    for child in children:
        found += [child, *descendants(child)]
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def pids_of(instance: str, running: Running) -> list[int]:
    """The processes of an instance: its scheduler, its ranks."""
    given = re.compile(rf"\0{instance}(-rank-\d+)?\.spec\0")
    return [pid for pid in descendants(running.process.pid) if given.search(command(pid))]


def kill_all(pids: Iterable[int]) -> None:
    """Kills processes; those that end with one of the others may be gone before their turn."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def serve_command(*options: str) -> Iterator[subprocess.Popen[str]]:
    """A `penstock serve` of its own, gone at the end of the `with`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.entry", "serve", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": STATE.name},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=SOON_S)
        finally:
            process.kill()
            process.wait(timeout=SOON_S)
            assert process.stdout is not None
            process.stdout.close()


@contextmanager
def serving(folder: Path, *options: str, wait: bool = True) -> Iterator[Running]:
    with serve_command("--model", str(folder), "--port", "0", *options) as process:
        line = _ready_line(process) if wait else " at http://127.0.0.1:1/v1"
        running = Running(process, line.partition(" at ")[2].split("/v1")[0], line)
        try:
            yield running
        finally:
            running.client.close()


def _ready_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    assert poll.poll(READY_S * 1000), "the server did not say that it is ready"
    line = process.stdout.readline()
    assert line.startswith("penstock: ready: "), line
    return line


def eventually(ask: Any, wanted: Any, *, within_s: float = SOON_S) -> None:
    """Asks until the answer is the wanted one: the server has no event for it."""
    deadline = time.monotonic() + within_s
    while (found := ask()) != wanted:
        assert time.monotonic() < deadline, f"{found!r} is not {wanted!r}"
        select.select([], [], [], 0.05)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "small-model"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def endless_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for answers that are under way however late a test looks at them."""
    folder = tmp_path_factory.mktemp("endless") / "small-model"
    make_checkpoint(folder, positions=ENDLESS_TOKENS + 384)
    return folder


@pytest.fixture
def always_load(tmp_path: Path) -> tuple[str, str]:
    return always_load_options(tmp_path)


def always_load_options(folder: Path) -> tuple[str, str]:
    """Options of a server that never measures whether computing a prompt would be quicker."""
    file = folder / "always-load.toml"
    cache = 'cache = { blocks = 64, load_gate = "off" }'
    file.write_text(f'version = 1\nmodel.name = "small-model"\n{cache}\n', encoding="utf-8")
    return "--config", str(file)


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Running]:
    """One server for all tests that leave it as they found it."""
    options = ("--blocks", "64", "--block-tokens", "8", "--host-gib", "0.01")
    with serving(model_folder, *options) as running:
        yield running
