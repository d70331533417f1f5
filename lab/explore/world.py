"""What the explorer wants to know of a world.

A world says where it begins, which moves there are in a state, and where each of them leads.
A state is an immutable value, so nothing has to be copied or undone, and two paths that lead
to the same state are seen to do so.

The one rule that must not break: `moves` and `step` depend on the state alone. A clock, a
random number or the order of a set would make the search a lottery.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Sequence

State = TypeVar("State")
Move = TypeVar("Move")


class Violation(PenstockError):  # noqa: N818 - what a world found, not an error of its caller
    """A promise was broken."""

    def __init__(self, checker: str, problem: str) -> None:
        super().__init__(f"{checker}: {problem}")
        self.checker = checker
        self.problem = problem


class World(Protocol[State, Move]):
    """A small world of which every state can be visited."""

    def begin(self) -> State:
        """The state in which everything begins."""
        ...

    def moves(self, state: State) -> Sequence[Move]:
        """What can happen next, always in the same order; what would happen soonest first."""
        ...

    def step(self, state: State, move: Move) -> State:
        """The state after a move.

        Raises:
            Violation: the move itself breaks a promise.
        """
        ...

    def check(self, state: State) -> None:
        """Looks at a state.

        Raises:
            Violation: a promise is broken in it.
        """
        ...

    def finished(self, state: State) -> bool:
        """Whether all work is done, as it should be. Such a state may have moves left."""
        ...

    def pack(self, state: State) -> bytes:
        """The state as bytes: equal for equal states, different for different ones."""
        ...

    def is_fault(self, move: Move) -> bool:
        """Whether the move is something that goes wrong, and need not happen at all."""
        ...

    def tell(self, state: State, move: Move) -> str:
        """The move in words, for the story that leads to a finding."""
        ...

    def conclude(self) -> None:
        """Looks back when every state was visited.

        Raises:
            Violation: what the world took for granted, to have fewer moves, does not hold.
        """
        ...


class PlainWorld(Generic[State, Move]):
    """What most worlds answer to the rarer questions. States are plain values: see `packed`."""

    def check(self, state: State) -> None:
        """Finds nothing wrong."""

    def pack(self, state: State) -> bytes:
        """The value as bytes."""
        return packed(state)

    def is_fault(self, move: Move) -> bool:
        """Nothing is a fault."""
        del move
        return False

    def tell(self, state: State, move: Move) -> str:
        """The move as it prints itself."""
        del state
        return str(move)

    def conclude(self) -> None:
        """Nothing was taken for granted."""


def packed(value: object) -> bytes:
    """A plain value as bytes: equal for equal values, whatever the order of sets in them."""
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def _pack(value: object, parts: list[bytes]) -> None:
    if isinstance(value, Enum):
        parts.append(f"{type(value).__name__}.{value.name};".encode())
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        parts.append(f"{value!r};".encode())
    elif isinstance(value, tuple):
        parts.append(b"(")
        for item in value:
            _pack(item, parts)
        parts.append(b")")
    elif isinstance(value, frozenset):
        parts.append(b"{")
        parts += sorted(packed(item) for item in value)
        parts.append(b"}")
    else:
        raise TypeError(f"a state holds plain values, tuples and frozensets, not {value!r}")
