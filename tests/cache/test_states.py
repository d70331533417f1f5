"""The tables of states and moves."""

from __future__ import annotations

from enum import IntEnum
from itertools import product

import numpy as np
import pytest

from penstock.cache.states import (
    LEASE_TABLE,
    OPERATION_TABLE,
    SLOT_TABLE,
    TABLES,
    LeaseMove,
    LeaseState,
    OperationMove,
    OperationState,
    SlotMove,
    SlotState,
    Table,
)
from penstock.errors import InvariantViolation


class Light(IntEnum):
    RED = 0
    GREEN = 1


class Switch(IntEnum):
    GO = 0
    STOP = 1


def make_light() -> Table[Light, Switch]:
    legal = {(Light.RED, Switch.GO): Light.GREEN, (Light.GREEN, Switch.STOP): Light.RED}
    return Table("light", Light, Switch, legal)


def states(*names: Light) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.array(names, dtype=np.uint8)


def test_a_legal_move_leads_to_the_next_state() -> None:
    light = make_light()

    after = light.after(Light.RED, Switch.GO, subject="the light")

    assert after is Light.GREEN


def test_an_illegal_move_is_our_defect_and_names_subject_move_and_state() -> None:
    light = make_light()

    with pytest.raises(InvariantViolation, match="the light: STOP in state RED"):
        light.after(Light.RED, Switch.STOP, subject="the light")


def test_many_things_move_at_once() -> None:
    light = make_light()

    after = light.after_all(states(Light.RED, Light.RED), Switch.GO)

    assert after.tolist() == [Light.GREEN, Light.GREEN]


def test_no_thing_moves_when_one_of_many_may_not() -> None:
    light = make_light()
    before = states(Light.RED, Light.GREEN)

    with pytest.raises(InvariantViolation, match="light: GO in state GREEN"):
        light.after_all(before, Switch.GO)

    assert before.tolist() == [Light.RED, Light.GREEN]


def test_no_things_can_make_any_move() -> None:
    light = make_light()

    after = light.after_all(states(), Switch.STOP)

    assert after.tolist() == []


def test_moves_are_counted_once_somebody_asks_for_it() -> None:
    light = make_light()
    light.after(Light.RED, Switch.GO, subject="uncounted")

    light.count_moves()
    light.after(Light.RED, Switch.GO, subject="counted")
    light.after_all(states(Light.GREEN, Light.GREEN), Switch.STOP)

    assert light.counts is not None
    assert light.counts[Switch.GO].tolist() == [1, 0]
    assert light.counts[Switch.STOP].tolist() == [0, 2]


def test_an_illegal_move_is_not_counted() -> None:
    light = make_light()
    light.count_moves()

    with pytest.raises(InvariantViolation):
        light.after_all(states(Light.GREEN), Switch.GO)

    assert light.counts is not None
    assert not light.counts.any()


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_one_thing_and_many_things_obey_the_same_table(table: Table[IntEnum, IntEnum]) -> None:
    for state, move in product(table.states, table.moves):
        single = np.array([state], dtype=np.uint8)
        if (state, move) in table.legal:
            assert table.after_all(single, move).tolist() == [table.legal[state, move]]
        else:
            with pytest.raises(InvariantViolation):
                table.after_all(single, move)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_state_can_be_reached_from_the_first(table: Table[IntEnum, IntEnum]) -> None:
    firsts = {"slot": SlotState.FREE, "operation": OperationState.RUNNING}
    reached: set[IntEnum] = {firsts.get(table.name, LeaseState.READY)}

    for _ in table.states:
        reached |= {after for (state, _), after in table.legal.items() if state in reached}

    assert reached == set(table.states)


def test_only_a_ready_slot_is_evicted() -> None:
    evictable = {state for state, move in SLOT_TABLE.legal if move is SlotMove.EVICT}

    assert evictable == {SlotState.READY}


def test_a_doomed_slot_can_only_become_free() -> None:
    exits = {after for (state, _), after in SLOT_TABLE.legal.items() if state is SlotState.DOOMED}

    assert exits == {SlotState.FREE}


def test_only_a_free_slot_is_taken() -> None:
    takable = {state for state, move in SLOT_TABLE.legal if move is SlotMove.TAKE}

    assert takable == {SlotState.FREE}


def test_an_operation_ends_by_its_last_report_alone() -> None:
    last_moves = {
        move for (_, move), after in OPERATION_TABLE.legal.items() if after is OperationState.ENDED
    }

    assert last_moves == {OperationMove.LAST_REPORT}


def test_an_outcome_is_decided_once() -> None:
    deciding = {OperationMove.FAIL, OperationMove.CANCEL, OperationMove.EXPIRE}

    from_states = {state for state, move in OPERATION_TABLE.legal if move in deciding}

    assert from_states == {OperationState.RUNNING}


def test_nothing_happens_to_an_operation_after_its_end() -> None:
    assert not [move for state, move in OPERATION_TABLE.legal if state is OperationState.ENDED]


def test_a_lease_can_be_released_in_every_state_but_only_once() -> None:
    releasable = {state for state, move in LEASE_TABLE.legal if move is LeaseMove.RELEASE}

    assert releasable == set(LeaseState) - {LeaseState.RELEASED}


def test_a_lost_lease_never_becomes_ready_again() -> None:
    exits = {after for (state, _), after in LEASE_TABLE.legal.items() if state is LeaseState.LOST}

    assert exits == {LeaseState.RELEASED}
