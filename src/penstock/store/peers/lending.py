"""What the engines of this process lend: which key lies in which slot, and the values made of it.

A value is that of shared stores (`store.shared.values`), made when it is asked for: its head and
sums from the arena's own, its block from the slot. Nothing is held meanwhile. A slot that its
engine fills with another block while it is read is seen here in most cases, and by the reader's
sums in all.

The one rule: what is lent is of the generation in which its engine lent it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.store.peers.messages import FOUND, MISSING
from penstock.store.shared.values import EngineGeometry, fill_fronts, piece_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import LentBlocks, MappedArena, Space
    from penstock.store.shared.values import ValuePiece
    from penstock.vocabulary.keys import Key

Span = tuple[int, int]
"""Where it begins in a value, and its length."""


class Lender:
    """An engine, from one reset to the next."""

    def __init__(self, number: int, blocks: LentBlocks) -> None:
        self.number = number
        self.space, self.salt = blocks.space, blocks.salt
        self.arenas = list(blocks.arenas)
        self.places: dict[bytes, tuple[ValuePiece, MappedArena]] = {}
        """The piece that each arena holds, by its name."""
        for arena in self.arenas:
            piece = piece_of(arena)
            self.places.setdefault(piece.name, (piece, arena))
        self.slots: dict[Key, int] = {}

    @property
    def pieces(self) -> list[bytes]:
        return list(self.places)

    def has_any(self, keys: Sequence[Key]) -> bool:
        return any(key in self.slots for key in keys)

    def goes_on_with(self, blocks: LentBlocks) -> bool:
        """Whether these blocks are lent beside those of before, and not instead of them."""
        same = (self.space, self.salt) == (blocks.space, blocks.salt)
        return same and self.arenas == list(blocks.arenas)

    def shape(self) -> bytes:
        return EngineGeometry.of(self.arenas).to_record()


class ValuesToCopy:
    """Values that were found: where they lie, and the heads before them."""

    def __init__(self, lender: Lender, piece: bytes, keys: Sequence[Key]) -> None:
        """Looks the keys up; the caller keeps the lender as it is meanwhile."""
        self._lender = lender
        self._keys = keys
        self._slots = [lender.slots.get(key) for key in keys]
        self.there = [at for at, slot in enumerate(self._slots) if slot is not None]
        found, arena = lender.places[piece]
        self.piece = found
        slots = np.array([slot for slot in self._slots if slot is not None], dtype=np.int32)
        # Views keep the memory, even if the arena is closed.
        self._blocks = arena.blocks(slots, found.block_bytes)
        chosen = [keys[at] for at in self.there]
        self._fronts = np.empty((len(chosen), found.front_bytes), dtype=np.uint8)
        sums = arena.host.sums(slots)
        none = [None] * len(chosen)
        sizes = [found.block_bytes] * len(chosen)
        fill_fronts(self._fronts, lender.space, found, chosen, none, lender.salt, sums, sizes)

    def all_of(self, spans: Sequence[Span]) -> Iterator[NDArray[np.uint8]]:
        """Spans of all values that are there, one after the other."""
        for place in range(len(self.there)):
            yield from self._spans_of(place, spans)

    def _spans_of(self, place: int, spans: Sequence[Span]) -> Iterator[NDArray[np.uint8]]:
        """Spans of the value at a place of `there`, where they lie."""
        front, block = self._fronts[place], self._blocks[place]
        for start, length in spans:
            head = max(0, min(length, len(front) - start))
            if head:
                yield front[start : start + head]
            if head < length:
                first = start + head - len(front)
                yield block[first : first + length - head]

    def copy(self, place: int, spans: Sequence[Span], target: NDArray[np.uint8]) -> None:
        """Copies spans of the value at a place of `there`."""
        at = 0
        for each in self._spans_of(place, spans):
            target[at : at + len(each)] = each
            at += len(each)

    def still_there(self) -> list[bool]:
        """Which of the keys lie where they did; the caller keeps the lender as it is meanwhile."""
        slots = self._lender.slots
        return [
            slot is not None and slots.get(key) == slot
            for key, slot in zip(self._keys, self._slots, strict=True)
        ]


def fits(piece: ValuePiece, spans: Sequence[Span]) -> bool:
    """Whether a value of a piece has these bytes."""
    return all(start + length <= piece.value_bytes for start, length in spans)


class Lendings:
    """All lenders of this process; whoever has it guards it."""

    def __init__(self) -> None:
        self._by_life: dict[int, Lender] = {}
        self._number = 0

    @property
    def lenders(self) -> list[Lender]:
        return list(self._by_life.values())

    def of_number(self, number: int) -> Lender | None:
        return next((each for each in self.lenders if each.number == number), None)

    def lend(self, blocks: LentBlocks, gone: Sequence[Key]) -> tuple[Lender, int | None]:
        """Notes blocks; returns their lender, and the number of the one whose place it takes."""
        lender, ended = self._by_life.get(blocks.life), None
        if lender is None or not lender.goes_on_with(blocks):
            ended = None if lender is None else lender.number
            self._number += 1
            lender = self._by_life[blocks.life] = Lender(self._number, blocks)
        for key in gone:
            lender.slots.pop(key, None)
        lender.slots.update(zip(blocks.keys, blocks.slots, strict=True))
        return lender, ended

    def end(self, life: int) -> int | None:
        lender = self._by_life.pop(life, None)
        return None if lender is None else lender.number

    def withdraw(self, arena: MappedArena) -> list[int]:
        """Ends those who lend out of an arena."""
        lives = [life for life, each in self._by_life.items() if arena in each.arenas]
        return [self._by_life.pop(life).number for life in lives]

    def find(self, space: Space, piece: bytes, key: Key) -> Lender | None:
        for lender in self._by_life.values():
            if lender.space == space and piece in lender.places and key in lender.slots:
                return lender
        return None


def answer(found: Sequence[bool]) -> bytes:
    """One byte for each key."""
    return bytes(FOUND if each else MISSING for each in found)
