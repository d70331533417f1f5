"""Extents for the link: runs of slots that follow each other, cut into turns.

Plain integers and lists: a batch has few runs, and calls of NumPy for each would take longer
than the copies' own. The one rule: what goes in comes out, every byte once and in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_PAGE_BYTES = 4096


Turn: TypeAlias = tuple[list[int], list[int], list[int]]
"""Extents that go over the link in one call: where they start in staging and in host memory, and
their lengths."""


def run_ends(slots: NDArray[np.int32], *, run_slots: int) -> list[int]:
    """For each position the end of its run of slots that follow each other.

    No run crosses a multiple of `run_slots`.
    """
    begins = np.ones(len(slots), dtype=bool)
    begins[1:] = (np.diff(slots) != 1) | (slots[1:] % run_slots == 0)
    firsts = np.append(np.flatnonzero(begins), len(slots))
    ends: list[int] = np.repeat(firsts[1:], np.diff(firsts)).tolist()
    return ends


def in_turns(extents: Iterable[tuple[int, int, int]], turn_bytes: int) -> list[Turn]:
    """Extents (staging, host memory, length) in turns of at most so many bytes.

    Long ones are cut into about equal parts.
    """
    turns: list[Turn] = []
    room = 0
    for staged, host, length in extents:
        step = length if length <= turn_bytes else _part_bytes(length, turn_bytes)
        for at in range(0, length, step):
            part = min(step, length - at)
            if part > room:
                turns.append(([], [], []))
                room = turn_bytes
            starts, hosts, lengths = turns[-1]
            starts.append(staged + at)
            hosts.append(host + at)
            lengths.append(part)
            room -= part
    return turns


def equal_in_turns(
    staged: int, pitch: int, hosts: list[int], length: int, turn_bytes: int
) -> list[Turn]:
    """The same for extents of one length, at equal distances in staging and anywhere else.

    A tenth of the time a block, for host slots in no order.
    """
    count = max(1, turn_bytes // length)
    starts = list(range(staged, staged + len(hosts) * pitch, pitch))
    lengths = [length] * count
    return [
        (starts[at : at + count], hosts[at : at + count], lengths[: len(hosts) - at])
        for at in range(0, len(hosts), count)
    ]


def _part_bytes(length: int, most_bytes: int) -> int:
    step = -(-length // -(-length // most_bytes))
    # Whole pages where it can be, so that no part begins in the middle of one.
    in_pages = -(-step // _PAGE_BYTES) * _PAGE_BYTES
    return in_pages if in_pages <= most_bytes else step
