"""A thread of compiled code that verifies packed blocks and puts them away.

    thread = PutAwayThread(library)
    thread.submit(packing, memory, keys, sums, slots)
    thread.ended()       once `descriptor` is readable: for each, in order, whether it was intact

The engine's thread only passes addresses. The other one runs no Python and never takes the
interpreter's lock, so rule 4 of the design holds: no Python thread competes with the engine. It
sleeps while there is nothing to do.

The one rule: everything that a job points to is kept alive here until its end was collected.
`close` waits for the jobs that were submitted, so memory may be unmapped after it and not before.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.movers.packing import JobRoom, block_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.movers.packing import Packing, PartsLibrary

JOBS_MAX = 64
"""Jobs whose end was not collected; `put_away_thread.c` has the same number."""


class PutAwayThread:
    """The thread of one rank; it starts with the first job.

    Args:
        library: the compiled functions.
    """

    def __init__(self, library: PartsLibrary) -> None:
        self._library = library
        self._handle = 0
        self._rooms: dict[tuple[int, int], JobRoom] = {}
        """Memory of the thread, by the size of a block and its cells."""
        self._under_way: deque[tuple[object, ...]] = deque()
        """What the jobs point to, in their order."""
        self._results = (ctypes.c_int64 * JOBS_MAX)()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = self._stop_later()

    @property
    def descriptor(self) -> int:
        """Readable while there are ends to collect."""
        return self._bell

    @property
    def has_room(self) -> bool:
        """Whether another job can be submitted."""
        return len(self._under_way) < JOBS_MAX

    @property
    def busy(self) -> bool:
        """Whether the end of a job was not collected."""
        return bool(self._under_way)

    def submit(
        self,
        packing: Packing,
        memory: NDArray[np.uint8],
        keys: tuple[bytes, ...],
        sums: bytes,
        slots: tuple[int, ...],
    ) -> None:
        """Begins what `Packing.put_away` does. There must be room.

        It is called for every part that arrives, in the engine's thread: what many parts have in
        common is made once.
        Raises `ValueError`: sizes do not fit; `UnavailableError`: the system gives no thread.
        """
        table = block_table(keys, slots)
        sizes = packing.block_bytes, packing.cell_count
        room = self._rooms.get(sizes)
        if room is None:
            room = self._rooms[sizes] = JobRoom(*sizes)
        arguments = packing.job_of_put_away(memory, table, sums, room)
        if not self._handle:
            self._start()
        if not self._library.thread_submit(self._handle, *arguments):
            raise UnavailableError(f"{JOBS_MAX} parts are being put away, and no more fit")
        self._under_way.append((packing, memory, table, arguments))

    def ended(self) -> list[bool]:
        """Whether each part was intact, of those that have ended since; never waits."""
        if not self._under_way:
            return []
        count: int = self._library.thread_collect(self._handle, self._results)
        for _ in range(count):
            self._under_way.popleft()
        return [first_bad < 0 for first_bad in self._results[:count]]

    def close(self) -> None:
        """Ends the thread after its last job: it touches nothing any more. Twice does no harm."""
        self._stop()
        self._under_way.clear()

    def _start(self) -> None:
        handle = self._library.thread_start(self._bell)
        if not handle:
            raise UnavailableError("no thread can be started to put parts away")
        self._handle = handle
        self._stop.detach()
        self._stop = self._stop_later()

    def _stop_later(self) -> weakref.finalize[[PartsLibrary, int, int, int], PutAwayThread]:
        # Also at the end of the process: it must not write to memory that the interpreter frees.
        return weakref.finalize(self, _stop, self._library, self._handle, self._bell, os.getpid())


def _stop(library: PartsLibrary, handle: int, bell: int, owner: int) -> None:
    if handle and os.getpid() == owner:  # A fork has the memory, but not the thread.
        library.thread_stop(handle)
    os.close(bell)
