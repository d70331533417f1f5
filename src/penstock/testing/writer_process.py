"""A writer of remote writes that a test controls, in this process or in another.

    writer.connect(description)
    writer.post([(offset, length, seed)], notice)
    writer.observe(budget)

The bytes it writes are drawn from a seed, so that both sides know them. In a process of its own
it reads one JSON object a line from its standard input, and answers each with one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockError
from penstock.handoff.transports import Writer, transport_named
from penstock.testing.peer_process import PeerProcess
from penstock.transport.remote import Span, WriteDone
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.transport.remote import WriterLink

Where = tuple[int, int, int]
"""Offset, length and seed of the bytes to write."""
Observed = tuple[list[tuple[int, str]], int]
"""Which writes have ended, each with its cause if it failed, and how many bytes moved."""

UNLIMITED = 1 << 40
OBSERVATIONS_MAX = 10_000
PROGRAM = "from penstock.testing.writer_process import main; main()"


def drawn_bytes(length: int, seed: int) -> NDArray[np.uint8]:
    """Bytes that both sides of a test can draw."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


class SuiteWriter(ABC):
    """A writer that a test controls, step by step."""

    @abstractmethod
    def connect(self, description: bytes) -> None:
        """Begins to connect."""

    @abstractmethod
    def post(self, where: Sequence[Where], notice: bytes) -> int:
        """Posts a write."""

    @abstractmethod
    def observe(self, budget_bytes: int) -> Observed:
        """Moves some bytes."""

    def settle(self, wait_s: float) -> list[tuple[int, str]]:
        """Goes on until it has nothing to do; returns which writes have ended.

        Args:
            wait_s: how long to wait for writes that something else moves.
        """
        assert not wait_s, "a writer whose bytes something else moves has to wait for it"
        ended: list[tuple[int, str]] = []
        for _ in range(OBSERVATIONS_MAX):
            ends, spent = self.observe(UNLIMITED)
            ended += ends
            if not spent and not ends:
                return ended
        raise AssertionError("the writer does not come to an end")

    @abstractmethod
    def stop(self) -> None:
        """Stops it wherever it is, until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Lets it go on."""

    @abstractmethod
    def end(self) -> None:
        """Ends it for good, so that it cannot write any more."""


class LocalWriter(SuiteWriter):
    """A writer in this process, over any link."""

    def __init__(self, connect: Callable[[bytes], WriterLink]) -> None:
        self._connect = connect
        self._link: WriterLink | None = None

    @property
    def link(self) -> WriterLink:
        assert self._link is not None
        return self._link

    def connect(self, description: bytes) -> None:
        self._link = self._connect(description)

    def post(self, where: Sequence[Where], notice: bytes) -> int:
        spans = [Span(drawn_bytes(length, seed), offset) for offset, length, seed in where]
        return self.link.post(spans, notice)

    def observe(self, budget_bytes: int) -> Observed:
        ends, spent = self.link.observe(budget_bytes=budget_bytes)
        return [
            (end.number, "" if isinstance(end, WriteDone) else end.cause) for end in ends
        ], spent

    def settle(self, wait_s: float) -> list[tuple[int, str]]:
        ended: list[tuple[int, str]] = super().settle(0.0)
        deadline = time.monotonic() + wait_s
        while wait_s and self.link.busy:
            fd = self.link.descriptor
            if fd is not None and not wait_readable(fd, deadline):
                raise AssertionError("the writer does not come to an end")
            ended += super().settle(0.0)
        return ended

    def stop(self) -> None:
        """Nothing to do: it writes only when it is called."""

    def resume(self) -> None:
        """See `stop`."""

    def end(self) -> None:
        if self._link is not None:
            self._link.close()


class ProcessWriter(SuiteWriter):
    """A writer in a process of its own, over a data transport that is built in or installed."""

    def __init__(self, transport: str = "shared_memory") -> None:
        self.process = PeerProcess(PROGRAM, (transport,), ())
        self._stopped: list[int] = []

    def connect(self, description: bytes) -> None:
        self._ask(do="connect", description=description.hex())

    def post(self, where: Sequence[Where], notice: bytes) -> int:
        answer = self._ask(do="post", where=list(where), notice=notice.hex())
        return int(answer["number"])

    def observe(self, budget_bytes: int) -> Observed:
        answer = self._ask(do="observe", budget_bytes=budget_bytes)
        return [(number, cause) for number, cause in answer["ends"]], answer["spent"]

    def settle(self, wait_s: float) -> list[tuple[int, str]]:
        answer = self._ask(do="settle", wait_s=wait_s)
        return [(number, cause) for number, cause in answer["ends"]]

    def stop(self) -> None:
        """Stops it with the processes that it has started: one of them may be what writes."""
        self.process.stop()
        self._stopped = children_of(self.process.pid)
        for pid in self._stopped:
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped = []
        self.process.resume()

    def end(self) -> None:
        self.resume()  # A process that is stopped does not see that its parent is gone.
        self.process.close()

    def _ask(self, **command: object) -> dict[str, Any]:
        self.process.tell(json.dumps(command))
        answer: dict[str, Any] = json.loads(self.process.hear())
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # The thread has ended.
            found += [int(each) for each in task.read_text().split()]
    return [each for child in found for each in (child, *children_of(child))]


def main() -> None:
    """What runs in the process of a `ProcessWriter`."""
    writer = LocalWriter(Writer(transport_named(sys.argv[1])).connect)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = _obey(writer, command)
        except (ValueError, PenstockError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _obey(writer: LocalWriter, command: dict[str, Any]) -> dict[str, object]:
    match command["do"]:
        case "connect":
            writer.connect(bytes.fromhex(command["description"]))
            return {}
        case "post":
            return {"number": writer.post(command["where"], bytes.fromhex(command["notice"]))}
        case "observe":
            ends, spent = writer.observe(command["budget_bytes"])
            return {"ends": ends, "spent": spent}
        case "settle":
            return {"ends": writer.settle(command["wait_s"])}
        case other:
            raise ValueError(f"do is {other!r}, which is nothing to do")
