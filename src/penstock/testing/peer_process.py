"""Peers in processes of their own, for suites that stop, continue and kill them.

    with peer_process(program, address) as peer:
        peer.hear()                 # a line that it printed
        peer.stop(); peer.resume(); peer.kill()

The one rule: no peer outlives its `with`, whatever came of the test.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
