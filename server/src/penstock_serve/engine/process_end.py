"""How a process of an engine ends, when what it had is released or never will be.

The interpreter's own end takes torch apart, object by object, which costs half a second of a core
and that nobody needs.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn

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
