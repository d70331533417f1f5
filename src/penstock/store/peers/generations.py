"""Which generation of a space counts, among store processes that have no store in common.

What a process knows is two sets that only grow: generations that a reset has begun, and those that
a later one has ended. Two that meet unite their sets. So it does not matter who tells whom, how
often and in which order: who knows the same resets has the same generation.

    never reset           FIRST
    one is not ended      that one
    several are not       a digest of them: engines were reset while they did not reach each other

An engine remembers the generation that it knows for a process that is restarted (`adopt`). Should a
later one have been begun meanwhile, the next peer says so before anything is read from it.

The one rule: a generation that was ended never counts again, whoever comes back with it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from penstock.store.shared.generations import (
    ANCESTORS_MAX,
    LINEAGES_MAX,
    NUMBER_BYTES,
    Lineage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FIRST = 0
"""The generation of a space that was never reset: engines that start need not agree on one."""


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of one space; the oldest first."""

    begun: dict[int, None] = field(default_factory=dict)
    ended: dict[int, None] = field(default_factory=dict)

    def current(self) -> int:
        counting = sorted(each for each in self.begun if each not in self.ended)
        if not self.begun:
            return FIRST
        if len(counting) == 1:
            return counting[0]
        joined = b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in counting)
        return xxh3_64_intdigest(joined) >> 1  # Messages have signed numbers.


class PeerGenerations:
    """What a process knows of all spaces; whoever has it guards it."""

    def __init__(self) -> None:
        self._spaces: OrderedDict[bytes, _Known] = OrderedDict()

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._spaces))

    def current(self, space: bytes) -> int:
        known = self._spaces.get(space)
        return FIRST if known is None else known.current()

    def said(self, space: bytes) -> tuple[list[int], list[int]]:
        """What another process is told: generations that were begun, and that were ended."""
        known = self._spaces.get(space, _Known())
        return list(known.begun), list(known.ended)

    def merge(self, space: bytes, begun: Iterable[int], ended: Iterable[int]) -> bool:
        """Takes in what another one knows; whether another generation counts now."""
        known = self._spaces.setdefault(space, _Known())
        self._spaces.move_to_end(space)
        before = known.current()
        known.begun.update(dict.fromkeys(begun))
        known.ended.update(dict.fromkeys(ended))
        now = known.current()
        if now != before and before not in known.begun and before != FIRST:
            known.ended[before] = None  # A digest: it comes before what counts now.
        for numbers in (known.ended, known.begun):
            for number in list(islice(numbers, max(0, len(numbers) - ANCESTORS_MAX))):
                known.ended.pop(number, None)
                known.begun.pop(number, None)  # Or it would count again.
        while len(self._spaces) > LINEAGES_MAX:
            self._spaces.popitem(last=False)
        return now != before

    def adopt(self, space: bytes, generation: int) -> bool:
        """An engine knows of a generation, of before this process; whether it counts now."""
        known = self._spaces.get(space, _Known())
        if generation in {FIRST, known.current(), *known.begun, *known.ended}:
            return False
        return self.merge(space, [generation], [])

    def lineage(self, space: bytes) -> Lineage:
        """The record as other stores keep it: `SharedKeeper` reads it, and writes the next."""
        known = self._spaces.get(space, _Known())
        current = known.current()
        before = [*reversed(known.ended), *known.begun, FIRST]
        ancestors = [each for each in dict.fromkeys(before) if each != current]
        if len(ancestors) > ANCESTORS_MAX:
            ancestors = [*ancestors[: ANCESTORS_MAX - 1], FIRST]
        return Lineage(current, tuple(ancestors))

    def replace(self, space: bytes, lineage: Lineage) -> bool:
        """A generation that comes after all its ancestors; whether another one counts now."""
        if lineage.current == self.current(space):
            return False
        return self.merge(space, [lineage.current], [each for each in lineage.ancestors if each])
