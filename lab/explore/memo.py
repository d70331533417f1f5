"""Local states of real machines, each kept once, with what every input does to each.

The states of a world are combinations of few local states: millions of the former are made of
thousands of the latter. So a machine is run once for each pair of local state and input, and a
world's state holds the numbers of local states. Where a machine's state is hashable and says
everything, this changes nothing but the time.

The one rule that must not break: `freeze` of a machine is complete. What it leaves out must
not influence what the machine does; `check_completeness` looks for that.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Generic, TypeVar

from lab.explore.world import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Machine = TypeVar("Machine")
Input = TypeVar("Input", bound="Hashable")
Output = TypeVar("Output")


class Memo(Generic[Machine, Input, Output]):
    """The local states of one machine.

    Args:
        machine: as it is in the beginning; it becomes state 0 and must not be used otherwise.
        freeze: everything that decides what the machine will do.
        run: gives an input to a machine, which changes, and returns what comes out.
        clone: a copy that shares nothing that can change.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        freeze: Callable[[Machine], Hashable],
        run: Callable[[Machine, Input], Output],
        clone: Callable[[Machine], Machine] = copy.deepcopy,
    ) -> None:
        self._freeze = freeze
        self._run = run
        self._clone = clone
        self._machines = [machine]
        self._numbers: dict[Hashable, int] = {freeze(machine): 0}
        self._origins: list[tuple[int, Input] | None] = [None]
        self._after: dict[tuple[int, Input], tuple[int, Output]] = {}
        self._twins: dict[int, Machine] = {}
        """Machines that came to a known state on another way; see `check_completeness`."""

    def __len__(self) -> int:
        return len(self._machines)

    @property
    def run_count(self) -> int:
        """How often a machine was run."""
        return len(self._after)

    def machine(self, state: int) -> Machine:
        """A machine in that state, to look at only."""
        return self._machines[state]

    def after(self, state: int, given: Input) -> tuple[int, Output]:
        """The state after an input, and what comes out."""
        known = self._after.get((state, given))
        if known is None:
            known = self._after[state, given] = self._work_out(state, given)
        return known

    def _work_out(self, state: int, given: Input) -> tuple[int, Output]:
        machine = self._clone(self._machines[state])
        output = self._run(machine, given)
        frozen = self._freeze(machine)
        number = self._numbers.get(frozen)
        if number is None:
            number = self._numbers[frozen] = len(self._machines)
            self._machines.append(machine)
            self._origins.append((state, given))
        elif number not in self._twins and number != state:
            self._twins[number] = machine
        return number, output

    def origin(self, state: int) -> tuple[int, Input]:
        """How a state was first come to: from which one, and by which input.

        Raises:
            ValueError: it is the first state.
        """
        origin = self._origins[state]
        if origin is None:
            raise ValueError(f"state is {state}, in which the machine began")
        return origin

    def transitions(self) -> dict[int, list[tuple[Input, int, Output]]]:
        """Everything worked out so far: for each state, inputs, where they lead, what comes out."""
        found: dict[int, list[tuple[Input, int, Output]]] = {}
        for (state, given), (number, output) in self._after.items():
            found.setdefault(state, []).append((given, number, output))
        return found

    def check_completeness(self) -> None:
        """Machines in equal states, reached on different ways, do the same with equal inputs.

        Raises:
            Violation: two did not; what distinguishes them is missing in `freeze`.
        """
        for (state, given), (number, output) in list(self._after.items()):
            if state not in self._twins:
                continue
            twin = self._clone(self._twins[state])
            other = self._run(twin, given)
            if other != output or self._numbers.get(self._freeze(twin)) != number:
                raise Violation(
                    "freeze", f"{given!r} leads from one frozen state to two different ones"
                )
