"""A process that gives up ends, also where its device does not: whoever started it starts it anew.

What a process gives back at its end is memory that a device may still use, and CUDA waits for a
device without a deadline, inside calls that no Python code can leave. The kernel can.
"""

from __future__ import annotations

import signal

GIVE_UP_S = 60.0
"""To give everything back takes milliseconds, or as long as a stuck device is waited for."""


def end_within(seconds: float) -> None:
    """Has the kernel end this process, if it is still there by then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
