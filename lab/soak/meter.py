"""What the processes have taken while nothing is under way, and whether that has grown.

Instances that were killed begin anew, so one look says little. The middle third of all looks is
compared with the last third: what leaks grows on. Of the server, which lives on, and of files, by
medians. What all processes have together depends on how many pairs are open when one looks, by
a factor of two: there the least is compared.
"""

from __future__ import annotations

import statistics
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lab.soak.world import World

LOOKS_MIN = 6
"""With fewer, nothing is said of growth."""


class Look(NamedTuple):
    """One row: what there is in calm."""

    minutes: float
    answers: int
    """Since the start, and so are the next two."""
    unanswered: int
    faults: int
    cached: int
    """Tokens that were found when every prompt was asked once."""
    memory_mib: float
    """Resident, of all processes of the server; shared pages count in each."""
    server_mib: float
    """Of the server alone, which is never killed."""
    server_descriptors: int
    descriptors: int
    """Of all processes of the server, and so are threads."""
    threads: int
    processes: int
    files: int
    """In the folder of all that it writes. Shared memory of others has files, ours has not."""


class Bound(NamedTuple):
    """How much more than before something may be."""

    share: float
    more: float
    of: Callable[[Iterable[float]], float]
    """Which of the looks are compared."""


BOUNDS = {
    "memory_mib": Bound(0.05, 16, min),
    "server_mib": Bound(0.05, 8, statistics.median),
    "server_descriptors": Bound(0.02, 4, statistics.median),
    "descriptors": Bound(0.02, 4, min),
    "threads": Bound(0.02, 2, min),
    "processes": Bound(0, 0, statistics.median),
    "files": Bound(0.02, 4, statistics.median),
}


def look(world: World, **counted: float) -> Look:
    """What there is now."""
    memory, own, descriptors, own_descriptors, threads = 0.0, 0.0, 0, 0, 0
    roles = world.processes()
    for role in roles:
        with suppress(OSError):  # It has ended since it was found.
            status = _status(role.pid)
            memory += status["VmRSS"] / 1024
            threads += status["Threads"]
            opened = sum(1 for _ in Path(f"/proc/{role.pid}/fd").iterdir())
            descriptors += opened
            if role.name == "server":
                own, own_descriptors = status["VmRSS"] / 1024, opened
    files = sum(each.is_file() for each in world.folder.rglob("*"))
    return Look(
        **counted,  # type: ignore[arg-type]
        memory_mib=round(memory, 1),
        server_mib=round(own, 1),
        server_descriptors=own_descriptors,
        descriptors=descriptors,
        threads=threads,
        processes=len(roles),
        files=files,
    )


def growth(looks: Sequence[Look]) -> list[str]:
    """What has grown between the middle third of all looks and the last one."""
    if len(looks) < LOOKS_MIN:
        return []
    third = len(looks) // 3
    grown = []
    for name, bound in BOUNDS.items():
        before, after = (
            bound.of(float(getattr(each, name)) for each in part)
            for part in (looks[third:-third], looks[-third:])
        )
        if after > before * (1 + bound.share) + bound.more:
            grown.append(f"{name} grew from {before:g} to {after:g}")
    return grown


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: int(value.split()[0]) for name, value in pairs if name in {"VmRSS", "Threads"}}
