"""An area of memory that processes share, and that belongs to no file.

    with Arena.create(8 << 30) as arena:            socket.send_fds(peer, [b"x"], [arena.fd])
        arena.bytes[...]                            Arena.attach(fd).bytes[...]

It lives in a `memfd`: there is no name to find it by and no entry to clean up. Whoever has the
descriptor can map it, and the kernel frees it when the last descriptor and mapping are gone,
however their holders ended.

The one rule that must not break: an arena never changes its size. It is sealed against that, so
no holder can take pages away from under another, which would kill it with SIGBUS; `attach`
refuses what is not sealed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import ConfigError, UnavailableError
from penstock.tiers.linux_memory import (
    REMOVE,
    Pages,
    ReadText,
    advise_memory,
    bind_memory,
    gib,
    huge_page_bytes,
    huge_pages_missing,
    online_nodes,
    pages_to_try,
    read_text,
    require_room,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from numpy.typing import NDArray

PREFAULT_BYTES = 256 << 20
"""How many bytes of pages are made at a time: about a tenth of a second, without signals."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet.


def populate_pages(mapping: mmap.mmap, start: int, length: int) -> None:
    """Makes the pages of a range, in one call and without changing what they hold.

    Not by `mapping.madvise`, which keeps the interpreter's lock meanwhile: 64 MiB take 40 ms.
    """
    memory = np.frombuffer(mapping, dtype=np.uint8)
    advise_memory(memory.ctypes.data + start, length, _MADV_POPULATE_WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCalls:
    """What an arena asks of the machine. A test may answer in its place."""

    read: ReadText = read_text
    populate: Callable[[mmap.mmap, int, int], None] = populate_pages
    bind: Callable[[int, int, int], None] = bind_memory


class Arena:
    """Memory of fixed size, shared by descriptor. `create` makes one, `attach` maps another's."""

    def __init__(
        self,
        fd: int,
        mapping: mmap.mmap,
        *,
        pages: Pages,
        numa_node: int | None = None,
        ready_s: float = 0.0,
        fallbacks: tuple[str, ...] = (),
    ) -> None:
        self.size = len(mapping)
        self.page_bytes = os.fstatvfs(fd).f_bsize
        self.pages = pages
        self.numa_node = numa_node
        """The node that its pages come from; `None`: wherever they were touched first."""
        self.ready_s = ready_s
        """How long it took to make it, until every page was there."""
        self.fallbacks = fallbacks
        """What was asked for and could not be had, each with the reason."""
        self._fd = fd
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)
        # Runs once, at `close` or with the last reference: an arena that nobody closed does
        # not keep its memory for as long as the process lives.
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(
        cls,
        size: int,
        *,
        name: str = "arena",
        huge_pages: bool = True,
        numa_node: int | None = None,
        kernel: MemoryCalls | None = None,
    ) -> Self:
        """Makes an arena of at least `size` bytes, all zero, with every page in place.

        Raises `ConfigError`, `UnavailableError` or `ValueError`.
        """
        if size < 1:
            raise ValueError(f"size is {size}, must be at least 1")
        kernel = kernel or MemoryCalls()
        started = time.perf_counter()
        node, fallbacks = _node_to_bind(numa_node, kernel.read)
        if huge_pages and (missing := huge_pages_missing(size, kernel.read)):
            fallbacks += [f"huge pages: {missing} more would have to be free"]
        for pages in pages_to_try(size, kernel.read) if huge_pages else [Pages.PLAIN]:
            if pages is not Pages.HUGE:  # Those are set aside, and no limit counts them.
                require_room(size, kernel.read, setting="size", node=node)
            try:
                fd, mapping, refused = _make(size, name, pages, node, kernel)
            except OSError as error:
                fallbacks += [f"{pages.value} pages: {error.strerror}"]
                continue
            return cls(
                fd,
                mapping,
                pages=pages,
                numa_node=None if refused else node,
                ready_s=time.perf_counter() - started,
                fallbacks=(*fallbacks, *refused),
            )
        raise UnavailableError(f"no arena of {gib(size)} can be made: {'; '.join(fallbacks)}")

    @classmethod
    def attach(cls, fd: int, *, writable: bool = True) -> Self:
        """Maps the arena behind a descriptor that somebody handed over.

        The arena has a descriptor of its own: what becomes of `fd` is the caller's affair.
        Raises `UnavailableError`: the machine does not let us map it; `ValueError`: there is no
        arena behind `fd`.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"fd {fd} is no arena: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise ValueError(f"fd {fd} is no arena: its size is not sealed")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        size = os.fstat(fd).st_size
        if size == 0:
            raise ValueError(f"fd {fd} is no arena: it is empty")
        try:
            mapping = mmap.mmap(fd, size, access=access)
            own_fd = os.dup(fd)
        except OSError as error:
            raise UnavailableError(
                f"the arena of {gib(size)} behind fd {fd} cannot be mapped: {error.strerror}"
            ) from error
        # Whether plain pages were joined to huge ones is the kernel's secret.
        huge = os.fstatvfs(fd).f_bsize > mmap.PAGESIZE
        return cls(own_fd, mapping, pages=Pages.HUGE if huge else Pages.PLAIN)

    @property
    def fd(self) -> int:
        """The descriptor: what is handed over, to be mapped elsewhere by `attach`."""
        self._require_open()
        return self._fd

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All of its bytes. Views of them keep the mapping, even after `close`."""
        return self._require_open()

    @property
    def address(self) -> int:
        """Where it lies in this process; elsewhere in every other."""
        return int(self._require_open().ctypes.data)

    def give_back(self, start: int, length: int) -> int:
        """Returns the whole pages of a range to the system; returns how many bytes they have.

        Every holder of the arena reads zeros there, until somebody writes. The arena keeps its
        size, so nobody's access fails.
        Raises `UnavailableError`: the system does not take them.
        """
        first = round_up(start, self.page_bytes)
        last = (start + length) // self.page_bytes * self.page_bytes
        if last <= first:
            return 0
        try:
            advise_memory(self.address + first, last - first, REMOVE)
        except OSError as error:
            raise UnavailableError(
                f"{gib(last - first)} of an arena cannot be given back: {error.strerror}"
            ) from error
        return last - first

    def close(self) -> None:
        """Gives descriptor and mapping back; the latter with the last view of its bytes."""
        self._bytes = None
        self._close_fd()

    def _require_open(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _node_to_bind(wanted: int | None, read: ReadText) -> tuple[int | None, list[str]]:
    """The node to bind to, if any, and why it is not the one that was asked for."""
    if wanted is None:
        return None, []
    nodes = online_nodes(read)
    if len(nodes) == 1:
        return None, [f"numa_node {wanted}: the machine has one node"]
    if wanted not in nodes:
        known = ", ".join(map(str, nodes))
        raise ConfigError("numa_node", f"is {wanted}, must be one of {known}")
    return wanted, []


def _make(
    size: int,
    name: str,
    pages: Pages,
    node: int | None,
    kernel: MemoryCalls,
) -> tuple[int, mmap.mmap, list[str]]:
    """A descriptor, its mapping with every page in place, and why it is not bound to `node`."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if pages is Pages.HUGE:
        flags |= os.MFD_HUGETLB
    page_bytes = huge_page_bytes(kernel.read) if pages is Pages.HUGE else mmap.PAGESIZE
    with ExitStack() as undo:
        fd = os.memfd_create(f"penstock-{name}", flags)
        undo.callback(os.close, fd)
        os.ftruncate(fd, round_up(size, page_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        mapping = mmap.mmap(fd, round_up(size, page_bytes))
        # Prompts of users have no business in a core dump, and it would be as large as this.
        with suppress(OSError):
            mapping.madvise(mmap.MADV_DONTDUMP)
        if pages is Pages.TRANSPARENT:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        refused = [] if node is None else _bind(mapping, node, kernel)
        _prefault(mapping, kernel)
        undo.pop_all()
    return fd, mapping, refused


def _bind(mapping: mmap.mmap, node: int, kernel: MemoryCalls) -> list[str]:
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    try:
        kernel.bind(address, len(mapping), node)
    except OSError as error:
        return [f"numa_node {node}: {error.strerror}"]
    return []


def _prefault(mapping: mmap.mmap, kernel: MemoryCalls) -> None:
    """Has the kernel make every page now, rather than one by one while requests wait."""
    for start in range(0, len(mapping), PREFAULT_BYTES):
        length = min(PREFAULT_BYTES, len(mapping) - start)
        try:
            kernel.populate(mapping, start, length)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOSYS}:
                raise
            # The kernel is older than the advice. The pages hold zeros yet, so zeros may be
            # written; one to a page is enough.
            np.frombuffer(mapping, dtype=np.uint8)[start : start + length : mmap.PAGESIZE] = 0


def round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is no less than `size`."""
    return -(-size // unit) * unit
