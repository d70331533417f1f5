"""Peers and writers of remote writes that a test controls, in this process or in another.

    with peer_process(program, address) as peer:
        peer.hear()                 # a line that it printed
        peer.stop(); peer.resume(); peer.kill()

The one rule: no peer outlives its `with`, whatever came of the test.

    writer.connect(description)
    writer.post([(offset, length, seed)], notice)
    writer.observe(budget)

The bytes it writes are drawn from a seed, so that both sides know them. In a process of its own
it reads one JSON object a line from its standard input, and answers each with one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PenstockError
from penstock.handoff.pair import Writer, transport_named
from penstock.transport.remote import Span, WriteDone
from penstock.transport.waiting import wait_readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.transport.remote import WriterLink


PATIENCE_S = 60.0
"""How long a peer may take to end; it takes this long only if something failed."""
HEAR_S = 120.0
"""How long to wait for a line of a peer."""
_READ_BYTES = 1 << 16


class PeerProcess:
    """A process that runs a piece of Python, with a line-wise pipe in and out."""

    def __init__(self, program: str, arguments: Sequence[str], pass_fds: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._said = b""
        """What it printed and nobody has read yet."""

    @property
    def pid(self) -> int:
        """Its process id, which stays its own until it was waited for."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Gives it a line to read from its standard input."""
        self._input.write(line.encode() + b"\n")
        self._input.flush()

    def end_input(self) -> None:
        """There is nothing more for it to read."""
        self._input.close()

    def hear(self) -> str:
        """The next line that it prints; empty once it is gone.

        Raises:
            TimeoutError: it says nothing.
        """
        said = [self._said]
        while b"\n" not in said[-1]:
            found = self._read()
            if not found:
                self._said = b""
                return b"".join(said).decode()
            said.append(found)
        line, _, self._said = b"".join(said).partition(b"\n")
        return line.decode()

    def _read(self) -> bytes:
        """Some of what it printed; nothing once it is gone."""
        readable = select.poll()
        readable.register(self._output, select.POLLIN)
        if not readable.poll(HEAR_S * 1000):
            raise TimeoutError(f"the peer said nothing for {HEAR_S:g} s")
        return os.read(self._output.fileno(), _READ_BYTES)

    def stop(self) -> None:
        """Stops it where it is, with all its threads, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `stop`."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it without a word, and waits until it is gone."""
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        """Kills it if it is still there, and closes the pipes."""
        self.kill()
        with suppress(BrokenPipeError):  # Of lines that it did not read.
            self._input.close()
        self._output.close()


@contextmanager
def peer_process(
    program: str, *arguments: str, pass_fds: Sequence[int] = ()
) -> Iterator[PeerProcess]:
    """A peer that is gone at the end of the `with`."""
    peer = PeerProcess(program, arguments, pass_fds)
    try:
        yield peer
    finally:
        peer.close()


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
    """A writer in a process of its own, over a data transport that is built in or installed.

    Args:
        transport: its name.
        program: what the process runs, where its writer needs more than that name.
    """

    def __init__(self, transport: str = "shared_memory", *, program: str = PROGRAM) -> None:
        self.process = PeerProcess(program, (transport,), ())
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
    obey_lines(LocalWriter(Writer(transport_named(sys.argv[1])).connect))


def obey_lines(writer: LocalWriter) -> None:
    """Has a writer do what the standard input says, until it ends."""
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
