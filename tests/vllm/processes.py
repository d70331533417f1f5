"""Engines in processes of their own: every wait has a timeout, and no process is left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ENGINE_S = 480
"""An engine that is not done by then hangs."""
SCRIPT = Path(__file__).with_name("fork_server.py")
END_S = 120
"""What an engine has started and has not ended by then stays."""


def run_to_the_end(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Runs a command with all that it starts: nothing of it is left behind."""
    engine = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Whatever the engine starts is in its session.
        start_new_session=True,
    )
    try:
        printed, _ = engine.communicate(timeout=ENGINE_S)
        left = [pid for pid in session_of(engine.pid) if not ends(pid)]
        assert not left, printed[-6000:]
    finally:
        kill_session(engine.pid)
    return engine.returncode, printed


class ForkServer:
    """Runs jobs in forks of a process that has imported an engine, see `fork_server.py`."""

    def __init__(self, folder: Path, environment: dict[str, str], script: Path = SCRIPT) -> None:
        """Starts the server.

        Args:
            folder: For what jobs print.
            environment: That of the server; its forks get their own.
            script: The server.
        """
        self._output = folder / "printed"
        self._server = subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **environment,
                "LD_PRELOAD": _preloaded(),
                # NumPy's and SciPy's BLAS would otherwise start threads when they are imported.
                "OPENBLAS_NUM_THREADS": "1",
                # vLLM compiles one function, which counts the rank of a log-probability, in every
                # engine, also where it computes eagerly.
                "TORCH_COMPILE_DISABLE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # `select` does not see what a buffer holds.
            bufsize=0,
        )

    def run(self, call: str, arguments: list[Any], environment: dict[str, str]) -> tuple[int, str]:
        """Runs a job with all that it starts: nothing of it is left behind."""
        assert self._server.stdin is not None
        self._output.write_text("")
        job = {"call": call, "arguments": arguments, "environment": environment}
        line = json.dumps({**job, "output": str(self._output)})
        deadline = time.monotonic() + ENGINE_S
        self._server.stdin.write(f"{line}\n".encode())
        self._server.stdin.flush()
        pid = self._answer(deadline)
        status = None
        try:
            status = self._answer(deadline)
            left = [each for each in session_of(pid) if not ends(each)]
            printed = self._output.read_text(errors="replace")
            assert not left, printed[-6000:]
        finally:
            kill_session(pid)
            if status is None:
                # Of a job that was killed, so that the next job does not read it as its own.
                self._answer(time.monotonic() + END_S)
        return status, printed

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(END_S)
        self._server.stdout.close()

    def _answer(self, deadline: float) -> int:
        assert self._server.stdout is not None
        # A line is written in one go, so that there is a whole one or none.
        left_s = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([self._server.stdout], [], [], left_s)
        assert ready, self._output.read_text(errors="replace")[-6000:]
        return int(self._server.stdout.readline())


def _preloaded() -> str:
    """What vLLM has loaded into processes that it spawns: the OpenMP library of torch."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    package = Path(str(torch.origin)).parent
    found = [*package.parent.glob("torch.libs/libgomp*.so*"), *package.glob("lib/libgomp*.so*")]
    return str(found[0]) if found else ""


def session_of(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            _, _, rest = (folder / "stat").read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # After the name: state, parent, group, session. A zombie has ended.
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def kill_session(leader: int) -> None:
    """Kills what is left of a session; some of it may end before its turn."""
    for pid in session_of(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ends(pid: int) -> bool:
    """Whether a process ends by itself."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watched], [], [], END_S)
    os.close(watched)
    return bool(ended)
