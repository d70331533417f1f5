"""Parts out of and into memory of the CPU: packed, summed, verified and put away.

    ArrayReader, PartGather:   slots of the source ──→ packed bytes, and their cell sums
    ArrayTaker, PartScatter:   packed bytes, verified ──→ slots of the target

Compiled code does it in one pass, block by block (`movers/packing.py`). Where that cannot be had,
and for blocks of different sizes, NumPy goes through a part in pieces of some megabytes.
Consecutive slots are copied in one call, and no Python runs for a single cell. Both give the same
bytes and sums. Compiled code may run in a thread of its own (`open_array_taker`).

Packed bytes lie in memory that other processes can write at any time. So a piece is packed and
summed in memory of this process before it is copied there, and copied from there before it is
verified and put away.

Two rules: what is summed is memory of this process alone, and each byte outside is written once
or read once; no byte is put away before the piece it is in was found intact.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.handoff.driver.parts import plane_pairs, windows_of
from penstock.movers.packing import Packing, Scratch, load_parts_library, seeds_of
from penstock.movers.put_away_thread import PutAwayThread
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.narrowing import narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.handoff.driver.parts import PartForm, RouteParts
    from penstock.handoff.protocol.effects import Take
    from penstock.handoff.protocol.identity import WriteId
    from penstock.movers.packing import PartsLibrary
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane

PIECE_BYTES = 2 << 20
"""Packed and summed at a time. Smaller pieces take more calls, larger ones leave the caches before
they are copied on: 0.5 to 4 MiB were tried."""
_SMALL_BYTES = 8192
"""Of a plane's block. So little is copied by one call for all slots, through a second copy."""


