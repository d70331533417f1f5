"""Two engines that hold one model in different ways, and an oracle that knows no ranks.

    case = draw_case(seed)     # any sizes, stages, kinds, layouts and block sizes
    case.reshard()             # along every route of the plan
    case.expect_equal()        # every rank of the target has what the oracle says, and no more

The one rule: the oracle writes number by number out of whole tensors of the model, and knows
nothing of plans, cuts or routes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.vocabulary.cell_span import CellSpan
from penstock.vocabulary.checksums import Algorithm, CellSums
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.form import Form, Shard
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.packing import Blocks, copy_blocks
from penstock.vocabulary.planes import Axis
from penstock.vocabulary.reshard import plan_reshard
from penstock.vocabulary.route_copying import RouteCopier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

ORDERS = (
    (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL),
    (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL),
    (Axis.HEAD, Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL),
    (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL, Axis.HEAD),
)
BLOCK_COUNT = 24
BESIDE = 100
"""Latent layers beside attention ones are numbered from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks of one engine: how heads, layers and tokens are dealt out, and how they lie."""

    tensor_size: int
    stage_count: int = 1
    block_tokens: int = 2
    order: int = 0

    def layouts(self, model: Model) -> list[Layout]:
        """The layout of each rank, stage by stage."""
        return [
            KINDS[model.kind](
                Shard(stage_count=self.stage_count, stage=stage).layers(model.layers),
                dealt(model.heads, self.tensor_size, tensor_rank),
                self,
            )
            for stage in range(self.stage_count)
            for tensor_rank in range(self.tensor_size)
        ]

    def forms(self, model: Model) -> list[Form]:
        """The form of each rank."""
        return [Form(layout=layout) for layout in self.layouts(model)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What there is to hold."""

    kind: str
    layers: int
    heads: int


def dealt(total: int, tensor_size: int, tensor_rank: int) -> HeadRange:
    """Heads as evenly as it goes; with more ranks than heads, neighbours hold the same."""
    first = tensor_rank * total // tensor_size
    end = (tensor_rank + 1) * total // tensor_size
    return HeadRange(first=first, count=max(1, end - first), total=total)


def _split(layers: Sequence[int], heads: HeadRange, side: Side) -> Layout:
    return Layout.split(
        layers=layers,
        heads=heads,
        channels=3,
        dtype=DType.BF16,
        block_tokens=side.block_tokens,
        block_count=BLOCK_COUNT,
        order=ORDERS[side.order],
    )


def _scaled(layers: Sequence[int], heads: HeadRange, side: Side) -> Layout:
    return Layout.split(
        layers=layers,
        heads=heads,
        channels=4,
        dtype=DType.FP8_E4M3,
        block_tokens=side.block_tokens,
        block_count=BLOCK_COUNT,
        order=ORDERS[side.order],
        scale_dtype=DType.FP32,
    )


def _packed_kv(layers: Sequence[int], heads: HeadRange, side: Side) -> Layout:
    order = ORDERS[side.order]
    return Layout.packed_kv(
        layers=layers,
        heads=heads,
        channels=2,
        dtype=DType.FP16,
        block_tokens=side.block_tokens,
        block_count=BLOCK_COUNT,
        order=(Axis.PART, *order) if side.order % 2 else (order[0], Axis.PART, *order[1:]),
    )


def _latent(layers: Sequence[int], heads: HeadRange, side: Side) -> Layout:
    del heads  # Every rank holds the same.
    return Layout.mla(
        layers=layers,
        channels=5,
        dtype=DType.BF16,
        block_tokens=side.block_tokens,
        block_count=BLOCK_COUNT,
    )


def _both(layers: Sequence[int], heads: HeadRange, side: Side) -> Layout:
    """Attention, and beside it latent layers with numbers of their own, in either order."""
    attention = _split(layers, heads, side)
    beside = _latent([BESIDE + layer for layer in layers], heads, side)
    return Layout.join(attention, beside) if side.order % 2 else Layout.join(beside, attention)


KINDS: dict[str, Callable[[Sequence[int], HeadRange, Side], Layout]] = {
    "split": _split,
    "scaled": _scaled,
    "packed": _packed_kv,
    "latent": _latent,
    "both": _both,
}


@dataclass(slots=True)
class Oracle:
    """Every number of a request, as if there was one rank and one block."""

    tokens: int
    seed: int
    _wholes: dict[tuple[int, int], NDArray[Any]] = field(default_factory=dict)

    def write(self, rank: Rank, blocks: Sequence[int]) -> None:
        """Puts the request into the blocks of a rank."""
        for group in rank.layout.groups:
            total = 1 if group.heads is None else group.heads.total
            first = 0 if group.heads is None else group.heads.first
            for layer in group.layers:
                for plane in layer.planes:
                    view = plane.view(rank.buffers[plane.buffer])
                    name = (layer.number, int(plane.role))
                    mine = self._whole(name, (total, self.tokens, plane.channels), view.dtype)
                    for at, block in enumerate(blocks):
                        room = view[block].reshape(plane.heads, plane.tokens, -1)
                        assert np.shares_memory(room, view)
                        numbers = mine[
                            first : first + plane.heads, at * plane.tokens : (at + 1) * plane.tokens
                        ]
                        room[:, : numbers.shape[1]] = numbers

    def _whole(
        self, name: tuple[int, int], shape: tuple[int, int, int], kind: np.dtype[Any]
    ) -> NDArray[Any]:
        """All numbers of a layer and role: [heads of the model, tokens, channels]."""
        if name not in self._wholes:
            chance = np.random.default_rng([self.seed, *name])
            raw = chance.bytes(int(np.prod(shape)) * kind.itemsize)
            self._wholes[name] = np.frombuffer(raw, kind).reshape(shape)
        return self._wholes[name]


