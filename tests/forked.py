"""Processes for tests, forked from one that has imported everything: a start takes milliseconds.

    process = Forked("tests.store.saving_process", [folder, "1"], stdout=write_end)
    process.kill()
    process.wait(10.0)

`python -m tests.forked SOCKET MODULE…` imports the modules and forks on request; each module has a
`main(arguments)` that returns the exit status. It ends, and kills what it has forked, with the
process that started it.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "tests.store.saving_process",
    "tests.store.saving_client",
    "tests.store.memory_tier",
    "penstock.store.__main__",
)
MESSAGE_BYTES = 1 << 16


class Forked:
    """A process that runs `main(arguments)` of one of `MODULES`."""

    def __init__(self, module: str, arguments: list[str], *, stdout: int = 1) -> None:
        channel = _server()
        request = json.dumps({"module": module, "arguments": arguments}).encode()
        socket.send_fds(channel, [request], [stdout])
        self.pid: int = json.loads(channel.recv(MESSAGE_BYTES))
        self._pidfd = os.pidfd_open(self.pid)
        self._status: int | None = None

    def poll(self) -> int | None:
        """As that of `subprocess.Popen`."""
        if self._status is None and select.select([self._pidfd], [], [], 0.0)[0]:
            channel = _server()
            channel.send(json.dumps({"wait": self.pid}).encode())
            self._status = json.loads(channel.recv(MESSAGE_BYTES))
            os.close(self._pidfd)
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Waits for its end, and returns the status; negative: the signal that killed it."""
        if self._status is None and not select.select([self._pidfd], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *MODULES],
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait(600.0)

    atexit.register(end)
    return ours


def serve(channel: socket.socket) -> None:
    """Forks and waits for what it has forked, as it is told."""
    children: set[int] = set()
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if not request:
            break
        said = json.loads(request)
        if "wait" in said:
            _, status = os.waitpid(said["wait"], 0)
            children.discard(said["wait"])
            answer = os.waitstatus_to_exitcode(status)
        else:
            [stdout] = descriptors
            answer = os.fork()
            if not answer:
                channel.close()
                _run(said["module"], said["arguments"], stdout)
            children.add(answer)
            os.close(stdout)
        channel.send(json.dumps(answer).encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _run(module: str, arguments: list[str], stdout: int) -> None:
    status = 1
    try:
        os.dup2(stdout, 1)
        if stdout != 1:
            os.close(stdout)
        status = importlib.import_module(module).main(arguments) or 0
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        importlib.import_module(each)
    serve(socket.socket(fileno=int(sys.argv[1])))
