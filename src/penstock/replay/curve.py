"""What LRU finds in rooms of every size, from one pass over a trace.

Under LRU, a block lies in all rooms from some size on: the number of blocks that were used since it
was used last, itself among them (its stack distance). So one pass that counts distances says what
every size finds. All blocks of a request are used at once, and of those the deepest leaves first.

A request that has blocks in common with an earlier one has them as a run: the next ones that were
not used since. Their distances are consecutive numbers, so that a run is counted at once, however
long it is, and a request costs what its keys take to look up.

The blocks that a trace has are kept up to a number. Then only every second of them is followed,
chosen by its key, each for two (spatial sampling, as in SHARDS), then every fourth, and so on. How
many uses that should have given is known. The difference is blocks that nearly all requests have,
such as the first one of a system prompt, and which were chosen by chance or not: they count as
found in every room (as in SHARDS-adj).
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.vocabulary.keys import Key


BLOCKS_KEPT = 1 << 20
"""Some 150 MB. Among a million sampled blocks, hit rates are right to a few tenths of a point."""
_PART = 1 << 10
"""Requests whose blocks are also counted together: to count those of many requests."""


class LruCurve:
    """Takes the requests of a trace in; says at any time what LRU found so far.

    Args:
        blocks_kept: different blocks that are followed at most.
    """

    def __init__(self, *, blocks_kept: int = BLOCKS_KEPT) -> None:
        self._blocks_kept = blocks_kept
        self.one_of = 1
        """Of how many blocks one is followed."""
        self._last: dict[Key, int] = {}
        """Block to the number of the last request that has it."""
        self._counts: list[int] = []
        """Of each request, the blocks that no later one has."""
        self._sums: list[int] = []
        """Of every `_PART` requests together."""
        self._rises: Counter[int] = Counter()
        """Distance to how many more blocks have it than have the one before."""
        self._missed_uses = 0
        """Uses of blocks, less those that the followed ones stand for."""

    def add(self, keys: Sequence[Key], useful: int) -> None:
        """One more request; only the first `useful` of its blocks may be found."""
        number, times = len(self._counts), self.one_of
        if times > 1:
            followed = [not xxh3_64_intdigest(key) % times for key in keys]
            self._missed_uses += useful
            useful = sum(followed[:useful])
            self._missed_uses -= useful * times
            keys = [key for key, chosen in zip(keys, followed, strict=True) if chosen]
        self._counts.append(0)
        if number % _PART == 0:
            self._sums.append(0)
        at = 0
        moved: list[tuple[int, int]] = []
        for last, run in groupby(map(self._last.get, keys)):
            length = len(list(run))
            if last is not None:
                moved.append((last, length))
                found = min(length, useful - at)
                if found > 0:
                    newer = self._newer_than(last)
                    self._rises[newer * times + 1] += 1
                    self._rises[(newer + found) * times + 1] -= 1
            at += length
        for last, length in (*((last, -length) for last, length in moved), (number, len(keys))):
            self._counts[last] += length
            self._sums[last // _PART] += length
        self._last.update(dict.fromkeys(keys, number))
        while len(self._last) > self._blocks_kept:
            self._follow_fewer()

    def found(self, capacity: float) -> int:
        """How many blocks were found by all requests together, in a room of so many."""
        found = sum(
            int(capacity - distance + 1) * rise
            for distance, rise in self._rises.items()
            if distance <= capacity
        )
        return max(0, found + self._missed_uses)

    def most_found(self) -> int:
        """How many blocks were found in a room that has all of them."""
        return self.found(max(self._rises, default=0))

    def _newer_than(self, request: int) -> int:
        """The blocks that were used after a request had used its own."""
        part = request // _PART
        return sum(self._counts[request + 1 : (part + 1) * _PART]) + sum(self._sums[part + 1 :])

    def _follow_fewer(self) -> None:
        self.one_of *= 2
        self._last = {
            key: last
            for key, last in self._last.items()
            if not xxh3_64_intdigest(key) % self.one_of
        }
        counts = Counter(self._last.values())
        self._counts = [counts[number] for number in range(len(self._counts))]
        self._sums = [
            sum(self._counts[first : first + _PART]) for first in range(0, len(self._counts), _PART)
        ]
