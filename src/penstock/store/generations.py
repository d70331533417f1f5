"""Which generation of a space counts in a shared store, and which ones came before it.

A *generation* is a random number that is part of every value's name, so a new one voids all values
of before. A record of the store says which one counts, and names its ancestors:

    record = sum (8 bytes), generation that counts (8 bytes), ancestors (8 bytes each, newest first)

A store can go back in time: a replica that was behind becomes the master, a backup is restored, an
old version of an object comes back. Its record is sound then, and old. So a process remembers the
last generation that it followed, and engines remember it for the process when it is restarted.

The one rule: a record is followed only if it descends from every generation that is known here.
Another one is answered by a new generation, which descends from both. Ancestors beyond
`ANCESTORS_MAX` are forgotten: who missed that many resets begins one more, and finds nothing old.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

NUMBER_BYTES = 8
ANCESTORS_MAX = 511
"""A record of 4 KiB. Of machines that all reset at once, each may add two."""
SPACES_MAX = 256
"""Spaces of which generations are remembered: models and versions of their weights."""


class Lineage(NamedTuple):
    """A generation and those before it."""

    current: int
    ancestors: tuple[int, ...] = ()
    """Newest first."""

    def descends_from(self, generation: int) -> bool:
        """Whether it is that generation, or came after it."""
        return generation == self.current or generation in self.ancestors

    def to_record(self, space: bytes) -> bytes:
        """As it is stored for a space."""
        numbers = (self.current, *self.ancestors)
        body = b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in numbers)
        return _sum_of(space, body) + body

    @classmethod
    def from_record(cls, space: bytes, record: bytes) -> Lineage | None:
        """What `to_record` wrote for this space; `None`: it is something else, or damaged."""
        body = record[NUMBER_BYTES:]
        count, rest = divmod(len(body), NUMBER_BYTES)
        sound = record[:NUMBER_BYTES] == _sum_of(space, body)
        if not sound or rest or not 1 <= count <= 1 + ANCESTORS_MAX:
            return None
        numbers = [
            int.from_bytes(body[at : at + NUMBER_BYTES], "little")
            for at in range(0, len(body), NUMBER_BYTES)
        ]
        return cls(numbers[0], tuple(numbers[1:]))


class KnownGenerations:
    """What a process knows of the generations of each space; whoever has it guards it."""

    def __init__(self) -> None:
        self._followed: OrderedDict[bytes, Lineage] = OrderedDict()
        self._told: OrderedDict[bytes, dict[int, None]] = OrderedDict()
        """Generations that engines know of, and that no record which was read descends from."""

    def expect(self, space: bytes, generation: int) -> bool:
        """An engine knows of a generation; whether what is followed here descends from it.

        If not, it may be an old one: it must not be used before the record was read again.
        """
        followed = self._followed.get(space)
        if followed is not None and followed.descends_from(generation):
            return True
        told = self._told.setdefault(space, {})
        told[generation] = None
        if len(told) > ANCESTORS_MAX // 2:
            del told[next(iter(told))]
        _bound(self._told)
        return False

    def accepts(self, space: bytes, lineage: Lineage) -> bool:
        """Whether a record that was read descends from all that is known."""
        followed = self._followed.get(space)
        known = [*self._told.get(space, ()), *([] if followed is None else [followed.current])]
        return all(map(lineage.descends_from, known))

    def follow(self, space: bytes, lineage: Lineage) -> None:
        """A record that was read and accepted, or written here."""
        self._followed[space] = lineage
        self._followed.move_to_end(space)
        _bound(self._followed)
        told = self._told.pop(space, {})
        left = {each: None for each in told if not lineage.descends_from(each)}
        if left:
            self._told[space] = left

    def successor(self, space: bytes, fresh: int, read: Lineage | None) -> Lineage:
        """A new generation, which descends from what was read and from all that is known."""
        parents = [each for each in (read, self._followed.get(space)) if each is not None]
        before = [each.current for each in parents]
        before += self._told.get(space, ())
        before += [ancestor for each in parents for ancestor in each.ancestors]
        return Lineage(fresh, tuple(dict.fromkeys(before))[:ANCESTORS_MAX])


def _sum_of(space: bytes, body: bytes) -> bytes:
    return xxh3_64_intdigest(space + body).to_bytes(NUMBER_BYTES, "little")


def _bound(spaces: OrderedDict[bytes, Lineage] | OrderedDict[bytes, dict[int, None]]) -> None:
    while len(spaces) > SPACES_MAX:
        spaces.popitem(last=False)
