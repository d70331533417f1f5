"""What the kernel says about the machine, in files under /proc and /sys.

Everything that looks at the machine takes a `ReadText`, so that a test can be any machine. The
one rule: a file that is missing or may not be read says nothing, and nothing is no error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

ReadText: TypeAlias = Callable[[str], str]
"""From the path of a file to its text; empty where there is none."""

MEMINFO = "/proc/meminfo"


def read_text(path: str) -> str:
    """The text of a file of this machine; empty if it is missing or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def meminfo_bytes(text: str, name: str) -> int | None:
    """One row of /proc/meminfo, or of a node's own, in bytes; `None` if it has no such row."""
    found = re.search(rf"\b{re.escape(name)}: +(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else None


def meminfo_count(text: str, name: str) -> int:
    """One row of /proc/meminfo that is a number of pages; 0 if it has no such row."""
    found = re.search(rf"^{re.escape(name)}: +(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
