"""Carrying out a route: the bytes of one source rank into the blocks of one target rank.

`RouteCopier` copies between arrays, and is the definition that every faster way has to agree
with, byte for byte. `RouteExtents` says to a transport that writes by itself which bytes to put
where.

Blocks of different sizes: `fine` blocks follow each other in a coarse one, so fine block *i* of
a request is window *i mod n* of its coarse block *i div n*. The last coarse block may be partly
filled; its missing fine blocks are then left alone.

The one rule: bytes of a target that no route names are not written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.vocabulary.layout import narrow, token_window
from penstock.vocabulary.reshard import BlockCopier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.vocabulary.layout import Layout
    from penstock.vocabulary.planes import Extent
    from penstock.vocabulary.reshard import Buffers, Route


class RouteCopier:
    """Copies the blocks of a request along one route, prepared once."""

    def __init__(
        self,
        route: Route,
        source: Layout,
        source_buffers: Buffers,
        target: Layout,
        target_buffers: Buffers,
    ) -> None:
        pairs = _window_pairs(route, source, target)
        self._copiers = [
            BlockCopier(read, source_buffers, write, target_buffers) for read, write in pairs
        ]
        self._source_is_coarse = source.block_tokens > target.block_tokens

    def copy(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> None:
        """Copies a request's blocks, in its order on both sides."""
        fine = target_blocks if self._source_is_coarse else source_blocks
        coarse = source_blocks if self._source_is_coarse else target_blocks
        ratio = len(self._copiers)
        _require_matching(len(fine), len(coarse), ratio)
        for window, copier in enumerate(self._copiers):
            fine_blocks = fine[window::ratio]
            coarse_blocks = coarse[: len(fine_blocks)]
            if self._source_is_coarse:
                copier.copy(coarse_blocks, fine_blocks)
            else:
                copier.copy(fine_blocks, coarse_blocks)


class RouteExtents:
    """Which bytes of a source block go where in a target block along one route."""

    def __init__(self, route: Route, source: Layout, target: Layout) -> None:
        self._pairs = _window_pairs(route, source, target)

    def between(
        self, source_block: int, target_block: int, *, fine: int = 0
    ) -> Iterator[tuple[Extent, Extent]]:
        """Pairs of equal length: where to read, where to write.

        `fine` says which window of the coarser block it is about.
        """
        if not 0 <= fine < len(self._pairs):
            raise ValueError(f"fine is {fine}, must be from 0 to {len(self._pairs) - 1}")
        read, write = self._pairs[fine]
        for cell, target_cell in zip(read.cells, write.cells, strict=True):
            yield from _paired(
                read.cell_extents(source_block, cell),
                write.cell_extents(target_block, target_cell),
            )


def _window_pairs(route: Route, source: Layout, target: Layout) -> list[tuple[Layout, Layout]]:
    """What to read and what to write for each fine block of a coarse one, in order."""
    read, write = narrow(source, route.source_cuts), narrow(target, route.target_cuts)
    fine_tokens = min(source.block_tokens, target.block_tokens)
    coarse_tokens = max(source.block_tokens, target.block_tokens)
    if coarse_tokens % fine_tokens:
        raise ValueError(
            f"block_tokens is {source.block_tokens} at the source and {target.block_tokens} at "
            "the target, one must be a multiple of the other"
        )
    pairs = []
    for first in range(0, coarse_tokens, fine_tokens):
        if source.block_tokens > target.block_tokens:
            pairs.append((token_window(read, first=first, count=fine_tokens), write))
        else:
            pairs.append((read, token_window(write, first=first, count=fine_tokens)))
    return pairs


def _require_matching(fine: int, coarse: int, ratio: int) -> None:
    if coarse != -(-fine // ratio):
        raise ValueError(
            f"{fine} blocks of one side need {-(-fine // ratio)} of the other, {ratio} to one; "
            f"there are {coarse}"
        )


def _paired(source: Sequence[Extent], target: Sequence[Extent]) -> Iterator[tuple[Extent, Extent]]:
    """Two spellings of as many bytes, cut where either of them is cut."""
    left, right = list(reversed(source)), list(reversed(target))
    while left and right:
        read, write = left.pop(), right.pop()
        if read.length > write.length:
            read, rest = read.split(write.length)
            left.append(rest)
        elif write.length > read.length:
            write, rest = write.split(read.length)
            right.append(rest)
        yield read, write
