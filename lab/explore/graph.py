"""The states that were found, as numbers, with how each was reached and where it leads.

Of a state itself only a 64-bit digest is kept: with 40 million states, the chance that any
two share one is below 1 in 20,000. States are numbered in the order in which they are found;
a parent and the number of a move in its list suffice to walk there again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from numpy.typing import NDArray

BEGINNING = 0


class Graph:
    """Numbers for states, and the moves between them."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._parents = array("I")
        self._moves = array("H")
        self._edge_from = array("I")
        self._edge_to = array("I")
        self._finished = array("I")

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def edge_count(self) -> int:
        """How many moves were followed."""
        return len(self._edge_to)

    def enter(self, packed: bytes, *, parent: int, move: int) -> tuple[int, bool]:
        """The number of a state, and whether it is new."""
        digest = xxh3_64_intdigest(packed)
        fresh = len(self._parents)
        number = self._numbers.setdefault(digest, fresh)
        if number == fresh:
            self._parents.append(parent)
            self._moves.append(move)
            return number, True
        return number, False

    def join(self, number: int, successor: int) -> None:
        """A move leads from one state to another."""
        self._edge_from.append(number)
        self._edge_to.append(successor)

    def finish(self, number: int) -> None:
        """All work is done in this state."""
        self._finished.append(number)

    def path_to(self, number: int) -> list[int]:
        """The moves from the beginning to a state, each by its place in its list."""
        path: list[int] = []
        while number != BEGINNING:
            path.append(self._moves[number])
            number = self._parents[number]
        path.reverse()
        return path

    @property
    def finished_count(self) -> int:
        """In how many states all work is done."""
        return len(self._finished)

    def first_lost(self) -> int | None:
        """The first state from which no path leads to one where all work is done."""
        fine = np.zeros(len(self), dtype=np.bool_)
        fine[_view(self._finished)] = True
        froms, tos = _view(self._edge_from), _view(self._edge_to)
        while True:
            leads = fine[tos]
            open_edges = ~leads
            newly = froms[leads]
            newly = newly[~fine[newly]]
            if not len(newly):
                break
            fine[newly] = True
            # Edges from states that are fine have nothing more to say.
            open_edges &= ~fine[froms]
            froms, tos = froms[open_edges], tos[open_edges]
        lost = np.flatnonzero(~fine)
        return int(lost[0]) if len(lost) else None


def _view(numbers: array[int]) -> NDArray[np.uint32]:
    return np.frombuffer(numbers, dtype=np.uint32) if numbers else np.empty(0, np.uint32)
