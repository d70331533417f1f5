"""Operations under way: their names, deadlines and ends."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.cache.operations import Ledger, Operation, Outcome, Purpose
from penstock.cache.states import OperationMove, OperationState
from penstock.errors import InvariantViolation


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(incarnation=7)


def start(ledger: Ledger, *, deadline: float = 1.0) -> Operation:
    operation = Operation(
        id=ledger.next_id(),
        purpose=Purpose.SAVE,
        source=0,
        target=1,
        keys=[b"a"],
        source_slots=np.array([0], dtype=np.int32),
        target_slots=np.array([0], dtype=np.int32),
        waiting_ranks={0},
        deadline=deadline,
        cause="request",
    )
    ledger.open(operation)
    return operation


def test_no_name_is_given_twice_not_even_in_another_epoch(ledger: Ledger) -> None:
    names = {ledger.next_id() for _ in range(3)}

    ledger.epoch += 1
    names |= {ledger.next_id() for _ in range(3)}

    assert len(names) == 6
    assert {name.incarnation for name in names} == {7}
    assert {name.epoch for name in names} == {0, 1}
    assert len({name.sequence for name in names}) == 6


def test_an_open_operation_is_in_the_ledger_until_it_is_closed(ledger: Ledger) -> None:
    operation = start(ledger)
    entered = dict(ledger.operations)

    ledger.close(operation, Outcome.DONE)

    assert entered == {operation.id: operation}
    assert not ledger.operations
    assert ledger.ended[Outcome.DONE] == 1


def test_closing_an_operation_twice_raises(ledger: Ledger) -> None:
    operation = start(ledger)
    ledger.close(operation, Outcome.DONE)

    with pytest.raises(KeyError):
        ledger.close(operation, Outcome.DONE)

    assert ledger.ended[Outcome.DONE] == 1


def test_an_operation_that_was_given_up_is_not_running(ledger: Ledger) -> None:
    given_up, running = start(ledger), start(ledger)

    given_up.move(OperationMove.CANCEL)

    assert list(ledger.running()) == [running]
    assert given_up.state is OperationState.ENDING


def test_operations_may_end_while_the_running_ones_are_walked_through(ledger: Ledger) -> None:
    operations = [start(ledger) for _ in range(3)]

    for operation in ledger.running():
        operation.move(OperationMove.LAST_REPORT)
        ledger.close(operation, Outcome.DONE)

    assert [operation.state for operation in operations] == [OperationState.ENDED] * 3


def test_an_operation_is_not_given_up_twice(ledger: Ledger) -> None:
    operation = start(ledger)
    operation.move(OperationMove.EXPIRE)

    with pytest.raises(InvariantViolation, match=f"operation {operation.id}: CANCEL in state END"):
        operation.move(OperationMove.CANCEL)


def test_the_next_deadline_is_that_of_the_first_running_operation_to_expire(
    ledger: Ledger,
) -> None:
    start(ledger, deadline=3.0)
    first = start(ledger, deadline=2.0)
    next_before = ledger.next_deadline()

    ledger.close(first, Outcome.DONE)

    assert next_before == 2.0
    assert ledger.next_deadline() == 3.0


def test_without_operations_there_is_no_deadline(ledger: Ledger) -> None:
    assert ledger.next_deadline() is None
    assert ledger.pop_expired(1e9) is None


def test_operations_expire_at_their_deadline_in_order(ledger: Ledger) -> None:
    late, early = start(ledger, deadline=2.0), start(ledger, deadline=1.0)

    expired = [ledger.pop_expired(0.999), ledger.pop_expired(1.0), ledger.pop_expired(2.5)]

    assert expired == [None, early, late]


def test_an_operation_that_was_given_up_has_no_deadline_any_more(ledger: Ledger) -> None:
    operation = start(ledger, deadline=1.0)

    operation.move(OperationMove.CANCEL)

    assert ledger.pop_expired(5.0) is None
    assert ledger.next_deadline() is None
