"""Which pages an arena is made of.

| pages         | taken when                                                                |
|---------------|---------------------------------------------------------------------------|
| `HUGE`        | the machine has set aside enough free huge pages (`vm.nr_hugepages`)       |
| `TRANSPARENT` | it may make huge pages of shared memory (`transparent_hugepage/shmem_enabled`) |
| `PLAIN`       | otherwise                                                                  |

Large pages make fewer entries for a mapping and for a device that is to reach it. The one rule:
pages change how fast an arena is, never whether there is one.
"""

from __future__ import annotations

import mmap
import re
from enum import Enum
from typing import TYPE_CHECKING

from penstock.tiers.kernel_files import MEMINFO, meminfo_bytes, meminfo_count

if TYPE_CHECKING:
    from penstock.tiers.kernel_files import ReadText

SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Pages(Enum):
    """What kind of pages an arena has."""

    HUGE = "huge"
    """From the machine's pool of huge pages: set aside, and sure."""
    TRANSPARENT = "transparent"
    """Asked for by advice: huge as far as the kernel finds room for them."""
    PLAIN = "plain"


def huge_page_bytes(read: ReadText) -> int:
    """The size of the machine's huge pages; that of plain ones if it has none."""
    return meminfo_bytes(read(MEMINFO), "Hugepagesize") or mmap.PAGESIZE


def pages_to_try(size_bytes: int, read: ReadText) -> list[Pages]:
    """The kinds of pages to make an arena of, best first; the last one always works."""
    wanted = [Pages.PLAIN]
    if _transparent_allowed(read(SHMEM_ENABLED)):
        wanted = [Pages.TRANSPARENT, *wanted]
    if huge_pages_missing(size_bytes, read) == 0:
        wanted = [Pages.HUGE, *wanted]
    return wanted


def huge_pages_missing(size_bytes: int, read: ReadText) -> int:
    """How many free huge pages the machine lacks for an arena."""
    meminfo = read(MEMINFO)
    # Reserved pages still count as free, but are promised to somebody.
    free = meminfo_count(meminfo, "HugePages_Free") - meminfo_count(meminfo, "HugePages_Rsvd")
    return max(0, -(-size_bytes // huge_page_bytes(read)) - max(0, free))


def _transparent_allowed(shmem_enabled: str) -> bool:
    chosen = re.search(r"\[(\w+)\]", shmem_enabled)
    return chosen is not None and chosen[1] not in {"never", "deny"}
