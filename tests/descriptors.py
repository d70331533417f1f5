"""Which descriptors this process has, for tests of code that leaves none behind.

    before = open_descriptors()
    ...
    assert open_descriptors() <= before

Fewer is no failure: what earlier tests closed or dropped may go at any time, such as the sockets
of ZeroMQ, which lingers, and whatever waits for the garbage collector.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_descriptors() -> set[tuple[int, str]]:
    """Each by its number and what it is open on."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The descriptor of this very listing.
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def arena_holders(arena: str) -> set[int]:
    """The processes that have a descriptor or a mapping of an arena."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            maps = (folder / "maps").read_text()
            if f"memfd:penstock-{arena} " in f"{maps} {' '.join(links)} ":
                found.add(int(folder.name))
    return found
