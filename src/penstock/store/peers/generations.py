"""Which generation of a space counts, among store processes that have no store in common.

What a process knows is generations that count, and those that a later one has ended. Two that meet
unite what they know. So it does not matter who tells whom, how often and in which order: who knows
the same resets has the same generation.

    never reset           FIRST
    one counts            that one
    several do            a digest of them: engines were reset while they did not reach each other

Each has an *order*: one more than those its engine knew. Of the ended ones `ANCESTORS_MAX` are
kept, those of the highest order, so that all forget the same ones. One that was forgotten and comes
back counts beside the others: that is a reset more, and never the undoing of one.

An engine remembers the generation that it knows for a process that is restarted (`adopt`). Should a
later one have been begun meanwhile, the next peer says so before anything is read from it.

The one rule: a generation that was ended never counts again alone, whoever comes back with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from penstock.store.shared.generations import (
    ANCESTORS_MAX,
    LINEAGES_MAX,
    NUMBER_BYTES,
    Lineage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FIRST = 0
"""The generation of a space that was never reset: engines that start need not agree on one."""
ORDER_MAX = 1 << 40
"""Of what a peer may say, so that the next one can be said, too."""
Orders = dict[int, int]
"""Generations, and the order of each."""


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one space."""

    counting: Orders = field(default_factory=dict)
    ended: Orders = field(default_factory=dict)

    def current(self) -> int:
        if len(self.counting) == 1:
            return next(iter(self.counting))
        # None counts where somebody has ended what he did not follow.
        numbers = self.counting or self.ended
        return _digest(each.to_bytes(NUMBER_BYTES, "little") for each in sorted(numbers))

    def order_of(self, generation: int) -> int:
        """Its own, or for want of one the highest."""
        for known in (self.counting, self.ended):
            if generation in known:
                return known[generation]
        return max((*self.counting.values(), *self.ended.values()), default=0)

    def unite(self, counting: Mapping[int, int], ended: Mapping[int, int]) -> None:
        before = self.current()
        for mine, theirs in ((self.counting, counting), (self.ended, ended)):
            for number, order in theirs.items():
                mine[number] = max(order, mine.get(number, 0))
        for number in self.counting.keys() & self.ended.keys():
            del self.counting[number]
        if len(self.counting) > ANCESTORS_MAX:
            one = self.current()
            self.ended |= self.counting
            self.counting = {one: max(self.counting.values())}
        if before not in (FIRST, self.current()) and before not in self.counting:
            self.ended.setdefault(before, self.order_of(before))  # A digest comes before the next.
        kept = sorted(self.ended, key=lambda number: (self.ended[number], number))
        for number in kept[: max(0, len(kept) - ANCESTORS_MAX)]:
            del self.ended[number]


def _digest(parts: Iterable[bytes]) -> int:
    """A generation made of others; `FIRST`, if there are none."""
    joined = b"".join(parts)
    return max(1, xxh3_64_intdigest(joined) >> 1) if joined else FIRST  # Signed in messages.


class PeerGenerations:
    """What a process knows of all spaces; whoever has it guards it."""

    def __init__(self) -> None:
        self._spaces: OrderedDict[bytes, _Known] = OrderedDict()
        self._forgotten = b""
        """A digest of the spaces that were forgotten: one that is not known may be among them."""

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._spaces))

    def _of(self, space: bytes) -> _Known:
        known = self._spaces.get(space)
        if known is None and self._forgotten:
            return _Known({_digest((space, self._forgotten)): 1})
        return known or _Known()

    def current(self, space: bytes) -> int:
        return self._of(space).current()

    def said(self, space: bytes) -> tuple[Orders, Orders]:
        """What another process is told: generations that count, and that were ended."""
        known = self._of(space)
        return dict(known.counting), dict(known.ended)

    def merge(self, space: bytes, counting: Mapping[int, int], ended: Mapping[int, int]) -> bool:
        """Takes in what another one knows; whether another generation counts now."""
        known = self._of(space)
        before = known.current()
        known.unite(counting, ended)
        self._spaces[space] = known
        self._spaces.move_to_end(space)
        while len(self._spaces) > LINEAGES_MAX:
            name, oldest = self._spaces.popitem(last=False)
            number = _digest((self._forgotten, name, oldest.current().to_bytes(NUMBER_BYTES)))
            self._forgotten = number.to_bytes(NUMBER_BYTES)
        return known.current() != before

    def adopt(self, space: bytes, generation: int) -> bool:
        """An engine knows of a generation, of before this process; whether it counts now."""
        known = self._of(space)
        if generation in {FIRST, known.current(), *known.counting, *known.ended}:
            return False
        return self.merge(space, {generation: _next(known.order_of(generation))}, {})

    def lineage(self, space: bytes) -> Lineage:
        """The record as other stores keep it: `SharedKeeper` reads it, and writes the next."""
        known = self._of(space)
        current = known.current()
        newest = sorted(known.ended, key=lambda number: -known.ended[number])
        ancestors = [each for each in (*known.counting, *newest) if each != current]
        if current != FIRST:
            ancestors = [*ancestors[: ANCESTORS_MAX - 1], FIRST]
        return Lineage(current, tuple(ancestors))

    def replace(self, space: bytes, lineage: Lineage) -> bool:
        """A generation that comes after all its ancestors; whether another one counts now."""
        known = self._of(space)
        if lineage.current == known.current():
            return False
        ended = {each: known.order_of(each) for each in lineage.ancestors if each != FIRST}
        order = _next(max([known.order_of(FIRST), *ended.values()]))
        return self.merge(space, {lineage.current: order}, ended)


def _next(order: int) -> int:
    return min(order + 1, ORDER_MAX)
