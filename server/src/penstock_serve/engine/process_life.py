"""What a supervised process reports to the command that started it, in any of its lives.

    line = read_report(fd, pid)     # The command, when that life has ended.
    report_ready(name)              # The process.

Both share a piece of memory that the supervisor hands on to every life. A life appends at most a
line when it is ready, and one when a setting is wrong; its pid tells it from the others.

The one rule: a process without a report, such as one that a test started, reports nothing.

A process ends by `leave`. The interpreter's own end takes torch apart, object by object, which
costs half a second of a core and that nobody needs.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import msgspec

from penstock.toolkit import inherited_descriptor

if TYPE_CHECKING:
    from penstock.errors import ConfigError

WRONG_SETTING = 2
"""The status of a process that ends since a setting is wrong, as that of a command."""
PROBLEM_CHARACTERS_MAX = 4096


class LifeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one life has reported."""

    pid: int
    is_ready: bool = False
    """Whether it took part in serving."""
    field: str = ""
    """The setting that is wrong, if one is."""
    problem: str = ""


def make_report() -> int:
    """A descriptor of empty memory for reports; the caller closes it."""
    fd = os.memfd_create("life-report", os.MFD_CLOEXEC)
    # The descriptors of all processes share this: no line overwrites another.
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    return fd


def read_report(fd: int, pid: int | None) -> LifeReport | None:
    """The last line of a life; `None` if it reported nothing."""
    lines = os.pread(fd, os.fstat(fd).st_size, 0).splitlines()
    found = [msgspec.json.decode(line, type=LifeReport) for line in lines]
    return next((line for line in reversed(found) if line.pid == pid), None)


def report_ready(name: str) -> None:
    """This process takes part in serving."""
    _append(name, LifeReport(pid=os.getpid(), is_ready=True))


def report_problem(name: str, error: ConfigError) -> None:
    """A setting is wrong: this process ends with `WRONG_SETTING`."""
    problem = error.problem[:PROBLEM_CHARACTERS_MAX]
    _append(name, LifeReport(pid=os.getpid(), field=error.field, problem=problem))


def _append(name: str, line: LifeReport) -> None:
    if name:
        os.write(inherited_descriptor(name), msgspec.json.encode(line) + b"\n")


GIVE_UP_S = 60.0
"""The timeout to release all resources: milliseconds, unless the device is stuck."""


def end_within(seconds: float) -> None:
    """Has the kernel kill this process if it still runs after `seconds`.

    For a process that failed and is to be restarted. When it releases memory that a device may
    still use, CUDA waits for the device without a timeout, and no Python code can interrupt that.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def leave(status: int) -> NoReturn:
    """Ends this process: callbacks for its end are made, and what was printed is written.

    The interpreter is left as it is. Memory and descriptors go back with the process.
    """
    # Callbacks of other packages (torch's, logging's) are among them, so a list of our own would
    # not do. The interpreter offers no public call for them; CPython 3.11 to 3.13 have this one,
    # which `multiprocessing` calls as well since 3.13, and a test fails where it is missing.
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
