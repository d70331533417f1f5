"""The vLLM servers of `lab bench vllm --handoff`: started, asked for their threads, killed.

The one rule: every wait has an end, and no process is left behind: a server leads a session, which
is killed as a whole.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from lab.bench.vllm_child import free_port
from lab.bench.vllm_engine import KILLED_S, LINES_KEPT, START_S
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lab.bench.vllm_model import HandoffModel

BLOCK_TOKENS = 128
"""vLLM's own choice on CPUs."""
BATCH_TOKENS = 2048
"""A longer prompt is computed in chunks of so many tokens."""
POOL_BYTES = 512 << 20
TOML = """
version = 1
model.name = "bench"
[[tiers]]
name = "host"
kind = "host"
gib = 0.25
"""
READY = "Application startup complete"
RETRY_S = 0.05
"""A server that refuses a connection is asked again after this."""
TITLES = {"VLLM::EngineCore": "scheduler", "VLLM::Worker": "worker"}
"""What a process of vLLM calls itself, and what its first thread is; the third serves HTTP."""
HTTP = "http"
OTHERS = "other threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server is started."""

    name: str
    core: int
    """Where its worker computes."""
    transfer: Mapping[str, Any] | None = None
    """`kv_transfer_config`."""
    environment: Mapping[str, str] = field(default_factory=dict)


def plain_settings(core: int) -> ServerSettings:
    """One instance that computes prompts and answers them."""
    return ServerSettings(name="plain", core=core)


def penstock_settings(role: str, core: int) -> ServerSettings:
    """A half of a pair with this connector."""
    return ServerSettings(
        name=f"penstock {role}",
        core=core,
        transfer={
            "kv_connector": "PenstockConnector",
            "kv_connector_module_path": "penstock.connectors.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            # In another version it would be off, and be measured as if it were on.
            "kv_connector_extra_config": {"config": TOML, "any_version": True},
        },
    )


def nixl_settings(role: str, core: int) -> ServerSettings:
    """A half of a pair with vLLM's NixlConnector; UCX chooses shared memory between the two."""
    return ServerSettings(
        name=f"nixl {role}",
        core=core,
        transfer={
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        },
        environment={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        },
    )


