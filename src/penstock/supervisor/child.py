"""What a supervised process does before it runs its module.

    python -m penstock.supervisor.child NAME SUPERVISOR REPORT KEEPER GIVEN KEPT MODULE …

GIVEN and KEPT list descriptors as name=FD,…: those of its spec, and those that the supervisor
kept for it in an earlier life. KEEPER is the socket for requests to keep descriptors; it is
empty unless the spec says `keeps`.

It has the kernel kill it when the supervisor ends, looks for the module, writes to the pipe
REPORT whether both worked, and runs the module. The one rule: it ends when the supervisor ends,
even if that was killed; so it does not run where the supervisor has already ended.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from importlib.util import find_spec

from penstock.supervisor.descriptors import connect_keeper, inherit_listed, make_private
from penstock.supervisor.loop import write_start_report

NOT_STARTED = 127
"""The status of a shell that does not find its command."""

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Runs the module that the command line names."""
    _name, supervisor, report, keeper, given, kept, module, *arguments = argv
    make_private((int(report),))
    inherit_listed(given)
    if keeper:
        connect_keeper(kept, int(keeper))
    problem = _end_with(int(supervisor)) or _why_not_found(module)
    write_start_report(int(report), problem)
    if problem:
        sys.exit(NOT_STARTED)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(supervisor: int) -> str:
    """Has the kernel kill this process when the supervisor ends; returns why it does not."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        return f"PR_SET_PDEATHSIG is refused: {os.strerror(ctypes.get_errno())}"
    # If the supervisor ended before the call, no signal comes.
    if os.getppid() != supervisor:
        return f"the supervisor, process {supervisor}, has ended"
    return ""


def _why_not_found(module: str) -> str:
    """Why `python -m` would not run a module; empty if it would."""
    wrong = f"module is {module!r}, must be one that `{sys.executable} -P -m` finds"
    try:
        spec = find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{module}.__main__")
    except (ImportError, ValueError) as error:
        return f"{wrong}: {error}"
    return "" if spec is not None else f"{wrong}; it looks in {':'.join(sys.path)}"


if __name__ == "__main__":
    main(sys.argv[1:])
