"""Which bytes a part consists of; and parts out of and into memory of the CPU, summed and verified.

    source slots ──gather──→ packed part + sums ──verify──→ ──scatter──→ target slots

A part is blocks of the source, narrowed to what the target holds. It travels packed as blocks of
the source, so its sums are those of the source's cells, seeded with the source's keys. Blocks of
another size at the target are split or joined when they are put away.

| medium          | packs (`PartReader`)           | takes (`PartTaker`)          |
|-----------------|--------------------------------|------------------------------|
| memory of a CPU | `ArrayReader`                  | `ArrayTaker`                 |
| CUDA, kernels   | `device_parts.DeviceReader`    | `device_parts.DeviceTaker`   |

The one rule: bytes are summed as they were read from slots, and put away only after the target has
copied them out of the berth and verified the copy.

    ArrayReader, PartGather:   slots of the source ──→ packed bytes, and their cell sums
    ArrayTaker, PartScatter:   packed bytes, verified ──→ slots of the target

Compiled code does it in one pass, block by block (`movers/packing.py`). For blocks of different
sizes, and sums other than XXH3, NumPy goes through a part in pieces of some megabytes.
Consecutive slots are copied in one call, and no Python runs for a single cell. Both give the same
bytes and sums. Parts are taken in a thread of compiled code (`PutAwayThread`).

Packed bytes lie in memory that other processes can write at any time. So a piece is packed and
summed in memory of this process before it is copied there, and copied from there before it is
verified and put away.

Two rules: what is summed is memory of this process alone, and each byte outside is written once
or read once; no byte is put away before the piece it is in was found intact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from penstock.movers.packing import (
    Packing,
    PutAwayThread,
    Scratch,
    block_table,
    seeds_of,
)
from penstock.transport.remote import NOTICE_BYTES_MAX
from penstock.vocabulary.checksums import SUM_BYTES, CellSpan
from penstock.vocabulary.layout import Cut, narrow, token_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.handoff.driver.device_parts import DeviceReader, DeviceTaker
    from penstock.handoff.protocol.effects import Take
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import WriteId
    from penstock.tiers.base import SlotStore
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Plane
    from penstock.vocabulary.reshard import ReshardPlan, Route


_NOTICE_ROOM = 1024
"""Bytes of a notice that are not sums: names, numbers and lengths."""
CELLS_MAX = (NOTICE_BYTES_MAX - _NOTICE_ROOM) // SUM_BYTES
"""A part has no more cells than this, since their sums travel in its notice."""
PART_FORMS_KEPT = 1024
"""Groups of layers whose arithmetic is kept for a route: more than models have layers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartForm:
    """What one block of the source is in a part of some layers."""

    source_cuts: tuple[Cut, ...]
    target_cuts: tuple[Cut, ...]
    packed: Layout | None
    """One block of the source, narrowed to the part; none if it has no bytes."""
    span: CellSpan | None
    block_bytes: int
    """Bytes of one block of the source; kept, since a layout counts them anew each time."""
    cell_count: int
    """Cells of one block of the source."""


class PartPlace(NamedTuple):
    """One part: its form, and which blocks of the prompt it holds."""

    form: PartForm
    source_blocks: range
    """Counted from the prompt's first block, in blocks of the source."""
    target_blocks: range
    """The same in blocks of the target."""
    size: int
    """Bytes of the part."""