class VllmForks:
    """The process that has imported vLLM, see `vllm_fork`."""

    def __init__(self, python: Path, folder: Path) -> None:
        """Starts it.

        Args:
            python: Of an environment with vLLM.
            folder: For the model, and for the output of servers.
        """
        self._folder = folder
        self._model = folder / "model"
        self._numbers = count()
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "lab.bench.vllm_fork"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # `select` does not see what a buffer holds.
                bufsize=0,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "LD_PRELOAD": _openmp_of(python),
                    # A thread that starts on import would not survive a fork.
                    "OPENBLAS_NUM_THREADS": "1",
                    "TORCH_COMPILE_DISABLE": "1",
                },
            )

    def make_model(self, sizes: HandoffModel) -> None:
        """Writes the model that all servers have.

        Raises:
            UnavailableError: it could not be made.
        """
        job = {"call": "make_model", "folder": str(self._model), "sizes": asdict(sizes)}
        if self._ask(job):
            raise self._failed("could not make a model")
        self._tokens = sizes.positions

    def start(self, settings: ServerSettings, port: int | None = None) -> VllmServer:
        """Starts a server; it is not ready yet.

        Args:
            settings: How it is started.
            port: Where it listens, such as where one listened that has ended.
        """
        reserved = None
        if port is None:
            reserved = _reserve_port()
            port = int(reserved.getsockname()[1])
        # A pipe with a name: its end is the end of all processes that write to it.
        output = self._folder / f"output-{next(self._numbers)}"
        os.mkfifo(output)
        words = [
            *("--model", str(self._model), "--served-model-name", "bench"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", str(self._tokens), "--enforce-eager"),
            *("--block-size", str(BLOCK_TOKENS), "--max-num-batched-tokens", str(BATCH_TOKENS)),
            *("--kv-cache-memory-bytes", str(POOL_BYTES)),
        ]
        if settings.transfer is not None:
            words += ["--kv-transfer-config", json.dumps(settings.transfer)]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": str(settings.core), **settings.environment}
        # It reads before anybody writes: the server waits for that.
        server = VllmServer(settings.name, port, output, reserved)
        job = {"call": "serve", "words": words, "environment": environment, "output": str(output)}
        server.pid = self._ask(job)
        return server

    def close(self) -> None:
        """Ends the process and all servers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            # It kills the servers, also when this process is killed.
            self._process.wait(KILLED_S)
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_S
        try:
            self._process.stdin.write(f"{json.dumps(job)}\n".encode())
        except BrokenPipeError as error:
            raise self._failed("ended") from error
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                raise self._failed(f"said nothing for {START_S:g} s")
            line = self._process.stdout.readline().decode("utf-8", "replace")
            if not line:
                raise self._failed("ended")
            # vLLM logs to the same output.
            if line.startswith("FORKED "):
                return int(line.removeprefix("FORKED "))

    def _failed(self, how: str) -> UnavailableError:
        reported = self._errors.read_text(encoding="utf-8", errors="replace")[-2000:]
        return UnavailableError(f"the process that starts vLLM {how}; its last words:\n{reported}")


class VllmServer:
    """One server."""

    def __init__(
        self, name: str, port: int, output: Path, reserved: socket.socket | None = None
    ) -> None:
        """A server whose process is about to be started.

        Args:
            name: What messages call it.
            port: Where it listens.
            output: The pipe that it writes to.
            reserved: Keeps the port from others until the server listens.
        """
        self.name = name
        self.port = port
        self.pid = 0
        self._reserved = reserved
        self._said: deque[str] = deque(maxlen=LINES_KEPT)
        self._ready = Event()
        self._ended = Event()
        self._heard = False
        Thread(target=self._listen, args=[output], daemon=True).start()

    def wait_ready(self) -> None:
        """Waits until it answers.

        Raises:
            UnavailableError: it ended, or took too long.
        """
        deadline = time.monotonic() + START_S
        try:
            heard = self._ready.wait(START_S) and self._heard
            # It says that it is ready, and listens then: until it does, it refuses connections.
            while heard and not self._accepts():
                heard = time.monotonic() < deadline and not self._ended.wait(RETRY_S)
        finally:
            if self._reserved is not None:
                self._reserved.close()
        if not heard:
            reported = "\n".join(self._said)
            raise UnavailableError(
                f"server {self.name!r} did not start; its last lines:\n{reported}"
            )

    def _accepts(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=KILLED_S).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kills all its processes; a second call changes nothing."""
        for pid in session_of(self.pid):
            os.kill(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Stops all its processes: threads that poll while idle would slow other servers down."""
        for pid in session_of(self.pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Has it run again."""
        for pid in session_of(self.pid):
            os.kill(pid, signal.SIGCONT)

    def processes(self) -> dict[int, str]:
        """The id of each process, and what its first thread does."""
        found = {}
        for pid in session_of(self.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                title = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
                found[pid] = next((TITLES[key] for key in TITLES if title.startswith(key)), HTTP)
        return found

    def counted(self, name: str) -> float:
        """The sum of a metric on its page, 0 where it has none."""
        page = http.client.HTTPConnection("127.0.0.1", self.port, timeout=KILLED_S)
        try:
            page.request("GET", "/metrics")
            lines = page.getresponse().read().decode().splitlines()
        finally:
            page.close()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith((f"{name}{{", f"{name} "))
        )

    def thread_seconds(self) -> dict[str, float]:
        """CPU time of its threads so far, by what they do."""
        spent: dict[str, float] = defaultdict(float)
        for pid, role in self.processes().items():
            for task in Path(f"/proc/{pid}/task").glob("*/stat"):
                try:
                    _, _, rest = task.read_text().rpartition(")")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                # Fields 14 and 15 of the whole line: in user mode and in the kernel.
                seconds = sum(map(int, rest.split()[11:13])) / os.sysconf("SC_CLK_TCK")
                first = role == HTTP or task.parent.name == str(pid)
                spent[role if first else f"{role}, {OTHERS}"] += seconds
        return spent

    def _listen(self, output: Path) -> None:
        with output.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._said.append(line.rstrip())
                if READY in line:
                    self._heard = True
                    self._ready.set()
        # All its processes have ended.
        self._ended.set()
        self._ready.set()


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def _reserve_port() -> socket.socket:
    """A port that nobody else gets while the socket is open, but for a server that asks for it.

    Sockets may share a port, if both say so and only one of them listens; vLLM's says so.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _openmp_of(python: Path) -> str:
    """The OpenMP library of torch, which vLLM has loaded into processes that it spawns."""
    program = (
        "import importlib.util, pathlib; p = pathlib.Path(importlib.util.find_spec('torch').origin)"
        ".parent; f = [*p.parent.glob('torch.libs/libgomp*.so*'), *p.glob('lib/libgomp*.so*')]; "
        "print(f[0] if f else '')"
    )
    done = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, timeout=START_S, check=False
    )
    return done.stdout.strip()
