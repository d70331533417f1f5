"""Extents for the link: runs of slots that follow each other, cut into turns.

Plain integers and lists: a batch has few runs, and calls of NumPy for each would take longer
than the copies' own. The one rule: what goes in comes out, every byte once and in order.
`calls.c` cuts by the same rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_PAGE_BYTES = 4096


Turn: TypeAlias = tuple[list[int], list[int], list[int]]
"""Extents that go over the link in one call: targets, sources and lengths."""


class Road(NamedTuple):
    """Which blocks of a copy follow each other in host memory."""

    slots: list[int]
    ends: list[int] | None
    """For each block the end of its run; `None` where all of them are one."""
    alone: bool = False
    """Whether no block follows another."""

    @classmethod
    def survey(cls, slots: NDArray[np.int32], *, run_slots: int) -> Road:
        """Looks for slots that follow each other and do not cross a multiple of `run_slots`."""
        found: list[int] = slots.tolist()
        first, last = found[0], found[-1]
        # As a pool gives them while it fills; other ways to find out take several times as long.
        if first // run_slots == last // run_slots and found == list(range(first, last + 1)):
            return cls(found, None)
        begins = np.ones(len(slots) + 1, dtype=bool)
        begins[1:-1] = (slots[1:] - slots[:-1] != 1) | (slots[1:] % run_slots == 0)
        if begins.all():
            return cls(found, list(range(1, len(found) + 1)), alone=True)
        firsts = np.flatnonzero(begins)
        ends: list[int] = np.repeat(firsts[1:], np.diff(firsts)).tolist()
        return cls(found, ends)

    def runs(self, first: int, end: int) -> list[tuple[int, int]]:
        """The runs among some of the blocks: where each begins, and how many blocks it has."""
        if self.ends is None:
            return [(first, end - first)]
        runs: list[tuple[int, int]] = []
        while first < end:
            stop = min(self.ends[first], end)
            runs.append((first, stop - first))
            first = stop
        return runs


def in_turns(extents: Iterable[tuple[int, int, int]], turn_bytes: int) -> list[Turn]:
    """Extents (target, source, length) in turns of at most `turn_bytes`.

    Long ones are cut into about equal parts.
    """
    turns: list[Turn] = []
    room = 0
    for target, source, length in extents:
        step = length if length <= turn_bytes else _part_bytes(length, turn_bytes)
        for at in range(0, length, step):
            part = min(step, length - at)
            if part > room:
                turns.append(([], [], []))
                room = turn_bytes
            targets, sources, lengths = turns[-1]
            targets.append(target + at)
            sources.append(source + at)
            lengths.append(part)
            room -= part
    return turns


def _part_bytes(length: int, most_bytes: int) -> int:
    step = -(-length // -(-length // most_bytes))
    # Whole pages where it can be, so that no part begins in the middle of one.
    in_pages = -(-step // _PAGE_BYTES) * _PAGE_BYTES
    return in_pages if in_pages <= most_bytes else step
