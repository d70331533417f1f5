"""Tiers that become smaller and larger while they are used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.pool import Pool
from penstock.errors import InvariantViolation


def require_sound(pool: Pool, used: set[int]) -> None:
    free, closed = set(pool.free_slots().tolist()), set(pool.closed_slots())
    assert not free & closed
    assert not (free | closed) & used
    assert len(free) + len(closed) + len(used) == pool.capacity
    assert len(closed) + pool.closing + pool.slot_count == pool.capacity
    assert not (pool.closing and pool.free_count)


def test_free_slots_are_closed_at_once_and_others_when_they_are_free() -> None:
    pool = Pool("host", 8)
    used = pool.take(6)

    pool.resize(3)

    assert (pool.free_count, pool.closing, len(pool.closed_slots())) == (0, 3, 2)
    pool.discard(used[:4])
    assert (pool.free_count, pool.closing, len(pool.closed_slots())) == (1, 0, 5)


def test_slots_that_were_closed_can_be_used_again() -> None:
    pool = Pool("host", 8)
    pool.resize(2)

    pool.resize(8)

    assert sorted(pool.take(8).tolist()) == list(range(8))


def test_a_pool_is_never_larger_than_it_was_made() -> None:
    pool = Pool("host", 8)
    for wrong in (0, 9):
        with pytest.raises(InvariantViolation, match=f"{wrong} slots of 8"):
            pool.resize(wrong)


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "resize"]), st.integers(1, 12))))
def test_every_slot_is_free_closed_or_used_whatever_the_order(
    moves: list[tuple[str, int]],
) -> None:
    pool, used = Pool("host", 12), set[int]()
    for move, count in moves:
        if move == "take":
            used |= set(pool.take(min(count, pool.free_count)).tolist())
        elif move == "free":
            gone = sorted(used)[:count]
            pool.discard(np.array(gone, dtype=np.int32))
            used -= set(gone)
        else:
            pool.resize(count)
        require_sound(pool, used)
