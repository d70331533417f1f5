"""What Linux says about memory: how much there is, in which pages, on which NUMA node.

| limit                     | what is available under it                                    |
|---------------------------|---------------------------------------------------------------|
| the machine               | `MemAvailable` of /proc/meminfo                               |
| a NUMA node               | its free memory, and its file cache                           |
| a control group, version 2| `memory.max` and `memory.high`, less `memory.current`         |
| a control group, version 1| `memory.limit_in_bytes`, less `memory.usage_in_bytes`         |

A container is a control group. Every group on the way from the process up to the root counts,
and the tightest limit wins. What a group uses for the file cache is available all the same: the
kernel takes it back before it refuses anything, and a group that has read the weights of a model
would otherwise look full. Memory that is not there is refused before it is touched: after that,
the kernel would not refuse it either, but kill the process.

| pages of an arena | taken when                                                                 |
|-------------------|----------------------------------------------------------------------------|
| `HUGE`            | the machine has set aside enough free huge pages (`vm.nr_hugepages`)       |
| `TRANSPARENT`     | it may make huge pages of shared memory (`shmem_enabled`)                  |
| `PLAIN`           | otherwise                                                                  |

Large pages need fewer entries in page tables, also in those of a device. They change how fast an
arena is, never whether there is one.

Everything here takes a `ReadText`, so that a test can be any machine. A file that is missing or
may not be read says nothing, and that is no error.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from penstock.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

ReadText: TypeAlias = Callable[[str], str]
"""From the path of a file to its text; empty where there is none."""

MEMINFO = "/proc/meminfo"
UNLIMITED_BYTES = 1 << 62
"""Version 1 spells "no limit" as the largest number of whole pages, near 2**63."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """How many bytes are available, and which limit says so."""

    available_bytes: int
    source: str


def require_room(size_bytes: int, read: ReadText, *, setting: str, node: int | None = None) -> None:
    """Refuses an area of memory that does not fit.

    Raises:
        ConfigError: `size_bytes` are more than the tightest limit leaves; names `setting`.
    """
    limits = [*memory_limits(read), *([] if node is None else node_limits(node, read))]
    if not limits:
        return
    tightest = min(limits, key=lambda limit: limit.available_bytes)
    if size_bytes > tightest.available_bytes:
        raise ConfigError(
            setting,
            f"needs {gib(size_bytes)}, must be at most the {gib(tightest.available_bytes)} "
            f"that are available: {tightest.source}",
        )


def gib(size_bytes: int) -> str:
    """A number of bytes for people to read."""
    if size_bytes < 1 << 20:
        return f"{size_bytes} bytes"
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / (1 << 30):.2f} GiB"


def memory_limits(read: ReadText) -> list[Limit]:
    """Every limit on the memory of this process."""
    return [*_machine_limits(read(MEMINFO)), *_group_limits(read)]


def node_limits(node: int, read: ReadText) -> list[Limit]:
    """The limit of one NUMA node; none where the machine does not say."""
    path = f"/sys/devices/system/node/node{node}/meminfo"
    text = read(path)
    free = meminfo_bytes(text, "MemFree")
    if free is None:
        return []
    cached = sum(meminfo_bytes(text, name) or 0 for name in ("Active(file)", "Inactive(file)"))
    return [Limit(available_bytes=free + cached, source=f"MemFree and file cache in {path}")]


def _machine_limits(meminfo: str) -> list[Limit]:
    available = meminfo_bytes(meminfo, "MemAvailable")
    if available is None:
        return []
    return [Limit(available_bytes=available, source=f"MemAvailable in {MEMINFO}")]


class _Version(NamedTuple):
    """Under which names one version of control groups keeps what we ask for."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, str]


