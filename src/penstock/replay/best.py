"""The most that any eviction policy could have found: Belady's rule, with bypass.

With `capacity` blocks and the whole future known, the block that is needed farthest ahead leaves
first, and a block that is needed later than all others is not kept at all. Requests need prefixes,
so a block is needed no later than the blocks after it: what leaves is always the end of a chain,
and the rule is the best that there is for prefixes, too.

The cache need not be simulated. All blocks whose next use is request `q` are found there together,
so it is enough to count, for each later request, how many blocks are kept for it.

Which request needs a block next is known at the end of a trace only. So that memory does not grow
with its blocks, the uses of each are brought together in a temporary file.
"""

from __future__ import annotations

import tempfile
import weakref
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

    from numpy.typing import NDArray

    from penstock.vocabulary.ids import Key

ROWS_IN_MEMORY = 1 << 20
"""Uses of blocks, of 16 bytes, before any are written: the shipped traces need no file."""
_PART_COUNT = 256
"""The file is read in so many parts: of a billion uses, 64 MB at a time."""
_PIECES_AT_ONCE = 1 << 16
_STALE_MIN = 64


class BestPossible:
    """Takes the requests of a trace in, then says what could have been found in a given room.

    A block is known by 64 bits of its key: among 30 million, two are the same one in 40,000 times.
    What is kept in memory are some 12 bytes for each pair of requests that have blocks in common.

    Args:
        rows_in_memory: uses of blocks that are kept before any are written to a file.
    """

    def __init__(self, *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self._count = 0
        self._rows_in_memory = rows_in_memory
        self._uses = _Shelf(2, rows_in_memory, lambda rows: rows[:, 0] >> np.uint64(56))
        """Rows of a block and a request that has it, times two; plus one if it may be found."""
        self._pieces: tuple[NDArray[np.uint64], NDArray[np.uint32]] | None = None

    def add(self, keys: Sequence[Key], useful: int) -> None:
        """One more request; only the first `useful` of its blocks may be found."""
        rows = np.empty((len(keys), 2), dtype=np.uint64)
        rows[:, 0] = np.fromiter(map(xxh3_64_intdigest, keys), dtype=np.uint64, count=len(keys))
        rows[:, 1] = 2 * self._count
        rows[:useful, 1] += np.uint64(1)
        self._uses.add(rows)
        self._count += 1

    def found(self, capacity: int) -> int:
        """How many blocks could have been found by all requests together."""
        pieces = self._in_order()
        found = size = 0
        kept: dict[int, int] = {}
        farthest: list[int] = []
        piece = next(pieces, None)
        for number in range(self._count):
            ready = kept.pop(number, 0)
            found += ready
            size -= ready
            while piece is not None and piece[0] == number:
                _, later, blocks = piece
                if later not in kept:
                    heappush(farthest, -later)
                kept[later] = kept.get(later, 0) + blocks
                size += blocks
                piece = next(pieces, None)
            while size > capacity:
                later = -farthest[0]
                gone = min(size - capacity, kept.get(later, 0))
                size -= gone
                if gone < kept.get(later, 0):
                    kept[later] -= gone
                else:
                    kept.pop(later, None)
                    heappop(farthest)
            if len(farthest) > 2 * len(kept) + _STALE_MIN:
                farthest = [-later for later in kept]
                heapify(farthest)
        return found

    def _in_order(self) -> Iterator[tuple[int, int, int]]:
        """Of the blocks that one request had last, how many another one needs next."""
        if self._pieces is None:
            self._pieces = self._gather()
        pairs, blocks = self._pieces
        for first in range(0, len(pairs), _PIECES_AT_ONCE):
            part = pairs[first : first + _PIECES_AT_ONCE]
            yield from zip(
                (part >> np.uint64(32)).tolist(),
                (part & np.uint64(0xFFFFFFFF)).tolist(),
                blocks[first : first + _PIECES_AT_ONCE].tolist(),
                strict=True,
            )

    def _gather(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Pairs of requests, the earlier one first and in order, and their numbers of blocks."""
        share = np.uint64(self._count // _PART_COUNT + 1)
        nexts = _Shelf(1, self._rows_in_memory, lambda rows: (rows[:, 0] >> np.uint64(32)) // share)
        for rows in self._uses.parts():
            order = np.argsort(rows[:, 0], kind="stable")
            names, uses = rows[order, 0], rows[order, 1]
            again = (names[1:] == names[:-1]) & (uses[1:] & np.uint64(1) == 1)
            # A key that occurs twice in a request is no later use.
            again &= uses[1:] >> np.uint64(1) != uses[:-1] >> np.uint64(1)
            before, after = uses[:-1][again] >> np.uint64(1), uses[1:][again] >> np.uint64(1)
            nexts.add((before << np.uint64(32) | after).reshape(-1, 1))
        self._uses.clear()
        counted = [np.unique(rows[:, 0], return_counts=True) for rows in nexts.parts()]
        nexts.clear()
        pairs = np.concatenate([each for each, _ in counted])
        return pairs, np.concatenate([count for _, count in counted]).astype(np.uint32)


class _Shelf:
    """Rows of numbers, in memory while they are few, then in parts of a temporary file."""

    def __init__(
        self,
        width: int,
        rows_in_memory: int,
        part_of: Callable[[NDArray[np.uint64]], NDArray[np.uint64]],
    ) -> None:
        self._width = width
        self._rows_in_memory = rows_in_memory
        self._part_of = part_of
        """The part that each of some rows belongs to."""
        self._rows: list[NDArray[np.uint64]] = []
        self._row_count = 0
        self._file: IO[bytes] | None = None
        self._written: list[tuple[int, list[int]]] = []
        """What was written together: where, and the rows before each part's."""

    def add(self, rows: NDArray[np.uint64]) -> None:
        """More rows; each part has its rows in the order in which they came."""
        self._rows.append(rows)
        self._row_count += len(rows)
        if self._row_count >= self._rows_in_memory:
            self._write()

    def parts(self) -> Iterator[NDArray[np.uint64]]:
        """All rows: those of a part together, the parts in their order."""
        if self._file is None:
            yield np.concatenate([np.empty((0, self._width), np.uint64), *self._rows])
            return
        self._write()
        for part in range(_PART_COUNT):
            yield np.concatenate([self._read(at, places, part) for at, places in self._written])

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows, self._row_count, self._written = [], 0, []
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        rows = np.concatenate([np.empty((0, self._width), np.uint64), *self._rows])
        self._rows, self._row_count = [], 0
        parts = self._part_of(rows)
        order = np.argsort(parts, kind="stable")
        places = np.searchsorted(parts[order], np.arange(_PART_COUNT + 1, dtype=np.uint64))
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115 - kept until `clear`
                weakref.finalize(self, self._file.close)
            at = self._file.seek(0, 2)
            self._file.write(rows[order].tobytes())
        except OSError as error:
            raise UnavailableError(
                f"the bound needs {rows.nbytes} bytes more in {tempfile.gettempdir()}: "
                f"{error.strerror or error}; set TMPDIR to a folder with room, or use --no-best"
            ) from error
        self._written.append((at, places.tolist()))

    def _read(self, at: int, places: list[int], part: int) -> NDArray[np.uint64]:
        assert self._file is not None
        row_bytes = 8 * self._width
        self._file.seek(at + places[part] * row_bytes)
        found = self._file.read((places[part + 1] - places[part]) * row_bytes)
        return np.frombuffer(found, dtype=np.uint64).reshape(-1, self._width)
