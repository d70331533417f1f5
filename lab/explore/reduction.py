"""Partial-order reduction: what cannot meet need not be interleaved.

The world names, for every move, all that it and its consequences can touch. Moves fall into
*islands* whose names never meet. What happens on one island neither enables, disables nor
changes anything on another, so it suffices to let the islands have their turns one after the
other: one island's moves are a persistent set. The sum of the islands' states is visited
instead of the product.

Two conditions come with it. A promise that `check` looks at is about one island, or about
what all have in common, which then belongs to all of them. And an island must not go round in
a circle while another waits for ever: when no move of the chosen island leads to a new state,
the search follows the other moves as well.

The one rule that must not break: a world that names too little hides its bugs. So
`check_independence` follows two moves of different islands in both orders, and complains when
the two orders end differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.explore.world import Violation

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from lab.explore.world import Move, State, World


def islands(world: World[State, Move], state: State, moves: Sequence[Move]) -> list[list[int]]:
    """The moves, by their places, in groups that can never influence each other."""
    groups: list[tuple[set[Hashable], list[int]]] = []
    for place, move in enumerate(moves):
        names, places = set(world.reach(state, move)), [place]
        apart = []
        for other in groups:
            if names.isdisjoint(other[0]):
                apart.append(other)
            else:
                names |= other[0]
                places = other[1] + places
        groups = [*apart, (names, places)]
    return sorted((places for _, places in groups), key=lambda places: (len(places), places))


def check_independence(
    world: World[State, Move], state: State, moves: Sequence[Move], groups: Sequence[Sequence[int]]
) -> None:
    """The first moves of the first two islands lead to the same state in both orders.

    Raises:
        Violation: they do not, or one of them is gone after the other.
    """
    first, second = moves[groups[0][0]], moves[groups[1][0]]
    ends = []
    for one, other in ((first, second), (second, first)):
        between = world.step(state, one)
        if other not in world.moves(between):
            raise Violation(
                "independence",
                f"after {world.tell(state, one)!r} there is no {world.tell(state, other)!r}",
            )
        ends.append(world.pack(world.step(between, other)))
    if ends[0] != ends[1]:
        raise Violation(
            "independence",
            f"the order of {world.tell(state, first)!r} and {world.tell(state, second)!r} matters",
        )
