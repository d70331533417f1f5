"""Blocks by compiled code: packed and summed, or verified and put away.

For saves and loads between host memory and host memory (`memcpy.py`), and for the parts of a
handoff (`handoff/driver/parts.py`). `parts.c` does what these do with NumPy and one XXH3 call
a segment, segment by segment while the bytes are in the first cache, so that blocks take one pass
over memory on each side. Where a layout is not of the plain kind, NumPy does it: slower, with the
same bytes and sums.

    thread = PutAwayThread()
    thread.submit(packing, memory, keys, sums, slots)
    thread.ended()       once `descriptor` is readable: for each, in order, whether it was intact

The engine's thread only passes addresses. The other one runs no Python and never takes the
interpreter's lock, so rule 4 of the design holds: no Python thread competes with the engine. It
sleeps while there is nothing to do.

The rules:

- Addresses are handed out only of memory that is kept alive here, and only for slots that the
  caller has checked.
- Everything that a job points to is kept alive here until its end was collected. `close` waits for
  the jobs that were submitted, so memory may be unmapped after it and not before.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UnavailableError, counted
from penstock.movers.compiled import load_library
from penstock.vocabulary.checksums import (
    SUM_BYTES,
    Algorithm,
    key_seed,
    key_seeds,
    place_number,
)
from penstock.vocabulary.planes import Axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane


LINE_BYTES = 64
"""Of a processor's caches."""
PROMPTS_KEPT = 64
"""Lists of slots and keys whose arrays are kept: every layer of a prompt has the same."""


