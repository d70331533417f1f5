"""Which bytes a part consists of, and the interfaces of what packs parts and takes them.

    source slots ──gather──→ packed part + sums ──verify──→ ──scatter──→ target slots

A part is blocks of the source, narrowed to what the target holds. It travels packed as blocks of
the source, so its sums are those of the source's cells, seeded with the source's keys. Blocks of
another size at the target are split or joined when they are put away.

| medium          | packs (`PartReader`)           | takes (`PartTaker`)          |
|-----------------|--------------------------------|------------------------------|
| memory of a CPU | `array_parts.ArrayReader`      | `array_parts.ArrayTaker`     |
| CUDA, kernels   | `device_parts.DeviceReader`    | `device_parts.DeviceTaker`   |

The one rule: bytes are summed as they were read from slots, and put away only after the target has
copied them out of the berth and verified the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from penstock.transport.remote import NOTICE_BYTES_MAX
from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.narrowing import Cut, narrow, token_window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.handoff.protocol.effects import Take
    from penstock.handoff.protocol.grid import Grid
    from penstock.handoff.protocol.identity import WriteId
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


Window_contra = TypeVar("Window_contra", contravariant=True)
"""What bytes of a berth are: an array, or a tensor on a device."""


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

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return len(self.source_blocks) * self.form.block_bytes


class RouteParts:
    """The parts of all that one rank sends another."""

    def __init__(self, plan: ReshardPlan, route: Route, source: Form, target: Form) -> None:
        self.source_form = source
        self.target_form = target
        self.source_tokens = plan.source_tokens
        self.target_tokens = plan.target_tokens
        self.unit_tokens = plan.unit_tokens
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

    @property
    def source_ratio(self) -> int:
        """Blocks of the source in a unit."""
        return self.unit_tokens // self.source_tokens

    @property
    def target_ratio(self) -> int:
        """Blocks of the target in a unit."""
        return self.unit_tokens // self.target_tokens

    def place(self, grid: Grid, part: int, token_count: int) -> PartPlace:
        """One part of a grid, for a prompt of `token_count` tokens."""
        layers, units = grid.layers_of(part), grid.blocks_of(part)
        return PartPlace(
            self.form_of(layers.start, layers.stop),
            _blocks_of(units, self.source_ratio, -(-token_count // self.source_tokens)),
            _blocks_of(units, self.target_ratio, -(-token_count // self.target_tokens)),
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


class PartReader(Protocol[Window_contra]):
    """Packs parts out of the slots of one rank."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        ...

    def read(
        self,
        write: WriteId,
        form: PartForm,
        slots: Sequence[int],
        keys: Sequence[bytes],
        memory: Window_contra,
    ) -> bytes | None:
        """Packs blocks into `memory`: their cell sums if that is done, nothing if it has begun."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        ...

    def ended(self) -> list[tuple[WriteId, bytes]]:
        """The parts that were begun and are packed now, with their sums; never waits."""
        ...

    def forget(self, write: WriteId) -> None:
        """Nothing more is to be moved for this write."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        ...


class PartTaker(Protocol[Window_contra]):
    """Puts parts into the slots of one rank."""

    @property
    def slot_count(self) -> int:
        """How many slots there are."""
        ...

    def take(
        self,
        take: Take,
        route: RouteParts,
        form: PartForm,
        memory: Window_contra,
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> bool | None:
        """Verifies and puts away: whether it was intact, or nothing if that has begun."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another part can be begun."""
        ...

    def ended(self) -> list[tuple[Take, bool]]:
        """The parts that were begun and have ended, and whether they were intact."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a part was begun and has not ended."""
        ...

    @property
    def descriptor(self) -> int | None:
        """Readable while there are ends to take; nothing where one has to ask `ended`."""
        ...


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


def _blocks_of(units: range, ratio: int, block_count: int) -> range:
    """The blocks of some units; the last unit may be partly filled."""
    return range(units.start * ratio, min(units.stop * ratio, block_count))
