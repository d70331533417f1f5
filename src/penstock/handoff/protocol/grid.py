"""Which parts one source rank owes one target rank: a grid of layer groups and block ranges.

Both sides must cut a transfer into the same parts, so the claim carries the cut itself: six
numbers, not a list. Parts are numbered layer group by layer group, blocks inside. A set of parts
is an `int` with bit `n` for part `n`, so that "ready, not sent and not there" is three operations
on integers, however many parts there are.

Every (layer, block) of the grid lies in exactly one part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from penstock.errors import counted

if TYPE_CHECKING:
    from penstock.vocabulary.reshard import ReshardPlan

PART_COUNT_MAX = 1 << 20
"""A grid with more parts is refused: its sets would be 128 KiB each in every claim."""

PART_BYTES_MIN = 1 << 20
"""Parts below this cost more in notices than their bytes take to travel: layers are put together up
to it. Beyond it, the last part is longer on its way after the last layer than that saves."""

PART_BLOCKS_MAX = 1024
"""What the staging of a GPU has tables for."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class Grid(NamedTuple):
    """What travels from one source rank to one target rank."""

    layer_first: Count
    layer_count: Count
    """Layers that both ranks hold, from `layer_first` on."""
    block_first: Count
    """Blocks before it are there already: the decode side's own prefix."""
    block_count: Count
    part_layers: Positive = 1
    """Layers in a part; the last group may have fewer."""
    part_blocks: Positive = 1
    """Blocks in a part; the last range of a layer may have fewer."""
    block_tokens: Positive = 1
    """Tokens of one block here: the coarser of the two sides' blocks, where they differ."""
    part_bytes: Positive = 1
    """Bytes of the largest part: it must fit a berth."""

    @property
    def group_count(self) -> int:
        """Groups of layers."""
        return -(-self.layer_count // self.part_layers)

    @property
    def range_count(self) -> int:
        """Block ranges of each group."""
        return -(-self.block_count // self.part_blocks)

    @property
    def part_count(self) -> int:
        """Parts in all."""
        return self.group_count * self.range_count

    @property
    def everything(self) -> int:
        """The set of all parts."""
        return _everything(self)

    def spans_of(self, part: int) -> tuple[range, range]:
        """The layers of a part, and its blocks, counted from the prompt's first block."""
        group, place = divmod(part, -(-self.block_count // self.part_blocks))
        layer = self.layer_first + group * self.part_layers
        block = self.block_first + place * self.part_blocks
        return (
            range(layer, min(layer + self.part_layers, self.layer_first + self.layer_count)),
            range(block, min(block + self.part_blocks, self.block_first + self.block_count)),
        )

    def layers_of(self, part: int) -> range:
        """The layers of a part."""
        return self.spans_of(part)[0]

    def blocks_of(self, part: int) -> range:
        """The blocks of a part."""
        return self.spans_of(part)[1]

    def ready(
        self,
        watermarks: tuple[int, ...],
        first_layer: int,
        token_count: int,
        layers: range | None = None,
    ) -> int:
        """The parts whose bytes are computed."""
        found = 0
        ranges, part_layers = self.range_count, self.part_layers
        begin, end = 0, self.layer_count
        if layers is not None:  # Only the groups that touch these.
            begin = max(layers.start - self.layer_first, 0)
            end = min(layers.stop - self.layer_first, end)
        for group in range(begin // part_layers, -(-end // part_layers)):
            first = self.layer_first + group * part_layers - first_layer
            last = min(first + part_layers, self.layer_first + self.layer_count - first_layer)
            tokens = min(watermarks[first:last])
            filled = ranges
            if tokens < token_count:
                blocks = tokens // self.block_tokens - self.block_first
                filled = min(max(0, blocks // self.part_blocks), ranges)
            found |= ((1 << filled) - 1) << group * ranges
        return found

    def problem(self) -> str:
        """What is wrong with this grid, or nothing."""
        for name in ("part_layers", "part_blocks", "block_tokens", "part_bytes"):
            if getattr(self, name) < 1:
                return f"{name} is {getattr(self, name)}, must be at least 1"
        if self.layer_count < 1 or self.block_count < 1:
            layers, blocks = counted(self.layer_count, "layer"), counted(self.block_count, "block")
            return f"grid of {layers} and {blocks} is empty"
        if self.part_count > PART_COUNT_MAX:
            return f"grid has {self.part_count} parts, at most {PART_COUNT_MAX} are allowed"
        return ""


@lru_cache(maxsize=64)
def _everything(grid: Grid) -> int:
    # Asked several times for every part that arrives.
    return (1 << grid.part_count) - 1


def cut(
    *,
    layers: range,
    blocks: range,
    cell_bytes: int,
    block_tokens: int,
    berth_bytes: int,
    part_bytes_min: int = PART_BYTES_MIN,
    part_blocks_max: int = PART_BLOCKS_MAX,
    part_tokens: int | None = None,
) -> Grid:
    """Cuts what one rank owes another into parts that fit a berth.

    A part is one layer, so that it can leave as soon as the layer is computed; blocks are split
    where a layer does not fit, or is computed in several steps, and layers are put together up to
    `part_bytes_min`.
    Raises `ValueError`: one block of one layer does not fit a berth, or something is empty.
    """
    if not layers or not blocks or cell_bytes < 1 or block_tokens < 1:
        raise ValueError(f"nothing to cut: {layers}, {blocks}, {cell_bytes} bytes a block")
    if cell_bytes > berth_bytes:
        raise ValueError(f"cell_bytes is {cell_bytes}, must be at most berth_bytes {berth_bytes}")
    part_blocks = min(len(blocks), berth_bytes // cell_bytes, part_blocks_max)
    if part_tokens is not None:
        part_blocks = min(part_blocks, max(1, part_tokens // block_tokens))
    layer_bytes = part_blocks * cell_bytes
    wished = -(-min(part_bytes_min, berth_bytes) // layer_bytes)
    part_layers = max(1, min(wished, berth_bytes // layer_bytes, len(layers)))
    # A power of two: on a GPU each number of layers has staging of its own.
    part_layers = 1 << part_layers.bit_length() - 1
    return Grid(
        layer_first=layers.start,
        layer_count=len(layers),
        block_first=blocks.start,
        block_count=len(blocks),
        part_layers=part_layers,
        part_blocks=part_blocks,
        block_tokens=block_tokens,
        part_bytes=part_layers * layer_bytes,
    )


def missing_blocks(plan: ReshardPlan, *, cached_tokens: int, token_count: int) -> range:
    """The blocks that have to travel, in units that can be resharded (`plan.unit_tokens`).

    Raises `ValueError`: `cached_tokens` is not a whole number of units. Where source blocks are the
    larger ones, the decode side has to leave the rest of its match aside.
    """
    unit = plan.unit_tokens
    if not 0 <= cached_tokens < token_count:
        raise ValueError(f"cached_tokens is {cached_tokens}, must be from 0 to {token_count - 1}")
    if cached_tokens % unit:
        raise ValueError(f"cached_tokens is {cached_tokens}, must be a multiple of {unit}")
    return range(cached_tokens // unit, -(-token_count // unit))


def to_bytes(parts: int) -> bytes:
    """A set as it travels: little-endian, without trailing zeros."""
    return parts.to_bytes((parts.bit_length() + 7) // 8, "little")


def from_bytes(encoded: bytes) -> int:
    """The set that `to_bytes` made these bytes of."""
    return int.from_bytes(encoded, "little")
