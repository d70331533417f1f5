"""Peers in processes of their own, for suites that stop, continue and kill them.

    with peer_process(program, address) as peer:
        peer.hear()                 # a line that it printed
        peer.stop(); peer.resume(); peer.kill()

The one rule: no peer outlives its `with`, whatever came of the test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATIENCE_S = 30.0
"""How long a peer may take to end; only failures take so long."""


class PeerProcess:
    """A process that runs a piece of Python, with a line-wise pipe in and out."""

    def __init__(self, program: str, arguments: Sequence[str], pass_fds: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        """Its process id, which stays its own until it was waited for."""
        return self._process.pid

    def tell(self, line: str) -> None:
        """Gives it a line to read from its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line that it prints; empty once it is gone."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

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
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


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
