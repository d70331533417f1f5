"""A vLLM engine in a process of its own, as `lab bench vllm` speaks to it.

The one rule: every wait has an end. An engine that says nothing is ended, and the benchmark
says so.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lab.bench.vllm_first_token import FirstToken, StepCounts
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lab.bench.vllm_workload import Workload

START_S = 300.0
"""vLLM takes 20 to 60 s to start; twice as long again where cores are shared."""
ROUND_S = 300.0
KILLED_S = 30.0
"""The kernel takes down a killed process group in less."""
LINES_KEPT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingCost:
    """CPU seconds of one round in which requests were recorded."""

    calls_s: float
    """Of the scheduler's thread, in the calls that record."""
    thread_s: float
    """Of the scheduler's thread, in all."""
    writer_s: float
    """Of the thread that names blocks and writes, which shares the interpreter with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What one side did in one round."""

    first_tokens: list[FirstToken]
    tokens_per_s: float
    hit_rate: float
    scheduler_s: float
    """CPU time of the scheduler's thread a step."""
    worker_s: float
    """CPU time of a worker's thread a step, all of it: on a CPU the model is computed there."""
    connector_s: float
    """That part of it which the connector takes."""
    steps: int
    empty_steps: int
    """Steps that computed nothing: they took copies or reports on."""
    answers: list[list[int]]
    recording: RecordingCost | None = None
    """What recording cost; nothing, where nothing is recorded."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within it, a request to end this process unwinds it: what it has started ends with it."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def worker_cores() -> str:
    """The cores that compute the model: all but one, which the scheduler has.

    Left to itself, vLLM keeps one core more free as soon as there is any connector. On two cores
    none would be left, and sides with a connector would run on other cores than the one without.
    """
    cores = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cores[1:] or cores))


class EngineProcess:
    """One side's engine."""

    def __init__(
        self,
        side: str,
        python: Path,
        reported: dict[str, Any],
        *,
        module: str = "lab.bench.vllm_child",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.side = side
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": worker_cores(),
            **(variables or {}),
        }
        self._process = subprocess.Popen(
            [str(python), "-m", module, json.dumps({"side": side, **reported})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            # A group of its own, so that vLLM's processes end with it.
            start_new_session=True,
        )
        self._unread = b""
        self._said: deque[str] = deque(maxlen=LINES_KEPT)

    def wait_ready(self, seconds: float = START_S) -> None:
        """Waits until the engine has started.

        Raises:
            UnavailableError: it ended, or took too long.
        """
        self._line("ready", seconds)

    def run_round(self, seed: int, workload: Workload) -> RoundResult:
        """One round of a workload.

        Raises:
            UnavailableError: the engine ended, or took too long.
        """
        reported = self.ask([seed, asdict(workload)])
        first_tokens = [
            FirstToken(**{**each, "counts": StepCounts(**each["counts"])})
            for each in reported.pop("first_tokens")
        ]
        recording = reported.pop("recording", None)
        return RoundResult(
            first_tokens=first_tokens,
            recording=RecordingCost(**recording) if recording else None,
            **reported,
        )

    def ask(self, words: object) -> Any:  # noqa: ANN401 - What the module says.
        """What the engine answers to a line.

        Raises:
            UnavailableError: it ended, or took too long.
        """
        self.send(words)
        return self.answer()

    def send(self, words: object) -> None:
        """Has the engine do something; `answer` follows.

        Raises `UnavailableError`: it ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(words)}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def answer(self) -> Any:  # noqa: ANN401 - What the module says.
        """What the engine answers to what it was sent.

        Raises `UnavailableError`: it ended, or took too long.
        """
        return json.loads(self._line("ROUND ", ROUND_S))

    def require_running(self, seconds: float) -> None:
        """Waits a while for an engine that ends.

        Raises:
            UnavailableError: it ended.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            raise self._failed("ended")

    def close(self) -> None:
        """Ends the engine and all its processes."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(KILLED_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, beginning: str, patience_s: float) -> str:
        """The rest of the next line that begins so."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + patience_s
        while True:
            while b"\n" in self._unread:
                raw, self._unread = self._unread.split(b"\n", 1)
                line = raw.decode("utf-8", "replace")
                if line.startswith(beginning):
                    return line.removeprefix(beginning)
                self._said.append(line)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise self._failed(f"said nothing for {patience_s:g} s")
            more = os.read(descriptor, 1 << 20)
            if not more:
                raise self._failed("ended")
            self._unread += more

    def _failed(self, how: str) -> UnavailableError:
        reported = "\n".join(self._said)
        return UnavailableError(
            f"the engine of side {self.side!r} {how}; its last lines:\n{reported}"
        )
