"""Parts by compiled code: packed and summed, or verified and put away, in one call each.

`parts.c` does what `moving.py` does with NumPy and one XXH3 call a segment, segment by segment
while the bytes are in the first cache, so that a part takes one pass over memory on each side.
It is compiled at first use, like the calls of the CUDA movers; where that cannot be done, or a
form is not of the plain kind, NumPy does it: slower, with the same bytes and sums.

The one rule: addresses are handed out only of memory that is kept alive here, and only for slots
that the caller has checked.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import UnavailableError
from penstock.movers.compiling import cache_folder, compiled
from penstock.vocabulary.checksums import Algorithm, key_seed, place_number
from penstock.vocabulary.planes import Axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

logger = logging.getLogger(__name__)

LENGTH_MIN = 241
"""Shorter segments are summed in another way, which `parts.c` does not know."""
PROMPTS_KEPT = 64
"""Lists of slots and keys whose arrays are kept: every layer of a prompt has the same."""


class PartsLibrary:
    """The compiled functions."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise UnavailableError(f"compiled packing cannot be loaded: {error}") from error
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        tables = (pointer, number, pointer, number)
        blocks = (*tables, pointer, pointer, number, pointer, number)
        self.pack = loaded.penstock_pack
        self.pack.argtypes = (*blocks, pointer, number)
        self.pack.restype = None
        self.put_away = loaded.penstock_put_away
        self.put_away.argtypes = (*blocks, pointer, pointer, number)
        self.put_away.restype = number


@cache
def load_parts_library() -> PartsLibrary | None:
    """The library of this machine, compiled if it has to be; nothing where it cannot be had."""
    source = files(__package__).joinpath("parts.c").read_bytes()
    folder = cache_folder()
    try:
        if folder is not None:
            return PartsLibrary(compiled("parts", source, folder))
        with tempfile.TemporaryDirectory(prefix="penstock-") as made_here:
            return PartsLibrary(compiled("parts", source, Path(made_here)))
    except UnavailableError as error:
        logger.warning("parts are packed by NumPy, which takes longer: cause=%s", error)
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the segments of one form lie in the slots of a tier, for `parts.c`."""

    library: PartsLibrary
    strips: NDArray[np.int64]
    """One row for each plane, as it lies in slots."""
    segments: NDArray[np.int64]
    """One row for each plane and head, as it is summed."""
    block_bytes: int
    cell_count: int
    kept: tuple[NDArray[np.uint8], ...]
    """The memory behind the addresses."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        buffers: Mapping[int, NDArray[np.uint8]],
        algorithm: Algorithm,
        *,
        library: PartsLibrary | None,
    ) -> Packing | None:
        """The packing of the blocks of a layout; nothing where NumPy has to do it."""
        if library is None or algorithm is not Algorithm.XXH3:
            return None
        strips: list[tuple[int, ...]] = []
        segments: list[tuple[int, ...]] = []
        strip_numbers: dict[Plane, int] = {}
        for number, cell in enumerate(layout.cells):
            for segment in cell.segments:
                if segment.length < LENGTH_MIN:
                    return None
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
        return cls(
            library,
            np.array(strips, dtype=np.int64),
            np.array(segments, dtype=np.int64),
            layout.block_bytes,
            len(layout.cells),
            tuple(buffers[number] for number in sorted(used)),
        )

    @property
    def _tables(self) -> tuple[int, int, int, int]:
        strips, segments = self.strips, self.segments
        return strips.ctypes.data, len(strips), segments.ctypes.data, len(segments)

    def pack(
        self, slots: Sequence[int], keys: Sequence[bytes], memory: NDArray[np.uint8]
    ) -> NDArray[np.uint64]:
        """Packs blocks into `memory`; their cell sums, of shape [blocks, cells]."""
        numbers, seeds = _numbers(tuple(slots)), _seeds(tuple(keys))
        self._require_room(memory, len(numbers), len(seeds))
        sums = np.empty((len(numbers), self.cell_count), dtype=np.uint64)
        self.library.pack(
            *(*self._tables, numbers.ctypes.data, seeds.ctypes.data),
            *(len(numbers), memory.ctypes.data, self.block_bytes, sums.ctypes.data),
            self.cell_count,
        )
        return sums

    def put_away(
        self,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        told: NDArray[np.uint64],
        slots: Sequence[int],
    ) -> bool:
        """Puts blocks away, one after the other; `False` at the first that is not intact."""
        numbers, seeds = _numbers(tuple(slots)), _seeds(tuple(keys))
        self._require_room(memory, len(numbers), len(seeds))
        sums = np.ascontiguousarray(told, dtype=np.uint64)
        found = np.empty(self.cell_count, dtype=np.uint64)
        first_bad: int = self.library.put_away(
            *(*self._tables, numbers.ctypes.data, seeds.ctypes.data),
            *(len(numbers), memory.ctypes.data, self.block_bytes, sums.ctypes.data),
            *(found.ctypes.data, self.cell_count),
        )
        return first_bad < 0

    def _require_room(self, memory: NDArray[np.uint8], count: int, keys: int) -> None:
        if count != keys or len(memory) != count * self.block_bytes:
            raise ValueError(
                f"memory has {len(memory)} bytes, {count} slots and {keys} keys of "
                f"{self.block_bytes} bytes each need {count * self.block_bytes}"
            )
        if not memory.flags.c_contiguous:
            raise ValueError("memory has gaps, must be bytes along one axis without any")


def _strip_of(plane: Plane, buffers: Mapping[int, NDArray[np.uint8]]) -> tuple[int, ...] | None:
    """How a plane lies in slots, as `parts.c` has it; nothing if it does not lie so plainly."""
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


@lru_cache(maxsize=PROMPTS_KEPT)
def _seeds(keys: tuple[bytes, ...]) -> NDArray[np.uint64]:
    return np.array([key_seed(key) for key in keys], dtype=np.uint64)


@lru_cache(maxsize=PROMPTS_KEPT)
def _numbers(slots: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(slots, dtype=np.int64)
