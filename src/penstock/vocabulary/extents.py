"""Extents: runs of bytes in a place, and the arithmetic of cutting and joining them.

A *place* is a number that the reader of an extent can resolve: a buffer of a layout, an
arena, a segment of a tier. The one rule: no function here changes the order of bytes. A
list of extents, read one after the other, spells the same bytes before and after it was
coalesced or cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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

    def adjoins(self, following: Extent) -> bool:
        """Whether `following` starts where this one ends."""
        return self.place == following.place and self.end == following.offset

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
