"""What one request holds."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cache.states import LeaseMove, LeaseState
from penstock.errors import InvariantViolation
from penstock.machine.books import LeaseRecord
from penstock.vocabulary.keys import LeaseId


@pytest.fixture
def lease() -> LeaseRecord:
    return LeaseRecord(
        id=LeaseId(1),
        request="request 1",
        tenant=0,
        era=0,
        table=np.array([4, 2], dtype=np.int32),
        matched_blocks=1,
        token_count=16,
        published_blocks=1,
        tail_key=b"a",
        frontier=None,
    )


def test_a_lease_that_waits_for_nothing_is_ready(lease: LeaseRecord) -> None:
    assert lease.state is LeaseState.READY
    assert not lease.waiting


def test_a_lease_moves_by_its_table(lease: LeaseRecord) -> None:
    lease.move(LeaseMove.LOAD)
    loading = lease.state
    lease.move(LeaseMove.ARRIVE)

    assert loading is LeaseState.LOADING
    assert lease.state is LeaseState.READY


def test_a_released_lease_cannot_be_released_again(lease: LeaseRecord) -> None:
    lease.move(LeaseMove.RELEASE)

    with pytest.raises(InvariantViolation, match="lease of 'request 1': RELEASE in state RELEASED"):
        lease.move(LeaseMove.RELEASE)


def test_new_slots_come_at_the_end_and_leave_a_table_in_use_as_it_was(lease: LeaseRecord) -> None:
    in_use = lease.table

    lease.append(np.array([7], dtype=np.int32))

    assert lease.table.tolist() == [4, 2, 7]
    assert in_use.tolist() == [4, 2]


def test_two_leases_do_not_share_what_they_wait_for(lease: LeaseRecord) -> None:
    other = LeaseRecord(
        id=LeaseId(2),
        request="request 2",
        tenant=0,
        era=0,
        table=lease.table,
        matched_blocks=0,
        token_count=0,
        published_blocks=0,
        tail_key=None,
        frontier=None,
    )

    assert other.waiting is not lease.waiting
    assert other.twins is not lease.twins