class PartsLibrary:
    """The compiled functions."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        tables = (pointer, number, pointer, number)
        blocks = (*tables, pointer, pointer, number, pointer, pointer)
        self.pack = loaded.penstock_pack
        self.pack.argtypes = (*blocks, pointer, number, pointer)
        self.pack.restype = None
        self.put_away = loaded.penstock_put_away
        self.put_away.argtypes = (*blocks, pointer, pointer, number, pointer)
        self.put_away.restype = number
        self.thread_start = loaded.penstock_thread_start
        self.thread_start.argtypes = (ctypes.c_int,)
        self.thread_start.restype = pointer
        self.thread_submit = loaded.penstock_thread_submit
        self.thread_submit.argtypes = (pointer, *self.put_away.argtypes)
        self.thread_submit.restype = number
        self.thread_collect = loaded.penstock_thread_collect
        self.thread_collect.argtypes = (pointer, pointer)
        self.thread_collect.restype = number
        self.thread_stop = loaded.penstock_thread_stop
        self.thread_stop.argtypes = (pointer,)
        self.thread_stop.restype = None
        self.sum_pairs = loaded.penstock_sum_pairs
        self.sum_pairs.argtypes = (
            *(pointer, number, pointer, number, pointer, pointer, pointer, number, number),
        )
        self.sum_pairs.restype = None
        self.take_blocks = loaded.penstock_take_blocks
        self.take_blocks.argtypes = (
            *(pointer, number, pointer, number, pointer, pointer, pointer, number, number),
            *(pointer, pointer),
        )
        self.take_blocks.restype = None
        named = ctypes.c_char_p
        slots = (pointer, pointer, number, named, named, named)
        self.read_blocks = loaded.penstock_read_blocks
        self.read_blocks.argtypes = (*slots, named, pointer, number)
        self.read_blocks.restype = number
        self.write_blocks = loaded.penstock_write_blocks
        self.write_blocks.argtypes = (*slots, pointer, number)
        self.write_blocks.restype = number
        self.check_rows = loaded.penstock_check_rows
        self.check_rows.argtypes = (pointer, number, ctypes.c_uint64, pointer, pointer, pointer)
        self.check_rows.restype = None
        self.insert = loaded.penstock_insert
        self.insert.argtypes = (
            *(pointer, pointer, number, pointer, pointer, ctypes.c_uint64, pointer),
        )
        self.insert.restype = None


PARTS = PartsLibrary(load_library())
"""There is no other way to do it: the import fails where there is none."""


class Scratch:
    """Private memory in which a block or a piece is summed.

    All parts of one direction share one, so that it stays in a core's cache.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def room(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes, aligned to a cache line, with undefined content."""
        if len(self._memory) < size:
            memory = np.empty(size + LINE_BYTES, dtype=np.uint8)
            self._memory = memory[-memory.ctypes.data % LINE_BYTES :]
        return self._memory[:size]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the segments of a block lie in the slots of a tier, for `parts.c`."""

    strips: NDArray[np.int64]
    """One row for each plane, as it lies in slots."""
    segments: NDArray[np.int64]
    """One row for each plane and head, as it is summed."""
    block_bytes: int
    cell_count: int
    kept: tuple[NDArray[np.uint8], ...]
    """The memory behind the addresses."""
    scratch: Scratch
    tables: tuple[int, int, int, int]
    """Addresses and lengths of `strips` and `segments`: NumPy takes a microsecond for each."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        buffers: Mapping[int, NDArray[np.uint8]],
        algorithm: Algorithm,
        *,
        scratch: Scratch | None = None,
    ) -> Packing | None:
        """The packing of a layout; `None` if NumPy has to do it."""
        if algorithm is not Algorithm.XXH3:
            return None
        strips: list[tuple[int, ...]] = []
        segments: list[tuple[int, ...]] = []
        strip_numbers: dict[Plane, int] = {}
        for number, cell in enumerate(layout.cells):
            for segment in cell.segments:
                strip = _strip_of(segment.plane, buffers)
                if strip is None:
                    return None
                if segment.local_head == 0:
                    strip_numbers[segment.plane] = len(strips)
                    strips.append((*strip, segment.start, cell.length))
                place = place_number(layer=cell.layer, plane=segment.plane.role, head=cell.head)
                of_strip = strip_numbers[segment.plane], segment.local_head
                segments.append((segment.start, segment.length, place, number, *of_strip))
        used = {segment.plane.buffer for cell in layout.cells for segment in cell.segments}
        rows, columns = np.array(strips, dtype=np.int64), np.array(segments, dtype=np.int64)
        return cls(
            rows,
            columns,
            layout.block_bytes,
            len(layout.cells),
            tuple(buffers[number] for number in sorted(used)),
            scratch or Scratch(),
            (rows.ctypes.data, len(rows), columns.ctypes.data, len(columns)),
        )

    def pack(
        self,
        slots: Sequence[int],
        seeds: NDArray[np.uint64],
        memory: NDArray[np.uint8],
        places: NDArray[np.int64] | None = None,
    ) -> NDArray[np.uint64]:
        """Packs blocks into `memory`; returns their cell sums, of shape [blocks, cells]."""
        numbers, places = self._checked(slots, seeds, memory, places)
        sums = np.empty((len(numbers), self.cell_count), dtype=np.uint64)
        PARTS.pack(
            *(*self.tables, numbers.ctypes.data, seeds.ctypes.data, len(numbers)),
            *(memory.ctypes.data, places.ctypes.data, sums.ctypes.data, self.cell_count),
            self.scratch.room(self.block_bytes).ctypes.data,
        )
        return sums

    def pack_in_a_row(self, table: BlockTable, memory: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """Does what `pack` does for blocks one after the other, whose table is made once."""
        count, size = len(table.slots), self.block_bytes
        self._require_in_a_row(memory, count)
        sums = np.empty((count, self.cell_count), dtype=np.uint64)
        PARTS.pack(
            *(*self.tables, table.slots_address, table.seeds_address, count),
            *(_address(memory), table.places_address(size), _address(sums), self.cell_count),
            _address(self.scratch.room(size)),
        )
        return sums

    def put_away(
        self,
        memory: NDArray[np.uint8],
        seeds: NDArray[np.uint64],
        expected: NDArray[np.uint64],
        slots: Sequence[int],
        places: NDArray[np.int64] | None = None,
    ) -> int | None:
        """Unpacks blocks one after the other; returns the number of the first corrupt one.

        It and those after it are not unpacked. Each byte of `memory` is read once.
        """
        numbers, places = self._checked(slots, seeds, memory, places)
        sums = np.ascontiguousarray(expected, dtype=np.uint64)
        if sums.shape != (len(numbers), self.cell_count):
            raise ValueError(
                f"expected has shape {list(sums.shape)}, must have "
                f"{[len(numbers), self.cell_count]}: blocks and cells"
            )
        found = np.empty(self.cell_count, dtype=np.uint64)
        first_bad: int = PARTS.put_away(
            *(*self.tables, numbers.ctypes.data, seeds.ctypes.data, len(numbers)),
            *(memory.ctypes.data, places.ctypes.data, sums.ctypes.data, found.ctypes.data),
            *(self.cell_count, self.scratch.room(self.block_bytes).ctypes.data),
        )
        return None if first_bad < 0 else first_bad

    def job_of_put_away(
        self, memory: NDArray[np.uint8], table: BlockTable, sums: bytes, room: JobRoom
    ) -> tuple[int | bytes, ...]:
        """The arguments of the compiled function for a thread, all of which the caller keeps."""
        count, size = len(table.slots), self.block_bytes
        self._require_in_a_row(memory, count)
        if len(sums) != count * self.cell_count * SUM_BYTES:
            raise ValueError(
                f"sums have {len(sums)} bytes, must have {count * self.cell_count * SUM_BYTES}: "
                f"{count} blocks of {self.cell_count} cells"
            )
        return (
            *(*self.tables, table.slots_address, table.seeds_address, count),
            *(_address(memory), table.places_address(size), _native(sums), room.found_address),
            *(self.cell_count, room.scratch_address),
        )

    def _require_in_a_row(self, memory: NDArray[np.uint8], count: int) -> None:
        size = self.block_bytes
        if len(memory) != count * size or not memory.flags.c_contiguous:
            raise ValueError(
                f"memory has {len(memory)} bytes, must be {count * size} without gaps: {count} "
                f"blocks of {size}"
            )

    def _checked(
        self,
        slots: Sequence[int],
        seeds: NDArray[np.uint64],
        memory: NDArray[np.uint8],
        places: NDArray[np.int64] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Checks bounds, since compiled code does not; returns slots and places as arrays."""
        numbers = _numbers(tuple(slots))
        count, size = len(numbers), self.block_bytes
        if places is None:
            places = _places(count, size)
            if len(memory) != count * size:
                raise ValueError(
                    f"memory has {len(memory)} bytes, {count} blocks of {size} bytes each need "
                    f"{count * size}"
                )
        elif count and not 0 <= places.min() <= places.max() <= len(memory) - size:
            raise ValueError(f"places {places} are not all within {len(memory)} bytes of memory")
        if len(seeds) != count or len(places) != count:
            raise ValueError(
                f"{count} slots, {len(seeds)} seeds and {len(places)} places, must be as many"
            )
        for name, array in (("memory", memory), ("seeds", seeds), ("places", places)):
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} has gaps, must be numbers along one axis without any")
        return numbers, places


def _address(array: NDArray[Any]) -> int:
    # `array.ctypes` makes two objects for it, and takes twice as long.
    found: int = array.__array_interface__["data"][0]
    return found


class PackedSums:
    """The cell sums of packed blocks where they lie, under two salts in one pass.

    For blocks that come from a store: one salt is that of the sums they were stored with, the
    other that of the life they come into. Any thread may call it; compiled code runs without the
    interpreter's lock.
    """

    def __init__(self, layout: Layout, algorithm: Algorithm) -> None:
        self.block_bytes = layout.block_bytes
        self._segments = np.array(
            [
                (
                    *(segment.start, segment.length),
                    place_number(layer=cell.layer, plane=segment.plane.role, head=cell.head),
                    *(number, 0, segment.local_head),
                )
                for number, cell in enumerate(layout.cells)
                for segment in cell.segments
            ],
            dtype=np.int64,
        )
        self._cell_count = len(layout.cells)
        # NumPy takes a microsecond or two for each address.
        self.table = self._segments.ctypes.data, len(self._segments)
        """Of segments, for compiled code."""
        self.is_mix64 = algorithm is Algorithm.MIX64

    def sum_pairs(
        self,
        memory: NDArray[np.uint8],
        places: NDArray[np.int64],
        keys: Sequence[bytes],
        salts: tuple[int | NDArray[np.uint64], int],
    ) -> NDArray[np.uint64]:
        """The sums under both salts, of shape [2, blocks, cells]; each block may have its own."""
        count = len(keys)
        if len(places) != count:
            raise ValueError(f"{len(places)} places and {count} keys, must be as many")
        if count and not 0 <= places.min() <= places.max() <= len(memory) - self.block_bytes:
            raise ValueError(f"places {places} are not all within {len(memory)} bytes of memory")
        if not memory.flags.c_contiguous or not places.flags.c_contiguous:
            raise ValueError("memory or places has gaps, must be one run of bytes or numbers")
        seeds = np.empty((2, count), dtype=np.uint64)
        seeds[0], seeds[1] = salts
        sums = np.empty((2, count, self._cell_count), dtype=np.uint64)
        seeds ^= np.array(key_seeds(keys), dtype=np.uint64)
        PARTS.sum_pairs(
            *(*self.table, seeds.ctypes.data, count),
            *(memory.ctypes.data, places.ctypes.data, sums.ctypes.data, self._cell_count),
            self.is_mix64,
        )
        return sums

    def take(
        self,
        theirs: NDArray[np.uint8],
        here: NDArray[np.uint8],
        places: NDArray[np.int64],
        keys: Sequence[bytes],
        salts: tuple[int, int],
    ) -> NDArray[np.bool_]:
        """Copies blocks of another's memory, and their sums under the second salt; which are right.

        Their memory has their sums under the first salt, and may change meanwhile. `places` has for
        each block where it and its sums lie there, and where both go here.
        """
        count, size = len(keys), self._cell_count * SUM_BYTES
        lengths = (self.block_bytes, size, self.block_bytes, size)
        if places.shape != (count, len(lengths)) or not places.flags.c_contiguous:
            raise ValueError(f"places have shape {list(places.shape)}, must be {[count, 4]}")
        for column, length in enumerate(lengths):
            memory = theirs if column < 2 else here
            one = places[:, column]
            if count and not 0 <= one.min() <= one.max() <= len(memory) - length:
                raise ValueError(f"places {one} are not all within {len(memory)} bytes of memory")
        if not (theirs.flags.c_contiguous and here.flags.c_contiguous and here.flags.writeable):
            raise ValueError("memory has gaps or cannot be written, must be one run of bytes")
        seeds = np.empty((2, count), dtype=np.uint64)
        seeds[0], seeds[1] = salts
        seeds ^= np.array(key_seeds(keys), dtype=np.uint64)
        room = np.empty(2 * self._cell_count, dtype=np.uint64)
        right = np.zeros(count, dtype=np.bool_)
        PARTS.take_blocks(
            *(*self.table, seeds.ctypes.data, count, theirs.ctypes.data, here.ctypes.data),
            *(places.ctypes.data, self._cell_count, self.is_mix64),
            *(room.ctypes.data, right.ctypes.data),
        )
        return right


def _strip_of(plane: Plane, buffers: Mapping[int, NDArray[np.uint8]]) -> tuple[int, ...] | None:
    """The strides of a plane for `parts.c`; `None` if it has more than these."""
    inner = [dim for dim in plane.wide_dims if dim.axis in {Axis.TOKEN, Axis.CHANNEL}]
    row_bytes = plane.dtype.itemsize
    while inner and inner[-1].stride == row_bytes:
        row_bytes *= inner.pop().size
    rows, row_stride = 1, row_bytes
    for dim in reversed(inner):
        if rows > 1 and dim.stride != rows * row_stride:
            return None
        row_stride = dim.stride if rows == 1 else row_stride
        rows *= dim.size
    head_stride = plane.dims[1].stride if plane.has_heads else 0
    address = buffers[plane.buffer].ctypes.data + plane.offset
    return (
        *(address, plane.block_stride, plane.heads, head_stride),
        *(rows, row_stride, row_bytes),
    )


class BlockTable:
    """Slots and seeds of some blocks for compiled code: the same for every layer of a prompt.

    Raises:
        ValueError: there are more keys than slots, or fewer.
    """

    def __init__(self, keys: tuple[bytes, ...], slots: tuple[int, ...]) -> None:
        if len(keys) != len(slots):
            given = f"{counted(len(slots), 'slot')} and {counted(len(keys), 'key')}"
            raise ValueError(f"{given}, must be as many")
        self.slots, self._seeds = _numbers(slots), seeds_of(keys)
        # NumPy takes a microsecond or two for each address.
        self.slots_address = self.slots.ctypes.data
        self.seeds_address = self._seeds.ctypes.data
        self._places: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def places_address(self, block_bytes: int) -> int:
        """Where each block begins, one after the other."""
        found = self._places.get(block_bytes)
        if found is None:
            places = _places(len(self.slots), block_bytes)
            found = self._places[block_bytes] = (places.ctypes.data, places)
        return found[0]


class JobRoom:
    """Private memory of a thread in which it sums blocks of one size, one after the other."""

    def __init__(self, block_bytes: int, cell_count: int) -> None:
        self._kept = Scratch().room(block_bytes), np.empty(cell_count, dtype=np.uint64)
        self.scratch_address, self.found_address = (each.ctypes.data for each in self._kept)


block_table = lru_cache(maxsize=PROMPTS_KEPT)(BlockTable)
"""The table of some blocks, made once."""


def _native(sums: bytes) -> bytes:
    """Sums in the byte order of this machine."""
    if sys.byteorder == "little":
        return sums
    return np.frombuffer(sums, dtype="<u8").astype(np.uint64).tobytes()


@lru_cache(maxsize=PROMPTS_KEPT)
def _places(count: int, size: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * size


@lru_cache(maxsize=PROMPTS_KEPT)
def seeds_of(keys: tuple[bytes, ...]) -> NDArray[np.uint64]:
    """The seed of each key, from which those of its cells are computed."""
    return np.array([key_seed(key) for key in keys], dtype=np.uint64)


@lru_cache(maxsize=PROMPTS_KEPT)
def _numbers(slots: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(slots, dtype=np.int64)


JOBS_MAX = 64
"""Jobs whose end was not collected; `put_away_thread.c` has the same number."""


class PutAwayThread:
    """The thread of one rank; it starts with the first job."""

    def __init__(self) -> None:
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
        if not PARTS.thread_submit(self._handle, *arguments):
            raise UnavailableError(f"{JOBS_MAX} parts are being put away, and no more fit")
        self._under_way.append((packing, memory, table, arguments))

    def ended(self) -> list[bool]:
        """Whether each part was intact, of those that have ended since; never waits."""
        if not self._under_way:
            return []
        count: int = PARTS.thread_collect(self._handle, self._results)
        for _ in range(count):
            self._under_way.popleft()
        return [first_bad < 0 for first_bad in self._results[:count]]

    def close(self) -> None:
        """Ends the thread after its last job: it touches nothing any more. Twice does no harm."""
        self._stop()
        self._under_way.clear()

    def _start(self) -> None:
        handle = PARTS.thread_start(self._bell)
        if not handle:
            raise UnavailableError("no thread can be started to put parts away")
        self._handle = handle
        self._stop.detach()
        self._stop = self._stop_later()

    def _stop_later(self) -> weakref.finalize[[int, int, int], PutAwayThread]:
        # Also at the end of the process: it must not write to memory that the interpreter frees.
        return weakref.finalize(self, _stop, self._handle, self._bell, os.getpid())


def _stop(handle: int, bell: int, owner: int) -> None:
    if handle and os.getpid() == owner:  # A fork has the memory, but not the thread.
        PARTS.thread_stop(handle)
    os.close(bell)
