"""Machines that are run once for each local state and input, and then remembered."""

from __future__ import annotations

import pytest

from lab.explore import Violation
from lab.explore.memo import Memo


class Adder:
    """Adds up to a limit, and says when it is reached."""

    def __init__(self) -> None:
        self.total = 0
        self.calls: list[int] = []

    def add(self, amount: int) -> str:
        self.calls.append(amount)
        self.total = min(4, self.total + amount)
        return "full" if self.total == 4 else "more"

    def moody(self, amount: int) -> str:
        """Depends on something that is not in the total."""
        self.calls.append(amount)
        self.total = min(4, self.total + amount)
        return "odd" if len(self.calls) % 2 else "even"


def test_an_input_in_a_known_state_is_not_worked_out_again() -> None:
    memo = Memo(Adder(), freeze=lambda adder: adder.total, run=Adder.add)

    ends = [memo.after(memo.after(0, 1)[0], 2) for _ in range(5)]

    assert len(set(ends)) == 1
    assert memo.run_count == 2
    assert memo.machine(ends[0][0]).total == 3


def test_a_state_knows_how_it_was_first_come_to() -> None:
    memo = Memo(Adder(), freeze=lambda adder: adder.total, run=Adder.add)
    one, _ = memo.after(0, 1)
    three, _ = memo.after(one, 2)
    memo.after(0, 3)

    assert memo.origin(three) == (one, 2)
    assert memo.origin(one) == (0, 1)
    with pytest.raises(ValueError, match="in which the machine began"):
        memo.origin(0)


def test_ways_that_meet_lead_to_one_state() -> None:
    memo = Memo(Adder(), freeze=lambda adder: adder.total, run=Adder.add)

    there = memo.after(memo.after(0, 1)[0], 3)
    also_there = memo.after(memo.after(0, 3)[0], 1)

    assert there == also_there
    assert there[1] == "full"
    assert len(memo) == 4
    memo.check_completeness()


def test_a_machine_keeps_its_state_when_an_input_is_tried_on_it() -> None:
    memo = Memo(Adder(), freeze=lambda adder: adder.total, run=Adder.add)

    memo.after(0, 3)

    assert memo.machine(0).total == 0


def test_a_frozen_state_that_leaves_something_out_is_found() -> None:
    memo = Memo(Adder(), freeze=lambda adder: adder.total, run=Adder.moody)
    two = memo.after(0, 2)[0]
    assert memo.after(memo.after(0, 1)[0], 1)[0] == two
    memo.after(two, 1)

    with pytest.raises(Violation, match="1 leads from one frozen state to two"):
        memo.check_completeness()
