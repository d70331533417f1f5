"""Which state led to which, and by which move: six bytes a state.

States have numbers in the order in which they were found. A move is a code: the number of its
rule, and its place among the rule's moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLACE_BITS = 8


def code_of(rule: int, place: int) -> int:
    """A move of a rule as one number."""
    assert rule < 1 << 16 - _PLACE_BITS
    assert place < 1 << _PLACE_BITS
    return rule << _PLACE_BITS | place


def move_of(code: int) -> tuple[int, int]:
    """The rule, and the move's place in it."""
    return code >> _PLACE_BITS, code & (1 << _PLACE_BITS) - 1


class Trail:
    """How each state was reached first."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._parents: list[NDArray[np.uint32]] = []
        self._codes: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, parents: NDArray[np.integer[Any]], code: int) -> int:
        """New states, all reached by the same move; says the number of the first."""
        first = self._count
        self._firsts.append(first)
        self._parents.append(parents.astype(np.uint32))
        self._codes.append(code)
        self._count += len(parents)
        return first

    def path_to(self, number: int) -> list[int]:
        """The codes of the moves from the beginning to a state."""
        path: list[int] = []
        while number:
            batch = int(np.searchsorted(self._firsts, number, side="right")) - 1
            path.append(self._codes[batch])
            number = int(self._parents[batch][number - self._firsts[batch]])
        path.reverse()
        return path
