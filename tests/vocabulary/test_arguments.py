"""Arguments that are refused, and the words of the refusal."""

from __future__ import annotations

import pytest

from penstock.vocabulary.arguments import as_int


def test_a_number_that_is_too_large_is_refused_with_the_whole_range() -> None:
    with pytest.raises(ValueError, match=r"must be an int from 0 to 9223372036854775807$"):
        as_int("slot", 2**63)


def test_a_number_that_is_too_small_is_refused_with_the_lower_bound() -> None:
    with pytest.raises(ValueError, match=r"slot is -1, must be an int of at least 0$"):
        as_int("slot", -1)


@pytest.mark.parametrize("value", [-1, 9, True, 2.0, None])
def test_a_number_with_two_bounds_is_refused_with_both(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be an int from 0 to 8$"):
        as_int("slot", value, 0, 8)