class RouteParts:
    """The parts of all that one rank sends another."""

    def __init__(self, plan: ReshardPlan, route: Route, source: Form, target: Form) -> None:
        self.source_form = source
        self.target_form = target
        self.source_tokens = plan.source_tokens
        self.target_tokens = plan.target_tokens
        self.unit_tokens = plan.unit_tokens
        self.source_ratio = plan.unit_tokens // plan.source_tokens
        """Blocks of the source in a unit."""
        self.target_ratio = plan.unit_tokens // plan.target_tokens
        """Blocks of the target in a unit."""
        self._route = route
        touched = [layer for piece in route.pieces for layer in piece.layers]
        self.layers = range(min(touched), max(touched) + 1)
        """From the first to the last that the route touches."""
        self.form_of = lru_cache(maxsize=PART_FORMS_KEPT)(self._form_of)
        alone = [self._form_of(layer, layer + 1) for layer in self.layers]
        self._layer_bytes = tuple(form.block_bytes * self.source_ratio for form in alone)
        self.layer_bytes_max = max(self._layer_bytes)
        """Bytes of one unit in its largest layer."""
        self.cells_a_layer = max(form.cell_count for form in alone) * self.source_ratio
        """Cells of one unit in a layer, at most."""

    def window_of(self, window: int, block_count: int, slot_count: int) -> tuple[slice, slice]:
        """Which of some packed blocks, and which of the slots they go to, have a window in common.

        Blocks of the target may hold several of the source, or the other way round; the prompt
        may end inside the last block of the source.
        """
        if self.source_ratio > 1:
            blocks = slice(window, None, self.source_ratio)
            return blocks, slice(len(range(block_count)[blocks]))
        if self.target_ratio > 1:
            slots = slice(window, None, self.target_ratio)
            return slice(len(range(slot_count)[slots])), slots
        return slice(None), slice(None)

    def place(self, grid: Grid, part: int, token_count: int) -> PartPlace:
        """One part of a grid, for a prompt of `token_count` tokens."""
        layers, units = grid.spans_of(part)
        form = self.form_of(layers.start, layers.stop)
        # The last unit may be partly filled.
        source, target = self.source_ratio, self.target_ratio
        source_end = min(units.stop * source, -(-token_count // self.source_tokens))
        target_end = min(units.stop * target, -(-token_count // self.target_tokens))
        blocks = range(units.start * source, source_end)
        return PartPlace(
            form,
            blocks,
            range(units.start * target, target_end),
            len(blocks) * form.block_bytes,
        )

    def problem_of(self, grid: Grid, *, berth_bytes: int) -> str:
        """Why a grid that a peer claims does not fit this route; empty if it does."""
        wrong = grid.problem()
        if wrong:
            return wrong
        if grid.block_tokens != self.unit_tokens:
            return f"blocks of {grid.block_tokens} tokens, must be of {self.unit_tokens}"
        first, end = grid.layer_first, grid.layer_first + grid.layer_count
        if (first, end) != (self.layers.start, self.layers.stop):
            return f"layers {first} to {end - 1}, must be {self.layers.start} on"
        largest = grid.part_layers * grid.part_blocks * self.layer_bytes_max
        if largest > min(berth_bytes, grid.part_bytes):
            return f"parts of {largest} bytes, room for {min(berth_bytes, grid.part_bytes)}"
        cells = grid.part_layers * grid.part_blocks * self.cells_a_layer
        if cells > max(CELLS_MAX, self.cells_a_layer):
            return f"parts of {cells} cells, a notice has room for {CELLS_MAX}"
        return ""

    def _form_of(self, first: int, end: int) -> PartForm:
        """The layers from `first` up to `end`."""
        source_cuts, target_cuts = [], []
        for piece in self._route.pieces:
            layers = tuple(layer for layer in piece.layers if first <= layer < end)
            if layers:
                source_cuts.append(Cut(group=piece.source_group, layers=layers, heads=piece.heads))
                target_cuts.append(Cut(group=piece.target_group, layers=layers, heads=piece.heads))
        packed = None
        if source_cuts:
            packed = narrow(self.source_form.layout, source_cuts).packed(block_count=1)
        return PartForm(
            source_cuts=tuple(source_cuts),
            target_cuts=tuple(target_cuts),
            packed=packed,
            span=None if packed is None else CellSpan.of(packed),
            block_bytes=0 if packed is None else packed.block_bytes,
            cell_count=0 if packed is None else len(packed.cells),
        )


def windows_of(packed: Layout, target: Layout) -> Iterator[tuple[Layout, Layout]]:
    """Which tokens of a packed block go to which of a target's, for each window of the coarser."""
    fine = min(packed.block_tokens, target.block_tokens)
    for first in range(0, packed.block_tokens, fine):
        read = token_window(packed, first=first, count=fine)
        for into in range(0, target.block_tokens, fine):
            yield read, token_window(target, first=into, count=fine)


def plane_pairs(packed: Layout, narrowed: Layout) -> Iterator[tuple[Plane, Plane]]:
    """The planes of a packed block and of a tier's slots: the same cells in the same order."""
    for group, other in zip(packed.groups, narrowed.groups, strict=True):
        for layer, same in zip(group.layers, other.layers, strict=True):
            yield from zip(layer.planes, same.planes, strict=True)


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
        scratch: memory for pieces, shared with others of the same thread.
    """

    def __init__(
        self,
        form: PartForm,
        tier: SlotStore,
        algorithm: Algorithm,
        *,
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
            self._packing = Packing.of(source, buffers, algorithm, scratch=self._scratch)
        self._step = max(1, PIECE_BYTES // max(1, form.block_bytes))

    def gather(
        self, slots: Sequence[int], keys: Sequence[bytes], memory: NDArray[np.uint8]
    ) -> bytes:
        """Packs blocks into `memory`, and returns their cell sums, eight bytes each."""
        span, size = self._form.span, self._form.block_bytes
        if span is None:
            return b""
        if self._packing is not None:
            table = block_table(tuple(keys), tuple(slots))
            found = self._packing.pack_in_a_row(table, memory)
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
        scratch: Scratch | None = None,
    ) -> None:
        self._form = form
        self._algorithm = algorithm
        self._route = parts
        self._windows: list[list[_ArrayPlane]] = []
        self._scratch = scratch or Scratch()
        self._packing: Packing | None = None
        if form.packed is not None:
            target = narrow(tier.layout, form.target_cuts)
            for packed, narrowed in windows_of(form.packed, target):
                self._windows.append(_planes(packed, narrowed, tier))
            if parts.source_ratio == parts.target_ratio == 1:
                buffers = tier.blocks(()).buffers
                self._packing = Packing.of(target, buffers, algorithm, scratch=self._scratch)
        unit_bytes = form.block_bytes * parts.source_ratio
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
        sources, targets = self._route.source_ratio, self._route.target_ratio
        step = self._step * sources
        for first in range(0, len(keys), step):
            some = keys[first : first + step]
            piece = self._scratch.room(len(some) * size)
            piece[:] = memory[first * size : (first + len(some)) * size]
            found = span.sum_blocks(piece.reshape(len(some), size), some, self._algorithm)
            if not np.array_equal(found, given[first : first + len(some)]):
                return False
            at = first // sources * targets
            self._put_away(piece, len(some), slots[at : at + self._step * targets])
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
        for window, pairs in enumerate(self._windows):
            packed_at, slots_at = self._route.window_of(window, count, len(slots))
            some = slots[slots_at]
            runs = _runs(some)
            for pair in pairs:
                packed = pair.packed(piece, count, self._form.block_bytes)[packed_at]
                if pair.is_small and len(runs) > 1:
                    pair.slots[list(some)] = packed
                    continue
                for here, there, length in runs:
                    pair.slots[there : there + length] = packed[here : here + length]


class ArrayReader:
    """Packs parts on the CPU; each is done when `read` returns."""

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        self.slot_count = tier.slot_count
        self._gather_of = cache(
            partial(PartGather, tier=tier, algorithm=algorithm, scratch=Scratch())
        )

    def read(
        self,
        write: WriteId,  # noqa: ARG002 - it has ended before anybody can name it
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: NDArray[np.uint8],
    ) -> bytes | None:
        """Packs blocks into `memory`: their cell sums if that is done, nothing if it has begun."""
        return self._gather_of(form).gather(slots, keys, memory)

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        return True

    def ended(self) -> list[tuple[WriteId, bytes]]:
        """The parts that were begun and are packed now, with their sums; never waits."""
        return []

    def forget(self, write: WriteId) -> None:
        """Nothing more is to be moved for this write."""

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        return False

    @property
    def descriptor(self) -> int | None:
        """Readable when parts have ended; nothing where one has to ask `ended`."""
        return None


class ArrayTaker:
    """Takes parts on the CPU, in a thread; those that compiled code cannot do, in `take` itself.

    Args:
        tier: where the slots are.
        algorithm: of the sums.
    """

    def __init__(self, tier: SlotStore, algorithm: Algorithm) -> None:
        self.slot_count = tier.slot_count
        self._scatter_of = cache(
            partial(PartScatter, tier=tier, algorithm=algorithm, scratch=Scratch())
        )
        self._thread = PutAwayThread()
        self._bell = self._thread.descriptor
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
        """Verifies and puts away: whether it was intact, or nothing if that has begun."""
        scatter = self._scatter_of(route, form)
        if scatter.begin(self._thread, memory, keys, take.sums, slots):
            self._taking.append(take)
            return None
        return scatter.scatter(memory, keys, take.sums, slots)

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        return self._thread.has_room

    def ended(self) -> list[tuple[Take, bool]]:
        """The parts that were begun and have ended, and whether they were intact."""
        return [(self._taking.popleft(), intact) for intact in self._thread.ended()]

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        return bool(self._taking)

    @property
    def descriptor(self) -> int:
        """Readable while there are ends to take."""
        return self._bell

    def close(self) -> None:
        """Ends the thread: nothing touches areas or slots after this."""
        self._thread.close()


PartReader: TypeAlias = "ArrayReader | DeviceReader"
"""Packs parts out of the slots of one rank."""
PartTaker: TypeAlias = "ArrayTaker | DeviceTaker"
"""Puts parts into the slots of one rank."""


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
