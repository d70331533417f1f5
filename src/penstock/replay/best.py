"""The most that any eviction policy could have found: Belady's rule, with bypass.

With `capacity` blocks and the whole future known, the block that is needed farthest ahead leaves
first, and a block that is needed later than all others is not kept at all. Requests need prefixes,
so a block is needed no later than the blocks after it: what leaves is always the end of a chain,
and the rule is the best that there is for prefixes, too.

The cache need not be simulated. All blocks whose next use is request `q` are found there together,
so it is enough to count, for each later request, how many blocks are kept for it.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.ids import Key


class BestPossible:
    """Takes the requests of a trace in, then says what could have been found in a given room.

    It keeps an entry for each different block and a few numbers for each request.
    """

    def __init__(self) -> None:
        self._last: dict[Key, int] = {}
        """The request that last had a block."""
        self._count = 0
        # Pieces of requests: of the blocks that `_from` had last, `_to` needs so many next.
        self._from = array("q")
        self._to = array("q")
        self._blocks = array("q")

    def add(self, keys: Sequence[Key], useful: int) -> None:
        """One more request; only the first `useful` of its blocks may be found."""
        number, last = self._count, self._last
        pieces: dict[int, int] = {}
        for before in map(last.get, keys[:useful]):
            if before is not None:
                pieces[before] = pieces.get(before, 0) + 1
        for before, blocks in pieces.items():
            self._from.append(before)
            self._to.append(number)
            self._blocks.append(blocks)
        last.update(dict.fromkeys(keys, number))
        self._count += 1

    @property
    def block_count(self) -> int:
        """Different blocks."""
        return len(self._last)

    def found(self, capacity: int) -> int:
        """How many blocks could have been found by all requests together."""
        order = np.argsort(np.array(self._from), kind="stable")
        pieces = zip(
            np.array(self._from)[order].tolist(),
            np.array(self._to)[order].tolist(),
            np.array(self._blocks)[order].tolist(),
            strict=True,
        )
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
        return found