@dataclass(slots=True)
class Rank:
    """The memory of one rank."""

    layout: Layout
    buffers: dict[int, NDArray[np.uint8]]

    @classmethod
    def noisy(cls, layout: Layout, seed: int) -> Rank:
        """Memory full of other things."""
        chance = np.random.default_rng(seed)
        return cls(
            layout,
            {
                buffer: chance.integers(0, 256, size, dtype=np.uint8)
                for buffer, size in layout.buffer_bytes.items()
            },
        )

    def packed(self, blocks: Sequence[int], seen: Layout | None = None) -> NDArray[np.uint8]:
        """Some blocks in canonical order; of them, what `seen` shows."""
        layout = self.layout if seen is None else seen
        into = np.zeros((len(blocks), layout.block_bytes), dtype=np.uint8)
        packed = layout.packed(block_count=len(blocks))
        copy_blocks(
            Blocks(layout=layout, buffers=self.buffers, numbers=blocks),
            Blocks(layout=packed, buffers={0: into.reshape(-1)}, numbers=range(len(blocks))),
        )
        return into

    def sums(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[CellSums]:
        """The tables of cell sums of some blocks."""
        span = CellSpan.of(self.layout)
        return [
            CellSums.of(row) for row in span.sum_blocks(self.packed(blocks), keys, Algorithm.XXH3)
        ]


class Case:
    """A request on the ranks of two engines, to be resharded."""

    def __init__(self, model: Model, source: Side, target: Side, tokens: int, seed: int) -> None:
        chance = random.Random(seed)
        self.model, self.source, self.target, self.tokens = model, source, target, tokens
        self.source_blocks, self.target_blocks = (
            chance.sample(range(BLOCK_COUNT), -(-tokens // side.block_tokens))
            for side in (source, target)
        )
        self.sources = [Rank.noisy(each, at) for at, each in enumerate(source.layouts(model))]
        self.targets = [Rank.noisy(each, at) for at, each in enumerate(target.layouts(model))]
        self.expected = [Rank.noisy(each.layout, at) for at, each in enumerate(self.targets)]
        oracle = Oracle(tokens, seed)
        for rank in self.sources:
            oracle.write(rank, self.source_blocks)
        for rank in self.expected:
            oracle.write(rank, self.target_blocks)
        self.plan = plan_reshard(
            [Form(layout=rank.layout) for rank in self.sources],
            [Form(layout=rank.layout) for rank in self.targets],
        )

    def reshard(self) -> None:
        """Copies along every route of the plan."""
        for route in self.plan.routes:
            source, target = self.sources[route.source], self.targets[route.target]
            copier = RouteCopier(
                route, source.layout, source.buffers, target.layout, target.buffers
            )
            copier.copy(self.source_blocks, self.target_blocks)

    def expect_equal(self) -> None:
        """Compares all memory of all targets with what the oracle would have made of it."""
        for rank, (target, expected) in enumerate(zip(self.targets, self.expected, strict=True)):
            for buffer, content in expected.buffers.items():
                np.testing.assert_array_equal(target.buffers[buffer], content, f"rank {rank}")


def draw_case(seed: int, *, same_blocks: bool = False) -> Case:
    """Two engines that hold one model in different ways; often in very different ones."""
    chance = random.Random(seed)
    fine = chance.choice([1, 2, 3, 4])
    ratio = 1 if same_blocks else chance.choice([1, 1, 1, 2, 3, 4])
    sizes = (fine * ratio, fine) if chance.random() < 0.5 else (fine, fine * ratio)
    layers = chance.randint(2, 4)
    source, target = (
        Side(
            tensor_size=chance.choice([1, 1, 2, 2, 3, 3, 4, 5, 6, 8]),
            stage_count=chance.choice([1, 1, 1, 2, min(3, layers)]),
            block_tokens=tokens,
            order=chance.randrange(len(ORDERS)),
        )
        for tokens in sizes
    )
    model = Model(
        kind=chance.choice(list(KINDS)), layers=layers, heads=chance.choice([1, 2, 3, 4, 6, 7, 8])
    )
    # Full blocks on the finer side; the last coarse one may be partly filled.
    blocks = chance.randint(1, min(4, BLOCK_COUNT // ratio))
    tokens = max(fine, blocks * fine * ratio - fine * chance.randrange(ratio))
    return Case(model, source, target, tokens, seed)
