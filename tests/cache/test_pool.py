"""Slots: taken, held, filled, freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.states import SlotState
from penstock.cache.tier import Pool
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from numpy.typing import NDArray


def slots(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def pool() -> Pool:
    return Pool("host", 4)


def states_of(pool: Pool) -> list[SlotState]:
    return [SlotState(number) for number in pool.state.tolist()]


def test_a_new_pool_is_free(pool: Pool) -> None:
    assert pool.free_count == 4
    assert states_of(pool) == [SlotState.FREE] * 4


def test_slots_are_taken_in_order_and_are_then_filling(pool: Pool) -> None:
    taken = pool.take(3)

    assert taken.tolist() == [0, 1, 2]
    assert pool.free_count == 1
    assert states_of(pool) == [SlotState.FILLING] * 3 + [SlotState.FREE]


def test_no_slot_is_given_twice(pool: Pool) -> None:
    first = pool.take(2)

    second = pool.take(2)

    assert not set(first.tolist()) & set(second.tolist())


def test_what_was_freed_can_be_taken_again(pool: Pool) -> None:
    pool.take(4)

    pool.discard(slots(2))

    assert pool.take(1).tolist() == [2]


def test_taking_more_than_is_free_is_our_defect(pool: Pool) -> None:
    pool.take(3)

    with pytest.raises(InvariantViolation, match="'host': 2 slots taken of 1 free"):
        pool.take(2)

    assert pool.free_count == 1


def test_named_free_slots_can_be_taken(pool: Pool) -> None:
    pool.take_exactly(slots(3, 1))

    assert states_of(pool)[1] is SlotState.FILLING
    assert states_of(pool)[3] is SlotState.FILLING
    assert sorted(pool.take(2).tolist()) == [0, 2]


@pytest.mark.parametrize("wanted", [(0, 1), (1, 1), (9,)])
def test_slots_that_are_not_free_cannot_be_taken_by_name(
    pool: Pool, wanted: tuple[int, ...]
) -> None:
    pool.take(1)

    with pytest.raises(InvariantViolation, match="not all free"):
        pool.take_exactly(slots(*wanted))

    assert sorted(pool.free_slots().tolist()) == [1, 2, 3]


def test_a_block_is_ready_when_it_is_filled(pool: Pool) -> None:
    taken = pool.take(1)

    pool.fill(taken)

    assert states_of(pool)[0] is SlotState.READY


def test_a_leaving_block_can_stay_after_all(pool: Pool) -> None:
    taken = pool.take(1)
    pool.fill(taken)

    pool.depart(taken)
    leaving = states_of(pool)[0]
    pool.keep(taken)

    assert leaving is SlotState.LEAVING
    assert states_of(pool)[0] is SlotState.READY


def test_an_evicted_slot_is_free(pool: Pool) -> None:
    taken = pool.take(2)
    pool.fill(taken)

    pool.evict(slots(0))

    assert states_of(pool)[:2] == [SlotState.FREE, SlotState.READY]
    assert pool.free_count == 3


def test_a_filling_slot_is_not_evicted(pool: Pool) -> None:
    pool.take(1)

    with pytest.raises(InvariantViolation, match="EVICT in state FILLING"):
        pool.evict(slots(0))


def test_a_leaving_slot_is_not_evicted(pool: Pool) -> None:
    pool.take(1)
    pool.fill(slots(0))
    pool.depart(slots(0))

    with pytest.raises(InvariantViolation, match="EVICT in state LEAVING"):
        pool.evict(slots(0))


def test_a_held_slot_is_not_freed(pool: Pool) -> None:
    pool.take(1)
    pool.fill(slots(0))
    pool.hold(slots(0))

    with pytest.raises(InvariantViolation, match="EVICT of slot 0, which is held"):
        pool.evict(slots(0))

    assert pool.free_count == 3


def test_a_slot_is_not_freed_twice(pool: Pool) -> None:
    pool.take(1)
    pool.discard(slots(0))

    with pytest.raises(InvariantViolation, match="DISCARD in state FREE"):
        pool.discard(slots(0))

    assert pool.free_count == 4


def test_a_condemned_slot_is_not_free_until_it_is_discarded(pool: Pool) -> None:
    pool.take(1)
    pool.fill(slots(0))

    pool.condemn(slots(0))
    free_before = pool.free_count
    pool.discard(slots(0))

    assert free_before == 3
    assert pool.free_count == 4


def test_letting_go_tells_which_slots_nothing_holds_any_more(pool: Pool) -> None:
    pool.take(2)
    pool.hold(slots(0, 1))
    pool.hold(slots(1))

    quiet = pool.unhold(slots(0, 1))

    assert quiet.tolist() == [0]
    assert pool.holders.tolist() == [0, 1, 0, 0]


def test_a_count_of_holders_below_zero_is_raised_and_not_clamped(pool: Pool) -> None:
    pool.take(2)
    pool.hold(slots(0))

    with pytest.raises(InvariantViolation, match="'host': slot 1 was released once too often"):
        pool.unhold(slots(0, 1))

    assert pool.holders.tolist() == [1, 0, 0, 0]


def test_slots_are_counted_by_state(pool: Pool) -> None:
    pool.take(3)
    pool.fill(slots(0, 1))

    counts = {state: pool.count(state) for state in SlotState}

    assert counts[SlotState.READY] == 2
    assert counts[SlotState.FILLING] == 1
    assert counts[SlotState.FREE] == 1
    assert counts[SlotState.LEAVING] == counts[SlotState.DOOMED] == 0


def test_looking_at_free_slots_does_not_give_them_away(pool: Pool) -> None:
    seen = pool.free_slots()

    seen[:] = 0

    assert sorted(pool.take(4).tolist()) == [0, 1, 2, 3]


def test_a_slot_that_is_condemned_while_its_block_leaves_is_not_counted_as_leaving(
    pool: Pool,
) -> None:
    pool.take(2)
    pool.fill(slots(0, 1))
    pool.depart(slots(0, 1))

    pool.condemn(slots(0))

    assert pool.leaving_count == pool.count(SlotState.LEAVING) == 1


@given(st.lists(st.tuples(st.sampled_from(["take", "free"]), st.integers(1, 12))))
def test_every_slot_is_free_or_used_whatever_the_order(moves: list[tuple[str, int]]) -> None:
    pool, used = Pool("host", 12), set[int]()
    for move, count in moves:
        if move == "take":
            used |= set(pool.take(min(count, pool.free_count)).tolist())
        else:
            gone = sorted(used)[:count]
            pool.discard(np.array(gone, dtype=np.int32))
            used -= set(gone)
        free = set(pool.free_slots().tolist())
        assert not free & used
        assert len(free) + len(used) == pool.slot_count
