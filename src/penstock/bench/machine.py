"""What a measurement ran on, in words that may be published.

The one rule: nothing here names the machine or its owner. No host name, no user, no path.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import numpy as np


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hardware and the versions that a number depends on."""

    cpu: str
    cores: int
    """Cores this process may use; fewer than the machine has, where it is confined."""
    memory_bytes: int
    kernel: str
    python: str
    numpy: str


def describe_machine() -> Machine:
    """This machine, as a report tells it."""
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        numpy=np.__version__,
    )


def _field(path: str, name: str) -> str | None:
    """The first value of `name : value` in one of the kernel's text files."""
    # Some architectures (arm64) have no such field, and some sandboxes no such file.
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
