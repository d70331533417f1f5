"""One process, from its start until it is reaped.

Its number stays its own until `reap`: until then a signal to it, or to its group, cannot hit
somebody else. That is the one rule, and why nothing here ignores SIGCHLD or reaps elsewhere.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.supervisor.descriptors import make_inheritable, make_private
from penstock.supervisor.report import hear
from penstock.supervisor.wire import channel_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Self

    from penstock.supervisor.spec import ProcessSpec

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The supervisor hears none of these: it ends with the engine. Its processes hear them again."""


class Exit(NamedTuple):
    """How a process ended: one of the two is there."""

    code: int | None
    signal: int | None


class Process:
    """A process of our own, in a group of its own."""

    def __init__(self, pid: int, pidfd: int, report: int, wishes: socket.socket | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.wishes = wishes
        """Where it asks to have descriptors kept for its next life; absent if it cannot."""
        self.report: int | None = report
        """Where it says, once, whether it runs; absent when it has."""

    @classmethod
    def spawn(cls, spec: ProcessSpec, given: Mapping[str, int], kept: Mapping[str, int]) -> Self:
        """Starts a process that has these descriptors and no others but its output.

        Args:
            spec: What it is to be.
            given: What the engine gives it.
            kept: What an earlier life of it had kept.

        Raises:
            OSError: the machine does not let us.
        """
        with ExitStack() as undo:
            report, told = os.pipe()
            undo.callback(os.close, report)
            wishes, asked = channel_pair() if spec.keeps else (None, None)
            if wishes is not None:
                undo.callback(wishes.close)
            try:
                pid = _spawn(spec, given, kept, told, asked)
            finally:
                os.close(told)
                if asked is not None:
                    asked.close()
            undo.callback(_end, pid)
            process = cls(pid, os.pidfd_open(pid), report, wishes)
            undo.pop_all()
            return process

    def read_report(self) -> str:
        """Why it does not run, empty if it does; to be asked once, when `report` is readable."""
        assert self.report is not None
        fd, self.report = self.report, None
        return hear(fd)

    def terminate(self) -> None:
        """Asks it to end."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and what it started."""
        # It may have left its group, or become somebody whom we may not kill.
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> Exit:
        """How it ended; to be called once its pidfd is readable."""
        # What it left behind in its group goes first: after it has been reaped, the number of
        # the group may be another's.
        self.kill()
        result = os.waitid(os.P_PID, self.pid, os.WEXITED)
        assert result is not None
        self.close()
        if result.si_code == os.CLD_EXITED:
            return Exit(code=result.si_status, signal=None)
        return Exit(code=None, signal=result.si_status)

    def end_wishes(self) -> None:
        """It asks for nothing more."""
        if self.wishes is not None:
            self.wishes.close()
            self.wishes = None

    def close(self) -> None:
        """Gives the descriptors back."""
        os.close(self.pidfd)
        self.end_wishes()
        if self.report is not None:
            os.close(self.report)
            self.report = None


def _end(pid: int) -> None:
    """Ends a process that nobody could watch."""
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _spawn(
    spec: ProcessSpec,
    given: Mapping[str, int],
    kept: Mapping[str, int],
    told: int,
    asked: socket.socket | None,
) -> int:
    wishes = () if asked is None else (asked.fileno(),)
    passed = (told, *wishes, *given.values(), *kept.values())
    arguments = [
        *(sys.executable, "-P", "-m", "penstock.supervisor.child"),
        *(spec.name, str(os.getpid()), str(told), ",".join(map(str, wishes))),
        *(_listed(given), _listed(kept)),
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


def _listed(descriptors: Mapping[str, int]) -> str:
    return ",".join(f"{name}={fd}" for name, fd in descriptors.items())
