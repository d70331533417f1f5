"""Extents: runs of bytes in a place, and the arithmetic of cutting and joining them.

A *place* is a number that the reader of an extent can resolve: a buffer of a layout, an
arena, a segment of a tier. The one rule: no function here changes the order of bytes. A
list of extents, read one after the other, spells the same bytes before and after it was
coalesced, cut or shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """`length` bytes from `offset` on, in `place`."""

    place: int
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.place < 0:
            raise ValueError(f"place is {self.place}, must be at least 0")
        if self.offset < 0:
            raise ValueError(f"offset is {self.offset}, must be at least 0")
        if self.length < 1:
            raise ValueError(f"length is {self.length}, must be at least 1")

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.length

    def split(self, at: int) -> tuple[Extent, Extent]:
        """Its first `at` bytes, and the rest."""
        if not 0 < at < self.length:
            raise ValueError(f"at is {at}, must be from 1 to {self.length - 1}")
        return (
            Extent(self.place, self.offset, at),
            Extent(self.place, self.offset + at, self.length - at),
        )

    def shift(self, by: int) -> Extent:
        """The same number of bytes, `by` bytes further on."""
        return Extent(self.place, self.offset + by, self.length)

    def adjoins(self, following: Extent) -> bool:
        """Whether `following` starts where this one ends."""
        return self.place == following.place and self.end == following.offset

    def overlaps(self, other: Extent) -> bool:
        """Whether the two share a byte."""
        return self.place == other.place and self.offset < other.end and other.offset < self.end

    def merge(self, following: Extent) -> Extent:
        """This extent and the adjacent one that follows it, as one."""
        if not self.adjoins(following):
            raise ValueError(f"following is {following}, must start where {self} ends")
        return Extent(self.place, self.offset, self.length + following.length)


def coalesce(extents: Iterable[Extent]) -> list[Extent]:
    """The same bytes in the same order, in as few extents as that order allows."""
    merged: list[Extent] = []
    for extent in extents:
        if merged and merged[-1].adjoins(extent):
            merged[-1] = merged[-1].merge(extent)
        else:
            merged.append(extent)
    return merged


def total_bytes(extents: Iterable[Extent]) -> int:
    """How many bytes the extents name together."""
    return sum(extent.length for extent in extents)


def window(extents: Iterable[Extent], *, start: int, length: int) -> list[Extent]:
    """Bytes `start` to `start + length` of what the extents spell one after the other.

    Raises:
        ValueError: The extents spell fewer bytes than that.
    """
    if start < 0 or length < 1:
        raise ValueError(f"window is {length} bytes from {start}, must be at least 1 from 0 on")
    found: list[Extent] = []
    position = 0
    for extent in extents:
        first = max(start, position)
        last = min(start + length, position + extent.length)
        if first < last:
            found.append(Extent(extent.place, extent.offset + first - position, last - first))
        position += extent.length
    if position < start + length:
        raise ValueError(f"window ends at {start + length}, but the extents end at {position}")
    return found


def in_pieces(extents: Iterable[Extent], *, piece_bytes: int) -> Iterator[list[Extent]]:
    """The extents in groups of exactly `piece_bytes`, the last one possibly shorter."""
    if piece_bytes < 1:
        raise ValueError(f"piece_bytes is {piece_bytes}, must be at least 1")
    piece: list[Extent] = []
    room = piece_bytes
    for extent in extents:
        rest = extent
        while rest.length > room:
            head, rest = rest.split(room)
            yield [*piece, head]
            piece, room = [], piece_bytes
        piece.append(rest)
        room -= rest.length
        if room == 0:
            yield piece
            piece, room = [], piece_bytes
    if piece:
        yield piece
