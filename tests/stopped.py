"""Processes that stand still: a signal alone lets their threads go on for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PATIENCE_S = 600.0


def stop_process(pid: int) -> None:
    """Stops a process, and waits until none of its threads runs any more.

    The kernel gives SIGSTOP to one of its threads, which stops the others when it is scheduled: on
    a busy machine, they answer for milliseconds after the signal was sent.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while not all(_stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.001)


def _stands_still(task: Path) -> bool:
    try:
        # After the name, which may have any characters.
        state = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return True  # It has ended.
    return state.split()[0] in "TtZX"
