"""What does not fit now is told apart from what never will."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.errors import CapacityError, NeverFitsError

if TYPE_CHECKING:
    from tests.runtime.conftest import Engine


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_that_fits_but_not_now_is_told_apart_from_one_that_never_does(
    engine: Engine,
) -> None:
    lease = engine.cache.acquire(tokens(20))

    with pytest.raises(CapacityError, match="'device' can give 3 slots, wanted: 8") as refused:
        engine.cache.acquire(tokens(32, 500))

    assert not refused.value.never
    lease.release()
    engine.cache.acquire(tokens(32, 500)).release()


def test_a_lease_that_can_never_grow_so_far_is_told_so_and_is_as_it_was(engine: Engine) -> None:
    lease = engine.cache.acquire(tokens(14))

    for token_count in (33, 2**62):
        with pytest.raises(NeverFitsError, match="a request can have at most 8") as refused:
            lease.grow(token_count)
        assert refused.value.wanted == -(-token_count // 4)

    assert len(lease.block_table) == 4
    lease.release()
    engine.expect_at_rest()
