"""The slots of one tier: their state, who holds them, and which block lies where.

A slot is free only when nothing holds it. Every lease, pinned source and running copy counts as one
hold, and a count below zero is a defect that is raised, never clamped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.nodes import NOWHERE
from penstock.cache.states import LEAVING, SLOT_TABLE, SlotMove, SlotState
from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ONE = np.int32(1)
"""Of the counts' own type: adding it takes a third of the time that an int takes."""
_ENDS = {
    move: ([int(state) for state, of in SLOT_TABLE.legal if of is move], int(target))
    for (_, move), target in SLOT_TABLE.legal.items()
}
"""Each move with the states that it may begin in, and the one that it ends in."""


class Pool:
    """Numbered slots."""

    def __init__(self, name: str, slot_count: int) -> None:
        self.name = name
        self.slot_count = slot_count
        self.state = np.zeros(slot_count, dtype=np.uint8)
        """A `SlotState` each."""
        self.holders = np.zeros(slot_count, dtype=np.int32)
        """How many leases and operations rely on the slot."""
        self.node = np.full(slot_count, NOWHERE, dtype=np.int32)
        """The node of the block that lies here, or `NOWHERE` if it has no name yet."""
        # Reading one number through a memoryview takes a third of the time an array takes.
        self.state_view = self.state.data
        self.holders_view = self.holders.data
        self._free = np.arange(slot_count - 1, -1, -1, dtype=np.int32)
        self.free_count = slot_count
        self._counts = [0] * len(SlotState)
        """How many slots are in each state."""
        self._counts[SlotState.FREE] = slot_count
        self.held_count = 0
        """How many slots a lease or an operation relies on, without victims that are set aside."""

    def take(self, count: int) -> NDArray[np.int32]:
        """Takes free slots for writing; the caller made sure that there are enough."""
        if count > self.free_count:
            raise InvariantViolation(
                f"tier {self.name!r}: {count} slots taken of {self.free_count} free"
            )
        self.free_count -= count
        slots = self._free[self.free_count : self.free_count + count][::-1].copy()
        self._move(slots, SlotMove.TAKE)
        return slots

    def take_exactly(self, slots: NDArray[np.int32]) -> None:
        """Takes the named free slots: blocks that were found where they already lie."""
        wanted = set(slots.tolist())
        free = self._free[: self.free_count]
        kept = free[~np.isin(free, slots)]
        if len(wanted) != len(slots) or len(free) - len(kept) != len(slots):
            raise InvariantViolation(f"tier {self.name!r}: slots {sorted(wanted)} are not all free")
        self._free[: len(kept)] = kept
        self.free_count = len(kept)
        self._move(slots, SlotMove.TAKE)

    def fill(self, slots: NDArray[np.int32]) -> None:
        """Every rank wrote these slots: their blocks may be matched."""
        self._move(slots, SlotMove.FILL)

    def depart(self, slots: NDArray[np.int32]) -> None:
        """Their blocks are being written to a lower tier, then leave."""
        self._move(slots, SlotMove.DEPART)

    def keep(self, slots: NDArray[np.int32]) -> None:
        """Leaving blocks stay after all."""
        self._move(slots, SlotMove.KEEP)

    def condemn(self, slots: NDArray[np.int32]) -> None:
        """Nobody may read these slots any more; something may still write to them."""
        self._move(slots, SlotMove.CONDEMN)

    def evict(self, slots: NDArray[np.int32]) -> None:
        """Frees slots of blocks that this tier forgets."""
        self._free_after(slots, SlotMove.EVICT)

    def discard(self, slots: NDArray[np.int32]) -> None:
        """Frees slots whose bytes were condemned or never published."""
        self._free_after(slots, SlotMove.DISCARD)

    def hold(self, slots: NDArray[np.int32]) -> None:
        """One more lease or operation relies on each of these slots."""
        if not len(slots):
            return
        before = self.holders.take(slots)
        self.holders[slots] = before + _ONE
        self.held_count += len(slots) - int(np.count_nonzero(before))

    def unhold(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """One less; returns the slots that nothing holds any more."""
        if not len(slots):
            return slots
        left = self.holders.take(slots) - _ONE
        if np.count_nonzero(left < 0):
            worst = int(slots[int(left.argmin())])
            problem = f"tier {self.name!r}: slot {worst} was released once too often"
            raise InvariantViolation(problem, node=int(self.node[worst]))
        self.holders[slots] = left
        quiet: NDArray[np.int32] = slots[left == 0]
        self.held_count -= len(quiet)
        return quiet

    def count(self, state: SlotState) -> int:
        """How many slots are in a state."""
        return self._counts[state]

    @property
    def leaving_count(self) -> int:
        """How many slots are `LEAVING`, and so will soon be free."""
        return self._counts[LEAVING]

    def free_slots(self) -> NDArray[np.int32]:
        """The free slots, the next one to be taken last."""
        return self._free[: self.free_count].copy()

    def _move(self, slots: NDArray[np.int32], move: SlotMove) -> None:
        if not len(slots):
            return
        before = self.state.take(slots)
        counts, (sources, target) = self._counts, _ENDS[move]
        one = len(sources) == 1
        if one and SLOT_TABLE.counts is None and not np.count_nonzero(before != sources[0]):
            self.state[slots] = target
        else:
            self.state[slots] = SLOT_TABLE.after_all(before, move)
        # Counted here, so that whoever asks need not look at every slot of a large tier.
        if one:
            counts[sources[0]] -= len(slots)
        else:
            for state, count in enumerate(np.bincount(before).tolist()):
                counts[state] -= count
        counts[target] += len(slots)

    def _free_after(self, slots: NDArray[np.int32], move: SlotMove) -> None:
        if np.count_nonzero(self.holders.take(slots)):
            worst = int(slots[int(self.holders[slots].argmax())])
            problem = f"tier {self.name!r}: {move.name} of slot {worst}, which is held"
            raise InvariantViolation(problem, node=int(self.node[worst]))
        self._move(slots, move)
        self._free[self.free_count : self.free_count + len(slots)] = slots
        self.free_count += len(slots)
