"""Extents: cutting and joining never change which bytes are named, nor their order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.vocabulary.planes import Extent, coalesce

extents = st.builds(Extent, st.integers(0, 2), st.integers(0, 30), st.integers(1, 12))


def spelled(found: list[Extent]) -> list[tuple[int, int]]:
    """Every byte that the extents name, in order."""
    return [
        (extent.place, offset) for extent in found for offset in range(extent.offset, extent.end)
    ]


def test_a_split_extent_merges_to_itself() -> None:
    extent = Extent(1, 100, 10)

    first, rest = extent.split(4)

    assert (first, rest) == (Extent(1, 100, 4), Extent(1, 104, 6))
    assert first.merge(rest) == extent


@pytest.mark.parametrize("at", [-1, 0, 10, 11])
def test_an_extent_is_split_inside_only(at: int) -> None:
    with pytest.raises(ValueError, match=f"at is {at}, must be from 1 to 9"):
        Extent(0, 0, 10).split(at)


@pytest.mark.parametrize(
    "following",
    [Extent(0, 11, 4), Extent(0, 9, 4), Extent(1, 10, 4)],
    ids=["gap", "overlap", "other place"],
)
def test_only_what_follows_directly_is_merged(following: Extent) -> None:
    with pytest.raises(ValueError, match="must start where"):
        Extent(0, 0, 10).merge(following)


@pytest.mark.parametrize(
    ("place", "offset", "length", "field"),
    [(-1, 0, 1, "place"), (0, -1, 1, "offset"), (0, 0, 0, "length")],
)
def test_an_extent_that_names_nothing_is_refused(
    place: int, offset: int, length: int, field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field} is"):
        Extent(place, offset, length)


def test_neighbours_coalesce_and_others_stay() -> None:
    found = [Extent(0, 0, 4), Extent(0, 4, 4), Extent(0, 10, 2), Extent(1, 12, 2)]

    assert coalesce(found) == [Extent(0, 0, 8), Extent(0, 10, 2), Extent(1, 12, 2)]


def test_coalescing_does_not_sort() -> None:
    backwards = [Extent(0, 4, 4), Extent(0, 0, 4)]

    assert coalesce(backwards) == backwards


@given(st.lists(extents))
def test_coalesced_extents_spell_the_same_bytes(found: list[Extent]) -> None:
    merged = coalesce(found)

    assert spelled(merged) == spelled(found)
    assert not any(a.adjoins(b) for a, b in pairwise(merged))
