"""The engine's end of the second process: a side that gives orders and waits for answers.

The one rule: every wait has a deadline, and a process that does not answer is ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from lab.bench.interference.second_process import (
    ANSWERS,
    Begin,
    End,
    Moved,
    Ready,
    Running,
)
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

_START_S = 120.0
"""It imports torch, pins host memory and compiles kernels."""
_ANSWER_S = 60.0
_CLOSE_S = 10.0
_AnswerT = TypeVar("_AnswerT", Ready, Running, Moved)
MODULE = "lab.bench.interference.second_process"


class SecondProcess:
    """A running process that drives copies; ended by leaving the `with` block."""

    def __init__(self, arguments: Sequence[str], *, module: str = MODULE) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        self._received = b""

    def wait_until_ready(self) -> None:
        """Waits until it has opened the pool.

        Raises:
            UnavailableError: it cannot; the message has its last words.
        """
        self._expect(Ready, _START_S)

    def begin(self, work: Literal["save", "load", "both"]) -> None:
        """Has it start to copy."""
        self._send(Begin(work))
        self._expect(Running, _ANSWER_S)

    def end(self, began: float, ended: float) -> int:
        """Has it stop; returns the bytes that ended between two times."""
        self._send(End(began=began, ended=ended))
        return self._expect(Moved, _ANSWER_S).moved_bytes

    def close(self) -> None:
        """Ends it, by force where it does not end by itself. Repeating it is harmless."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_S)
        self._answers.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, order: Begin | End) -> None:
        try:
            self._orders.write(msgspec.json.encode(order) + b"\n")
        except BrokenPipeError as problem:
            raise UnavailableError(
                f"the second process takes no more orders{self._last_words()}"
            ) from problem

    def _expect(self, kind: type[_AnswerT], timeout_s: float) -> _AnswerT:
        line = self._line(timeout_s)
        try:
            answer = ANSWERS.decode(line)
        except msgspec.MsgspecError as problem:
            raise UnavailableError(f"the second process answered {line[:80]!r}") from problem
        if not isinstance(answer, kind):
            raise UnavailableError(f"the second process answered {answer}, not {kind.__name__}")
        return answer

    def _line(self, timeout_s: float) -> bytes:
        poller = select.poll()
        poller.register(self._answers, select.POLLIN)
        give_up = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or not poller.poll(left_s * 1000):
                raise UnavailableError(f"the second process did not answer in {timeout_s:g} s")
            part = os.read(self._answers.fileno(), 1 << 16)
            if not part:
                raise UnavailableError(f"the second process died{self._last_words()}")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""


class InSecondProcess:
    """A side: one kind of work, driven by the second process."""

    def __init__(self, process: SecondProcess, work: Literal["save", "load", "both"]) -> None:
        self._process = process
        self._work = work

    def begin(self) -> None:
        """Has the process start."""
        self._process.begin(self._work)

    def at_boundary(self) -> None:
        """The engine's thread does nothing."""

    def end(self, began: float, ended: float) -> int:
        """Has the process stop, and verify."""
        return self._process.end(began, ended)
