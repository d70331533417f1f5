"""A world in which almost everything happens in its turn, but for at most k delays.

Worlds that are too large for all orders are looked at in those that differ from the usual one
in a few places, where most bugs of order show themselves already. The first of a state's moves
is the one whose turn it is. It happens, or it is *delayed*: then it waits until no other move
is left, however long that takes; the longest delayed is the first whose turn it is then, and
may be delayed once more. Faults come whenever they like, and cost no delay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple

from lab.explore.world import Move, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.explore.world import World


class Late(NamedTuple, Generic[State, Move]):
    """A state of the world below, and what is being kept from happening."""

    inner: State
    waiting: tuple[Move, ...]
    """Delayed moves, the longest delayed first."""
    used: int
    """How many delays there were. Fewer are better: such a state is looked at first."""


class Choice(NamedTuple, Generic[Move]):
    """A move that happens, or is delayed."""

    move: Move
    delayed: bool


class Delayed(Generic[State, Move]):
    """Another world with at most `delays` delays."""

    def __init__(self, world: World[State, Move], *, delays: int) -> None:
        if delays < 0:
            raise ValueError(f"delays must be 0 or more, got {delays}")
        self.world = world
        self.delays = delays
        self._numbers: dict[Move, int] = {}
        """Moves that were ever delayed, each with a number, to pack them quickly."""

    def begin(self) -> Late[State, Move]:
        """The world below begins, and nothing is delayed."""
        return Late(self.world.begin(), (), 0)

    def moves(self, state: Late[State, Move]) -> Sequence[Choice[Move]]:
        """The move whose turn it is, its delay, and all faults."""
        below = self.world.moves(state.inner)
        usual = [move for move in below if not self.world.is_fault(move)]
        prompt = [move for move in usual if move not in state.waiting]
        turn = prompt or [late for late in state.waiting if late in usual]
        choices = [Choice(move, delayed=False) for move in turn[:1]]
        if len(usual) > 1 and state.used < self.delays:
            choices.append(Choice(turn[0], delayed=True))
        choices += [Choice(move, delayed=False) for move in below if self.world.is_fault(move)]
        return choices

    def step(self, state: Late[State, Move], move: Choice[Move]) -> Late[State, Move]:
        """Lets a move happen, or puts it off."""
        others = state.waiting
        if move.move in others:
            others = tuple(late for late in others if late != move.move)
        if move.delayed:
            return Late(state.inner, (*others, move.move), state.used + 1)
        return Late(self.world.step(state.inner, move.move), others, state.used)

    def check(self, state: Late[State, Move]) -> None:
        """Looks at the state below."""
        self.world.check(state.inner)

    def finished(self, state: Late[State, Move]) -> bool:
        """Whether all work of the world below is done."""
        return self.world.finished(state.inner)

    def pack(self, state: Late[State, Move]) -> bytes:
        """The state without the number of delays: each is found with the fewest first."""
        if not state.waiting:
            return self.world.pack(state.inner)
        numbers = [self._numbers.setdefault(late, len(self._numbers)) for late in state.waiting]
        return self.world.pack(state.inner) + b"|" + repr(numbers).encode()

    def is_fault(self, move: Choice[Move]) -> bool:
        """Whether it is one in the world below."""
        return self.world.is_fault(move.move)

    def tell(self, state: Late[State, Move], move: Choice[Move]) -> str:
        """The move in words."""
        reported = self.world.tell(state.inner, move.move)
        return f"(delayed: {reported})" if move.delayed else reported

    def conclude(self) -> None:
        """Looks back at the world below."""
        self.world.conclude()
