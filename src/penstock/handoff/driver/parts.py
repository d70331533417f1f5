"""Which bytes a part consists of: blocks of its source, narrowed to what its target holds.

    source slots ──gather──→ packed part + sums ──verify──→ ──scatter──→ target slots

What travels is packed as blocks of the source, so its sums are those of the source's cells,
seeded with the source's keys. Blocks of other sizes at the target are a matter of putting away.

The one rule: bytes are summed as they were read from slots, and put away only after the target has
copied them out of the berth and verified the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from penstock.transport.remote import NOTICE_BYTES_MAX
from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.checksums import SUM_BYTES
from penstock.vocabulary.narrowing import Cut, narrow

if TYPE_CHECKING:
    from penstock.handoff.protocol.grid import Grid
    from penstock.vocabulary.form import Form
    from penstock.vocabulary.layout import Layout
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
        """One part of a grid, for a prompt of so many tokens."""
        layers, units = grid.layers_of(part), grid.blocks_of(part)
        return PartPlace(
            self.form_of(layers.start, layers.stop),
            _blocks_of(units, self.source_ratio, -(-token_count // self.source_tokens)),
            _blocks_of(units, self.target_ratio, -(-token_count // self.target_tokens)),
        )

    def problem_of(self, grid: Grid, *, berth_bytes: int) -> str:
        """Why a grid cannot be one of this route, if it cannot: said of what a peer claims."""
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


def _blocks_of(units: range, ratio: int, block_count: int) -> range:
    """The blocks of some units; the last unit may be partly filled."""
    return range(units.start * ratio, min(units.stop * ratio, block_count))
