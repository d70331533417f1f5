"""The books of a target: which of its areas are open, which are retired.

    open ──retire──→ retired ──free, once fenced──→ (forgotten)

The one rule: an area goes this way once, and is not freed before its fence holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.transport.remote import Area, Fenced, NotYet

if TYPE_CHECKING:
    from collections.abc import Iterable

SomeArea = TypeVar("SomeArea", bound=Area)


class Areas(Generic[SomeArea]):
    """The areas of one target."""

    def __init__(self) -> None:
        self._open: dict[int, SomeArea] = {}
        self._retired: dict[int, SomeArea] = {}

    @property
    def open(self) -> tuple[SomeArea, ...]:
        """Areas that are in use."""
        return tuple(self._open.values())

    @property
    def retired(self) -> tuple[SomeArea, ...]:
        """Areas that are not used any more, but still ours to keep."""
        return tuple(self._retired.values())

    @property
    def open_bytes(self) -> int:
        """Bytes of areas that are in use."""
        return _total(self._open.values())

    @property
    def retired_bytes(self) -> int:
        """Bytes of areas that are retired."""
        return _total(self._retired.values())

    def add(self, area: SomeArea) -> SomeArea:
        """Takes a new area into the books."""
        self._open[id(area)] = area
        return area

    def retire(self, area: Area) -> SomeArea | None:
        """The area as it is retired, or nothing if it was before."""
        if id(area) in self._retired:
            return None
        if id(area) not in self._open:
            raise ValueError(f"area of {area.peer!r} is not of this target, or was freed")
        known = self._open.pop(id(area))
        self._retired[id(area)] = known
        return known

    def require_retired(self, area: Area) -> SomeArea:
        """The area, which must be retired."""
        if id(area) not in self._retired:
            raise ValueError(f"area of {area.peer!r} is not retired")
        return self._retired[id(area)]

    def free(self, area: Area, fence: Fenced | NotYet) -> SomeArea:
        """The area as it leaves the books."""
        known = self.require_retired(area)
        match fence:
            case NotYet(cause):
                raise ValueError(f"area of {area.peer!r} cannot be freed: {cause}")
            case Fenced():
                pass
        del self._retired[id(area)]
        return known


def _total(areas: Iterable[Area]) -> int:
    return sum(len(area.memory) for area in areas)
