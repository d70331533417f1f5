"""What a process says of its own start, once, through a pipe."""

from __future__ import annotations

import os

_RUNS = b"+"
_BYTES_MAX = 4096
"""A pipe takes so much in one piece."""


def tell(fd: int, problem: str) -> None:
    """Says that it runs, or why it does not, and closes the pipe."""
    os.write(fd, problem.encode(errors="replace")[:_BYTES_MAX] or _RUNS)
    os.close(fd)


def hear(fd: int) -> str:
    """Why it does not run; empty if it does. Closes the pipe."""
    said = os.read(fd, _BYTES_MAX)
    os.close(fd)
    if said == _RUNS:
        return ""
    return said.decode(errors="replace") or "it ended before it was ready"
