"""What is soaked: a model, Redis, and a server with all its processes, in small sizes.

Rooms are so small that blocks are evicted, reclaimed and brought back all the time: an hour here
has the traffic of days.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lab.bench.engine_model import EIGHT_B
from lab.bench.pair import Scale, write_model
from lab.bench.vllm_child import free_port
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOG = "server.log"
START_S = 300.0
END_S = 60.0
VOCABULARY = 256
"""Every token is a byte, so that a text says which tokens it has."""
SMALL = replace(
    EIGHT_B,
    layers=3,
    hidden=96,
    heads=6,
    kv_heads=3,
    head_dim=16,
    intermediate=192,
    vocabulary=VOCABULARY,
    positions=2048,
)
SILENCE_S = 6.0
"""Of a process that stands still: some of those that are stopped are taken for lost."""
CONFIG = """
version = 1
model.name = "soaked"
cache = {{ blocks = 160, block_tokens = 8, load_gate = "off" }}
serve = {{ silence_s = {silence} }}
tiers = [
    {{ name = "host", kind = "host", blocks = 256 }},
    {{ name = "disk", kind = "disk", path = "{folder}/disk", gib = 0.02, write = "write_through" }},
    {{ name = "redis", kind = "redis", url = "redis://127.0.0.1:{port}", gib = 0.1 }},
]
"""
MAXMEMORY = "24mb"
INSTANCES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_OF_INSTANCE = re.compile(r"\0([a-z]+-\d+)(-rank-\d+)?\.spec\0")


@dataclass(frozen=True, slots=True)
class Role:
    """A process of the server."""

    pid: int
    name: str
    """`prefill-0`, `decode-1-rank-0`, `store`, `supervisor`, …; the server itself is `server`."""
    instance: str
    """The instance that ends with it; empty: none does."""


class Redis:
    """A server that forgets what it has no room for, and all when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        self._process = subprocess.Popen(
            [
                *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                *("--dir", str(self._folder), "--maxmemory", MAXMEMORY),
                *("--maxmemory-policy", "allkeys-lru"),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"eady to accept connections" in line:
                return
        raise UnavailableError("redis-server did not start")

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class World:
    """All that runs, and the folder that it writes to."""

    def __init__(self, folder: Path, redis: Redis, process: subprocess.Popen[str]) -> None:
        self.folder = folder
        self.redis = redis
        self.server = process
        self.address = ""

    def processes(self) -> list[Role]:
        """Those of the server, itself included."""
        found = [Role(self.server.pid, "server", "")]
        instances: dict[int, str] = {}
        for pid, parent in _descendants(self.server.pid):
            line = _command(pid)
            named = _OF_INSTANCE.search(line)
            instance = named[1] if named else instances.get(parent, "")
            instances[pid] = instance
            if named:
                found.append(Role(pid, named[1] + (named[2] or ""), instance))
            elif "penstock.store" in line:
                found.append(Role(pid, "store", ""))
            elif line:
                found.append(Role(pid, "supervisor", instance))
        return found

    @property
    def disk(self) -> Path:
        return self.folder / "disk"


@contextmanager
def running(folder: Path) -> Iterator[World]:
    """Starts all of it; nothing of it is left at the end.

    Raises `UnavailableError`: Redis is not installed, or something does not start.
    """
    if shutil.which("redis-server") is None:
        raise UnavailableError("redis-server is not installed: apt-get install redis-server")
    write_model(folder / "model", Scale(SMALL, "float32", (), 0, 0.0), device="cpu")
    redis = Redis(folder)
    file = folder / "penstock.toml"
    file.write_text(CONFIG.format(folder=folder, port=redis.port, silence=SILENCE_S))
    with (folder / LOG).open("w") as log:
        try:
            redis.start()
            with _serving(folder, file, log.fileno()) as (process, address):
                world = World(folder, redis, process)
                world.address = address
                yield world
        finally:
            redis.kill()


@contextmanager
def _serving(folder: Path, file: Path, log: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [
        *(sys.executable, "-m", "penstock.cli.entry", "serve", "--config", str(file)),
        *("--model", str(folder / "model"), "--prefill", "2", "--decode", "2", "--port", "0"),
    ]
    state = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **state}
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        if " at http://" not in line:
            raise UnavailableError(f"the server did not start: see {folder / LOG}")
        yield process, "http://" + line.partition(" at http://")[2].split("/")[0]
    finally:
        for pid, _ in _descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _descendants(pid: int) -> list[tuple[int, int]]:
    """Processes below one, each with its parent, parents first."""
    found: list[tuple[int, int]] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # It has ended.
            for child in map(int, tasks.read_text().split()):
                found += [(child, pid), *_descendants(child)]
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
