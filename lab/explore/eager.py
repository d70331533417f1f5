"""Moves that may happen as soon as they can, and how it is known that nothing is missed thereby.

Some moves of a party commute with everything else that can happen to it: it makes no difference
whether they come before or after. A world can let such an *eager* move happen at once, alone,
and so has far fewer states. That a move commutes is not believed but checked, when all states
were visited, on the local states of its party:

    s ──input──→ s'          for every input that was ever given after the eager move:
    │            │           given before it, too, it must lead to the same local state, with
    eager      eager         the same messages to each of the others in the same order
    ↓            ↓
    t ──input──→ t'

and the same for s' and t' in turn. Then every path on which the move comes later has a twin on
which it comes at once, with the same messages, so nothing is lost by looking at the twin alone.
Inputs that only exist after the move (a timer that it starts) need no twin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from lab.explore.world import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lab.explore.memo import Memo

Machine = TypeVar("Machine")

Said = tuple[tuple[int, int], ...]
"""What a party said: to whom, and what, in order."""


def check_commuting(
    memo: Memo[Machine, int, Said],
    *,
    eager_in: Callable[[int], Collection[int]],
    applies: Callable[[int, int], bool],
) -> int:
    """Checks that eager inputs commute with all others; says how many pairs were looked at.

    Args:
        memo: the local states of a party, and what every input did to each.
        eager_in: the eager inputs that are possible in a local state.
        applies: whether an input is possible in a local state.

    Raises:
        Violation: two orders end differently.
    """
    known = memo.transitions()
    seen = {(state, eager) for state in range(len(memo)) for eager in eager_in(state)}
    pending = [*sorted(seen)]
    while pending:
        state, eager = pending.pop()
        after, said = memo.after(state, eager)
        for given, end, then_said in known.get(after, ()):
            if given == eager or not applies(state, given):
                continue
            other, other_said = memo.after(state, given)
            if eager in eager_in(other):
                other_end, other_then = memo.after(other, eager)
                same = other_end == end and _alike(said, then_said, other_said, other_then)
                if (other, eager) not in seen:
                    seen.add((other, eager))
                    pending.append((other, eager))
            else:
                same = other == end and not said and other_said == then_said
            if not same:
                raise Violation("eager", f"inputs {eager} and {given} do not commute in {state}")
    return len(seen)


def _alike(first: Said, second: Said, other_first: Said, other_second: Said) -> bool:
    """Whether everybody hears the same in the same order."""
    one, other = (*first, *second), (*other_first, *other_second)
    if one == other:
        return True
    targets = {target for target, _ in (*one, *other)}
    return all(
        [said for to, said in one if to == target] == [said for to, said in other if to == target]
        for target in targets
    )
