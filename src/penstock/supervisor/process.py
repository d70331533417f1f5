"""One process, from its start until it is reaped.

A process writes one report of its start to a pipe: whether its module is about to run.

The one rule: a process keeps its pid until `reap`, so a signal to it, or to its group, cannot hit
another process. That is why nothing here ignores SIGCHLD or reaps elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.supervisor.descriptors import list_descriptors, make_inheritable, make_private
from penstock.supervisor.messages import channel_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Self

    from penstock.supervisor.spec import ProcessSpec

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The supervisor ignores these: it ends with the engine. Its processes do not ignore them."""

_RUNS = b"+"
_REPORT_BYTES_MAX = 4096
"""A pipe takes this much in one piece."""


class ProcessExit(NamedTuple):
    """How a process ended: one of the two is set."""

    code: int | None
    signal: int | None


class Process:
    """A child process that leads a process group."""

    def __init__(self, pid: int, pidfd: int, report: int, keeping: socket.socket | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.keeping = keeping
        """Its requests to keep descriptors for its next life; absent if it may not."""
        self.report: int | None = report
        """The pipe of its start report; absent once that was read."""

    @classmethod
    def spawn(cls, spec: ProcessSpec, given: Mapping[str, int], kept: Mapping[str, int]) -> Self:
        """Starts a process that has these descriptors and no others but its output.

        Args:
            spec: Which module it runs, and how.
            given: The descriptors that its spec names.
            kept: Those that an earlier life of it had kept.

        Raises:
            OSError: the system cannot create it.
        """
        with ExitStack() as undo:
            report, its_report = os.pipe()
            undo.callback(os.close, report)
            keeping, its_keeping = channel_pair() if spec.keeps else (None, None)
            if keeping is not None:
                undo.callback(keeping.close)
            try:
                pid = _spawn(spec, given, kept, its_report, its_keeping)
            finally:
                os.close(its_report)
                if its_keeping is not None:
                    its_keeping.close()
            undo.callback(_kill_unwatched, pid)
            process = cls(pid, os.pidfd_open(pid), report, keeping)
            undo.pop_all()
            return process

    def read_report(self) -> str:
        """Why its module does not run, empty if it does; call once, when `report` is readable."""
        assert self.report is not None
        fd, self.report = self.report, None
        written = os.read(fd, _REPORT_BYTES_MAX)
        os.close(fd)
        if written == _RUNS:
            return ""
        return written.decode(errors="replace") or "it ended before it was ready"

    def terminate(self) -> None:
        """Sends SIGTERM to the process."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to its group."""
        # It may have left its group, or have changed to a user whose processes we may not kill.
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> ProcessExit:
        """Reads how it ended; call once its pidfd is readable."""
        # Kills the rest of its group first: after the process has been reaped, another group may
        # get the number.
        self.kill()
        result = os.waitid(os.P_PID, self.pid, os.WEXITED)
        assert result is not None
        self.close()
        if result.si_code == os.CLD_EXITED:
            return ProcessExit(code=result.si_status, signal=None)
        return ProcessExit(code=None, signal=result.si_status)

    def end_keeping(self) -> None:
        """Closes the socket of its requests to keep descriptors."""
        if self.keeping is not None:
            self.keeping.close()
            self.keeping = None

    def close(self) -> None:
        """Closes the descriptors that watch it."""
        os.close(self.pidfd)
        self.end_keeping()
        if self.report is not None:
            os.close(self.report)
            self.report = None


def write_start_report(fd: int, problem: str) -> None:
    """Reports that this process runs its module, or why not; closes the pipe."""
    os.write(fd, problem.encode(errors="replace")[:_REPORT_BYTES_MAX] or _RUNS)
    os.close(fd)


def _kill_unwatched(pid: int) -> None:
    """Ends a process for which no pidfd could be opened."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _spawn(
    spec: ProcessSpec,
    given: Mapping[str, int],
    kept: Mapping[str, int],
    report: int,
    keeping: socket.socket | None,
) -> int:
    keeper = () if keeping is None else (keeping.fileno(),)
    passed = (report, *keeper, *given.values(), *kept.values())
    arguments = [
        *(sys.executable, "-P", "-m", "penstock.supervisor.child"),
        *(spec.name, str(os.getpid()), str(report), ",".join(map(str, keeper))),
        *(list_descriptors(given), list_descriptors(kept)),
        *(spec.module, *spec.arguments),
    ]
    try:
        make_inheritable(passed)
        # Not by `subprocess`, which would bring threads and selectors along, nor by a fork:
        # a failure to execute is an OSError here.
        return os.posix_spawn(
            sys.executable,
            arguments,
            {**os.environ, **dict(spec.environment)},
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setpgroup=0,
            setsigmask=(),
            setsigdef=IGNORED,
        )
    finally:
        make_private(passed)