_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))
_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def _group_limits(read: ReadText) -> Iterator[Limit]:
    mounts = read("/proc/self/mountinfo")
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = _V2, _mount_of(mounts, kind="cgroup2", option="")
        elif "memory" in controllers.split(","):
            version, mount = _V1, _mount_of(mounts, kind="cgroup", option="memory")
        else:
            continue
        if mount is not None:
            for folder in _folders(mount, path):
                yield from _limits_in(folder, version, read)


class _Mount(NamedTuple):
    root: str
    """Which group the mount shows as its top: a container may see a part of the tree alone."""
    point: str


def _mount_of(mounts: str, *, kind: str, option: str) -> _Mount | None:
    # 41 31 0:38 /root /point rw,relatime shared:1 - cgroup2 cgroup2 rw,memory
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, filesystem = before.split(), after.split()
        if len(fields) < 5 or len(filesystem) < 3 or filesystem[0] != kind:
            continue
        if not option or option in filesystem[2].split(","):
            return _Mount(root=fields[3], point=fields[4])
    return None


def _folders(mount: _Mount, path: str) -> Iterator[str]:
    """The folders of a group and of all groups around it, as far as the mount shows them."""
    top, group = PurePosixPath(mount.root), PurePosixPath(path)
    below = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
    folder = PurePosixPath(mount.point) / below
    yield str(folder)
    for _ in below.parts:
        folder = folder.parent
        yield str(folder)


def _limits_in(folder: str, version: _Version, read: ReadText) -> Iterator[Limit]:
    used = read(f"{folder}/{version.usage}").strip()
    if not used.isdigit():
        return
    cached = _cached_bytes(read(f"{folder}/memory.stat"), version)
    for name in version.limits:
        text = read(f"{folder}/{name}").strip()
        if text.isdigit() and int(text) < UNLIMITED_BYTES:
            in_use = max(0, int(used) - cached)
            yield Limit(
                available_bytes=max(0, int(text) - in_use),
                source=f"{name} in {folder} is {gib(int(text))}, {gib(in_use)} are in use",
            )


def _cached_bytes(stat: str, version: _Version) -> int:
    rows = dict(re.findall(r"^(\w+) (\d+)$", stat, re.MULTILINE))
    return sum(int(rows.get(name, 0)) for name in version.cached)


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


NODES_ONLINE = "/sys/devices/system/node/online"

# The C library has no function for it: that one lives in libnuma, which not every machine has.
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235}
_MPOL_BIND = 2
_MASK_WORD_BITS = 64


def online_nodes(read: ReadText) -> list[int]:
    """The NUMA nodes of the machine; one, number 0, where it does not say."""
    nodes: list[int] = []
    for part in read(NODES_ONLINE).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes or [0]


DONT_NEED = 4
"""Private pages are dropped: next, zeros are read there, or the file they were mapped from."""
REMOVE = 9
"""Pages of shared memory are dropped for all who share it."""


def advise_memory(address: int, length: int, advice: int) -> None:
    """Tells the kernel what becomes of whole pages.

    Raises:
        OSError: the kernel refuses.
    """
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def give_back_private(address: int, length: int) -> int:
    """Returns the whole pages of this process's own memory; returns how many bytes they have.

    Raises:
        UnavailableError: the kernel does not take them.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + length) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first:
        return 0
    try:
        advise_memory(first, last - first, DONT_NEED)
    except OSError as error:
        raise UnavailableError(
            f"{gib(last - first)} cannot be given back: {error.strerror}"
        ) from error
    return last - first


def bind_memory(address: int, length: int, node: int) -> None:
    """Has the pages from `address` on come from one node, when they are touched.

    Raises:
        OSError: the kernel refuses, or this processor is not known here.
    """
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind has no known number on {platform.machine()}")
    words = (ctypes.c_uint64 * (node // _MASK_WORD_BITS + 1))()
    words[node // _MASK_WORD_BITS] = 1 << node % _MASK_WORD_BITS
    # The kernel looks at one bit fewer than the given number.
    bits = len(words) * _MASK_WORD_BITS + 1
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_BIND),
        words,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
