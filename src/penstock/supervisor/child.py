"""How a supervised process begins, before it runs its module.

    python -m penstock.supervisor.child NAME SUPERVISOR REPORT WISHES GIVEN KEPT MODULE …

GIVEN and KEPT list descriptors as name=FD,…: those of its spec, and those that an earlier life
of it had the supervisor keep. Where its spec says that it keeps, WISHES is the socket to ask by.

It binds its life to the supervisor's, looks for the module, says on the pipe REPORT how that
went, and becomes the module. The one rule: it ends when the supervisor ends, even if that was
killed; so it does not begin where the supervisor has gone already.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from importlib.util import find_spec

from penstock.supervisor import inherited, keeping, report
from penstock.supervisor.descriptors import make_private

NOT_STARTED = 127
"""The status of a shell that does not find its command."""

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Runs the module that the command line names."""
    _name, supervisor, told_on, asked_on, given, kept, module, *arguments = argv
    told = int(told_on)
    make_private((told,))
    inherited.take_over(given)
    if asked_on:
        keeping.take_over(kept, int(asked_on))
    problem = _bind_life_to(int(supervisor)) or _missing(module)
    report.tell(told, problem)
    if problem:
        sys.exit(NOT_STARTED)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _bind_life_to(supervisor: int) -> str:
    """Has the kernel kill this process when the supervisor ends; says why that is not so."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        return f"PR_SET_PDEATHSIG is refused: {os.strerror(ctypes.get_errno())}"
    # It may have ended before that, and then no signal comes.
    if os.getppid() != supervisor:
        return f"the supervisor, process {supervisor}, has ended"
    return ""


def _missing(module: str) -> str:
    """Says why `python -m` would not run a module; nothing if it would."""
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