class _ArrayPlane(NamedTuple):
    """One plane in its packed block, and in the slots of a tier."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    slots: NDArray[Any]
    is_small: bool
    """Whether calls cost more than a second copy."""

    def packed(self, memory: NDArray[np.uint8], count: int, block_bytes: int) -> NDArray[Any]:
        """The plane in `count` packed blocks, with the axes that it has in the slots."""
        view: NDArray[Any] = np.ndarray(
            (count, *self.shape),
            self.slots.dtype,
            memory.data,
            self.offset,
            (block_bytes, *self.strides),
        )
        return view.reshape(count, *self.slots.shape[1:])


class PartGather:
    """Packs blocks of one form out of a tier, prepared once.

    Args:
        form: of the parts.
        tier: where the slots are.
        algorithm: of the sums.
        library: how to get at the compiled code.
        scratch: memory for pieces, shared with others of the same thread.
    """

    def __init__(
        self,
        form: PartForm,
        tier: SlotStore,
        algorithm: Algorithm,
        *,
        library: Callable[[], PartsLibrary | None] = load_parts_library,
        scratch: Scratch | None = None,
    ) -> None:
        self._form = form
        self._algorithm = algorithm
        self._pairs: list[_ArrayPlane] = []
        self._scratch = scratch or Scratch()
        self._packing: Packing | None = None
        if form.packed is not None:
            source = narrow(tier.layout, form.source_cuts)
            self._pairs = _planes(form.packed, source, tier)
            buffers = tier.blocks(()).buffers
            self._packing = Packing.of(
                source, buffers, algorithm, library=library, scratch=self._scratch
            )
        self._step = max(1, PIECE_BYTES // max(1, form.block_bytes))

    def gather(
        self, slots: Sequence[int], keys: Sequence[bytes], memory: NDArray[np.uint8]
    ) -> bytes:
        """Packs blocks into `memory`, and returns their cell sums, eight bytes each."""
        span, size = self._form.span, self._form.block_bytes
        if span is None:
            return b""
        if self._packing is not None:
            found = self._packing.pack(slots, seeds_of(tuple(keys)), memory)
            return found.astype("<u8", copy=False).tobytes()
        sums = []
        for first in range(0, len(slots), self._step):
            some = slots[first : first + self._step]
            piece = self._scratch.room(len(some) * size)
            runs = _runs(some)
            for pair in self._pairs:
                packed = pair.packed(piece, len(some), size)
                if pair.is_small and len(runs) > 1:
                    packed[:] = pair.slots[list(some)]
                    continue
                for here, there, count in runs:
                    packed[here : here + count] = pair.slots[there : there + count]
            blocks = piece.reshape(len(some), size)
            sums.append(span.sum_blocks(blocks, keys[first : first + len(some)], self._algorithm))
            memory[first * size : (first + len(some)) * size] = piece
        return b"".join(table.astype("<u8", copy=False).tobytes() for table in sums)


class PartScatter:
    """Verifies packed blocks of one form and puts them away into a tier, prepared once.

    Arguments as of `PartGather`; `parts` is the route.
    """

    def __init__(
        self,
        parts: RouteParts,
        form: PartForm,
        tier: SlotStore,
        algorithm: Algorithm,
        *,
        library: Callable[[], PartsLibrary | None] = load_parts_library,
        scratch: Scratch | None = None,
    ) -> None:
        self._form = form
        self._algorithm = algorithm
        self._source_ratio = parts.source_ratio
        self._target_ratio = parts.target_ratio
        self._windows: list[list[_ArrayPlane]] = []
        self._scratch = scratch or Scratch()
        self._packing: Packing | None = None
        if form.packed is not None:
            target = narrow(tier.layout, form.target_cuts)
            for packed, narrowed in windows_of(form.packed, target):
                self._windows.append(_planes(packed, narrowed, tier))
            if self._source_ratio == self._target_ratio == 1:
                buffers = tier.blocks(()).buffers
                self._packing = Packing.of(
                    target, buffers, algorithm, library=library, scratch=self._scratch
                )
        unit_bytes = form.block_bytes * self._source_ratio
        self._step = max(1, PIECE_BYTES // max(1, unit_bytes))

    def scatter(
        self,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        sums: bytes,
        slots: Sequence[int],
    ) -> bool:
        """Puts packed blocks away, piece by piece; `False` at the first that is not intact."""
        span, size = self._form.span, self._form.block_bytes
        if span is None:
            return not sums
        given = self._table_of(sums, keys)
        if given is None:
            return False
        if self._packing is not None:
            seeds = seeds_of(tuple(keys))
            return self._packing.put_away(memory, seeds, given, slots) is None
        step, targets = self._step * self._source_ratio, self._step * self._target_ratio
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            piece = self._scratch.room(len(some) * size)
            piece[:] = memory[first * size : (first + len(some)) * size]
            found = span.sum_blocks(piece.reshape(len(some), size), some, self._algorithm)
            if not np.array_equal(found, given[first : first + len(some)]):
                return False
            at = first // self._source_ratio * self._target_ratio
            self._put_away(piece, len(some), slots[at : at + targets])
        return True

    def begin(
        self,
        thread: PutAwayThread,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        sums: bytes,
        slots: Sequence[int],
    ) -> bool:
        """Has a thread do what `scatter` does; `False` where that cannot be done by one."""
        if self._packing is None or len(sums) != len(keys) * self._form.cell_count * SUM_BYTES:
            return False
        thread.submit(self._packing, memory, tuple(keys), sums, tuple(slots))
        return True

    def _table_of(self, sums: bytes, keys: Sequence[bytes]) -> NDArray[np.uint64] | None:
        """The sums by block and cell; nothing if there are more or fewer."""
        cells = self._form.cell_count
        if len(sums) != len(keys) * cells * SUM_BYTES:
            return None
        return np.frombuffer(sums, dtype="<u8").reshape(len(keys), cells)

    def _put_away(self, piece: NDArray[np.uint8], count: int, slots: Sequence[int]) -> None:
        ratio = len(self._windows)
        for window, pairs in enumerate(self._windows):
            for pair in pairs:
                packed = pair.packed(piece, count, self._form.block_bytes)
                some = slots
                if self._source_ratio > 1:
                    packed = packed[window::ratio]
                    some = slots[: len(packed)]
                elif self._target_ratio > 1:
                    # The prompt may end inside the last block of the source.
                    some = slots[window::ratio]
                    packed = packed[: len(some)]
                runs = _runs(some)
                if pair.is_small and len(runs) > 1:
                    pair.slots[list(some)] = packed
                    continue
                for here, there, length in runs:
                    pair.slots[there : there + length] = packed[here : here + length]


class ArrayReader:
    """Packs parts on the CPU; each is done when `read` returns."""

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._gathers: dict[PartForm, PartGather] = {}
        self._scratch = Scratch()

    def read(
        self,
        write: WriteId,  # noqa: ARG002 - it has ended before anybody can name it
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: NDArray[np.uint8],
    ) -> bytes | None:
        gather = self._gathers.get(form)
        if gather is None:
            gather = PartGather(form, self._tier, self._algorithm, scratch=self._scratch)
            self._gathers[form] = gather
        return gather.gather(slots, keys, memory)

    @property
    def has_room(self) -> bool:
        return True

    def ended(self) -> list[tuple[WriteId, bytes]]:
        return []

    def forget(self, write: WriteId) -> None:
        """Nothing stays under way."""

    @property
    def busy(self) -> bool:
        return False


class ArrayTaker:
    """Takes parts on the CPU.

    Args:
        tier: where the slots are.
        algorithm: of the sums.
        thread: verifies parts and puts them away; the taker closes it. Without one, and for
            parts that compiled code cannot do, each is done when `take` returns.
    """

    def __init__(
        self, tier: SlotStore, algorithm: Algorithm, *, thread: PutAwayThread | None = None
    ) -> None:
        self.slot_count = tier.slot_count
        self._tier = tier
        self._algorithm = algorithm
        self._scatters: dict[PartForm, PartScatter] = {}
        self._scratch = Scratch()
        self._thread = thread
        self._taking: deque[Take] = deque()
        """What the thread has to do, in its order."""

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: NDArray[np.uint8],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        scatter = self._scatters.get(form)
        if scatter is None:
            scatter = PartScatter(route, form, self._tier, self._algorithm, scratch=self._scratch)
            self._scatters[form] = scatter
        if self._thread is not None and scatter.begin(self._thread, memory, keys, take.sums, slots):
            self._taking.append(take)
            return None
        return scatter.scatter(memory, keys, take.sums, slots)

    @property
    def has_room(self) -> bool:
        return self._thread is None or self._thread.has_room

    def ended(self) -> list[tuple[Take, bool]]:
        if self._thread is None:
            return []
        return [(self._taking.popleft(), intact) for intact in self._thread.ended()]

    @property
    def busy(self) -> bool:
        return bool(self._taking)

    @property
    def descriptor(self) -> int | None:
        return None if self._thread is None else self._thread.descriptor

    def close(self) -> None:
        """Ends the thread: nothing touches areas or slots after this."""
        if self._thread is not None:
            self._thread.close()


def open_array_taker(tier: SlotStore, algorithm: Algorithm) -> ArrayTaker:
    """A taker with a thread of its own, where there is compiled code for one."""
    library = load_parts_library()
    thread = None if library is None else PutAwayThread(library)
    return ArrayTaker(tier, algorithm, thread=thread)


def _planes(packed: Layout, narrowed: Layout, tier: SlotStore) -> list[_ArrayPlane]:
    buffers = tier.blocks(()).buffers
    return [
        _plane(read, write, buffers[write.buffer]) for read, write in plane_pairs(packed, narrowed)
    ]


def _plane(packed: Plane, plane: Plane, buffer: NDArray[np.uint8]) -> _ArrayPlane:
    seen = packed.view(np.empty(packed.end, dtype=np.uint8))
    slots = plane.view(buffer)
    small = slots[:1].nbytes < _SMALL_BYTES
    return _ArrayPlane(packed.offset, seen.shape[1:], seen.strides[1:], slots, small)


def _runs(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive slots: where they begin in the list, their first, how many."""
    found = []
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            found.append((first, slots[first], at - first))
            first = at
    return found
