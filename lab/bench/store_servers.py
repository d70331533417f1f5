"""Redis, Mooncake Store and LMCache's server on loopback, for benchmarks; they end with the block.

The one rule: every wait has an end, and no process is left behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lab.bench.vllm_child import free_port
from lab.bench.vllm_engine import KILLED_S, START_S
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

RETRY_S = 0.1
"""A server that does not listen yet is asked again after this."""
ANSWER_S = 30.0
"""A server on loopback that took longer to say how much it holds is stuck, however busy the cores
are."""
LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
args = ("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]) << 20, 16 << 20, "tcp", "", sys.argv[1])
if store.setup(*args):
    sys.exit("the master refused the memory")
sys.stdin.read()
"""
_COUNT = re.compile(r"^master_key_count (\d+)", re.MULTILINE)
_CAPACITY = re.compile(r"^master_total_capacity_bytes (\d+)", re.MULTILINE)


class StoreServers:
    """The servers of one side of a benchmark."""

    def __init__(self, folder: Path, python: Path) -> None:
        """Starts nothing yet.

        Args:
            folder: For what servers write and say.
            python: Of an environment with the packages of Mooncake and LMCache.
        """
        self._folder = folder
        self._log = folder / "servers.log"
        self._python = python
        self._stack = ExitStack()

    def __enter__(self) -> StoreServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start_redis(self) -> int:
        """Starts a Redis that keeps everything in memory; its port.

        Raises:
            UnavailableError: it does not start.
        """
        if shutil.which("redis-server") is None:
            raise UnavailableError("redis-server is not installed: apt-get install redis-server")
        port = free_port()
        words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        self._start("redis-server", [*words, "--dir", str(self._folder)], port)
        return port

    def start_mooncake(self, lent_mib: int) -> tuple[str, int]:
        """Starts a master, and a process that lends it memory; its address, and its metrics' port.

        Raises:
            UnavailableError: they do not start.
        """
        find = "import mooncake, os; print(os.path.dirname(mooncake.__file__))"
        package = self._output([str(self._python), "-c", find])
        port, metrics = free_port(), free_port()
        words = [f"{package}/mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
        master = [*words, "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
        self._start("mooncake_master", master, port)
        address = f"127.0.0.1:{port}"
        lender = self._spawn([str(self._python), "-c", LENDER, address, str(lent_mib)])
        deadline = time.monotonic() + START_S
        while not _number(_CAPACITY, metrics):
            self._require_running(lender, deadline, "the process that lends memory to Mooncake")
        return address, metrics

    def start_lmcache(self, redis_port: int | None, memory_gib: float, *, chunk_tokens: int) -> int:
        """Starts LMCache's server, over a Redis if there is one; its port.

        Raises:
            UnavailableError: it does not start.
        """
        port, http_port = free_port(), free_port()
        program = "import sys; from lmcache.cli.main import main; sys.exit(main())"
        words = ["server", "--host", "127.0.0.1", "--port", str(port)]
        words += ["--http-port", str(http_port), "--l1-size-gb", f"{memory_gib:g}"]
        words += ["--eviction-policy", "LRU", "--chunk-size", str(chunk_tokens)]
        # Copies go through the engine's own process: there is no GPU whose memory could be opened.
        words += ["--supported-transfer-mode", "engine_driven", "--max-workers", "2"]
        words += ["--disable-observability"]
        if redis_port is not None:
            store = {"type": "resp", "host": "127.0.0.1", "port": redis_port}
            words += ["--l2-adapter", json.dumps(store)]
        self._start("LMCache's server", [str(self._python), "-c", program, *words], port)
        return port

    def _start(self, name: str, words: Sequence[str], port: int) -> None:
        """Starts a server, and waits until it listens."""
        process = self._spawn(words)
        deadline = time.monotonic() + START_S
        while not _listens(port):
            self._require_running(process, deadline, name)

    def _require_running(
        self, process: subprocess.Popen[bytes], deadline: float, name: str
    ) -> None:
        """Waits a moment for a server that ends.

        Raises:
            UnavailableError: it ended, or the time is over.
        """
        try:
            status = process.wait(RETRY_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise UnavailableError(f"{name} did not start in {START_S:g} s") from None
        else:
            said = self._log.read_text(errors="replace").strip().splitlines()
            errors = [line for line in said if "Error" in line] or said or [""]
            raise UnavailableError(f"{name} ended with status {status}: {errors[-1][:200]}")

    def _spawn(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
            )
        self._stack.callback(_end, process)
        return process

    def _output(self, words: Sequence[str]) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_S, check=False)
        if done.returncode:
            raise UnavailableError(f"{words[0]}: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout.strip()


def values_in_redis(port: int) -> int:
    """How many values a Redis holds."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        connection.sendall(b"DBSIZE\r\n")
        with connection.makefile("rb") as answer:
            return int(answer.readline().removeprefix(b":"))


def values_in_mooncake(metrics_port: int) -> int:
    """How many values a Mooncake Store holds, by its master."""
    return _number(_COUNT, metrics_port)


def _number(pattern: re.Pattern[str], metrics_port: int) -> int:
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as page:
            found = pattern.search(page.read().decode())
    except OSError:
        return 0  # Its web server comes after the other one.
    return int(found[1]) if found else 0


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(KILLED_S)
    if process.stdin is not None:
        process.stdin.close()
