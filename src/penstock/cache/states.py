"""The states of slots, operations and leases, and every legal move between them, as data.

A move that is not in its table raises `InvariantViolation` and changes nothing. The
documentation's diagrams and the simulator's coverage report are made from these tables, so
that neither can drift from the code.

A slot, whatever the tier:

    FREE ─take→ FILLING ─fill→ READY ⇄ LEAVING      (depart, keep)
                  │              ├─evict→ FREE
                  │              ├─hand over→ FILLING
                  ├──────────────┴─condemn→ DOOMED ─discard→ FREE
                  └─discard→ FREE

*DOOMED* is the state that makes reuse safe: nothing may read the slot any more, but a copy
may still write to it, so it is not free either.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from penstock.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class SlotState(IntEnum):
    """What a slot of a tier holds."""

    FREE = 0
    """Nothing; may be taken."""
    FILLING = 1
    """Bytes that are still being written: by the engine's compute or by a copy."""
    READY = 2
    """A block, filled on every rank and in every group; may be matched."""
    LEAVING = 3
    """A ready block that is being written to a lower tier so that its slot can be freed."""
    DOOMED = 4
    """Bytes that must not be read, in a slot that something may still write to or hold."""


class SlotMove(IntEnum):
    """What can happen to a slot."""

    TAKE = 0
    """Somebody will write a block here."""
    FILL = 1
    """Every rank wrote it."""
    DEPART = 2
    """A copy to a lower tier begins, after which the slot may be freed."""
    KEEP = 3
    """The copy has ended or the block was matched: it is an ordinary ready block again."""
    EVICT = 4
    """The copy in this tier is forgotten."""
    CONDEMN = 5
    """Its content is not wanted or not right, but the slot is still in use."""
    DISCARD = 6
    """Unpublished or condemned bytes are dropped, and nothing uses the slot any more."""
    HAND_OVER = 7
    """The copy in this tier is forgotten while it is saved; then its next owner writes here."""


# Plain numbers for the hot paths: comparing a number of an array with a member of an
# enumeration takes ten times as long as with an `int`.
FREE, FILLING, READY, LEAVING, DOOMED = (int(state) for state in SlotState)


class OperationState(IntEnum):
    """How far an operation is."""

    RUNNING = 0
    """Ranks are at work, and the result is wanted."""
    ENDING = 1
    """Its outcome is known, but some rank may still touch its slots."""
    ENDED = 2
    """Every rank has reported; what it held was given back."""


class OperationMove(IntEnum):
    """What can happen to an operation."""

    REPORT = 0
    """A rank reported, others have not."""
    LAST_REPORT = 1
    """The last rank reported."""
    FAIL = 2
    """A rank or a tier failed as a whole."""
    CANCEL = 3
    """Nobody wants the result any more."""
    EXPIRE = 4
    """Its deadline passed."""


class LeaseState(IntEnum):
    """What a request that holds a lease may do."""

    LOADING = 0
    """Blocks are on their way to the device; the request waits."""
    READY = 1
    """All its cached blocks are on the device; the request may run."""
    LOST = 2
    """Blocks could not be had, nor their replacement; release it and acquire again."""
    RELEASED = 3
    """The end."""


class LeaseMove(IntEnum):
    """What can happen to a lease."""

    LOAD = 0
    """A copy it needs was started."""
    ARRIVE = 1
    """The last copy it waited for has ended, and nothing is missing."""
    LOSE = 2
    """Its blocks are gone and cannot be replaced now."""
    RELEASE = 3
    """The request gives its blocks back."""


StateT = TypeVar("StateT", bound=IntEnum)
MoveT = TypeVar("MoveT", bound=IntEnum)

ILLEGAL = 255


class Table(Generic[StateT, MoveT]):
    """Every legal move of one kind of thing; counts the moves made when asked to."""

    def __init__(
        self,
        name: str,
        states: type[StateT],
        moves: type[MoveT],
        legal: Mapping[tuple[StateT, MoveT], StateT],
    ) -> None:
        self.name = name
        self.states = states
        self.moves = moves
        self.legal = dict(legal)
        self._next = np.full((len(moves), len(states)), ILLEGAL, dtype=np.uint8)
        for (state, move), after in legal.items():
            self._next[move, state] = after
        self._rows = list(self._next)
        self.counts: NDArray[np.int64] | None = None

    def count_moves(self) -> None:
        """Starts to count how often each pair of state and move occurs."""
        self.counts = np.zeros((len(self.moves), len(self.states)), dtype=np.int64)

    def after(self, state: StateT, move: MoveT, *, subject: str) -> StateT:
        """The state of one thing after a move.

        Raises:
            InvariantViolation: the move is not legal in that state.
        """
        after = self.legal.get((state, move))
        if after is None:
            raise InvariantViolation(f"{subject}: {move.name} in state {state.name}")
        if self.counts is not None:
            self.counts[move, state] += 1
        return after

    def after_all(self, states: NDArray[np.uint8], move: MoveT) -> NDArray[np.uint8]:
        """The states of many things after the same move; all or nothing.

        Raises:
            InvariantViolation: the move is not legal for at least one of them.
        """
        after: NDArray[np.uint8] = self._rows[move].take(states)
        if np.count_nonzero(after == ILLEGAL):
            worst = self.states(int(states[int(after.argmax())]))
            raise InvariantViolation(f"{self.name}: {move.name} in state {worst.name}")
        if self.counts is not None:
            self.counts[move] += np.bincount(states, minlength=len(self.states))
        return after


SLOT_TABLE = Table(
    "slot",
    SlotState,
    SlotMove,
    {
        (SlotState.FREE, SlotMove.TAKE): SlotState.FILLING,
        (SlotState.FILLING, SlotMove.FILL): SlotState.READY,
        (SlotState.FILLING, SlotMove.CONDEMN): SlotState.DOOMED,
        (SlotState.FILLING, SlotMove.DISCARD): SlotState.FREE,
        (SlotState.READY, SlotMove.DEPART): SlotState.LEAVING,
        (SlotState.READY, SlotMove.EVICT): SlotState.FREE,
        (SlotState.READY, SlotMove.CONDEMN): SlotState.DOOMED,
        (SlotState.READY, SlotMove.HAND_OVER): SlotState.FILLING,
        (SlotState.LEAVING, SlotMove.KEEP): SlotState.READY,
        (SlotState.LEAVING, SlotMove.CONDEMN): SlotState.DOOMED,
        (SlotState.DOOMED, SlotMove.DISCARD): SlotState.FREE,
    },
)

OPERATION_TABLE = Table(
    "operation",
    OperationState,
    OperationMove,
    {
        (OperationState.RUNNING, OperationMove.REPORT): OperationState.RUNNING,
        (OperationState.RUNNING, OperationMove.LAST_REPORT): OperationState.ENDED,
        (OperationState.RUNNING, OperationMove.FAIL): OperationState.ENDING,
        (OperationState.RUNNING, OperationMove.CANCEL): OperationState.ENDING,
        (OperationState.RUNNING, OperationMove.EXPIRE): OperationState.ENDING,
        (OperationState.ENDING, OperationMove.REPORT): OperationState.ENDING,
        (OperationState.ENDING, OperationMove.LAST_REPORT): OperationState.ENDED,
    },
)

LEASE_TABLE = Table(
    "lease",
    LeaseState,
    LeaseMove,
    {
        (LeaseState.LOADING, LeaseMove.ARRIVE): LeaseState.READY,
        (LeaseState.LOADING, LeaseMove.LOSE): LeaseState.LOST,
        (LeaseState.LOADING, LeaseMove.RELEASE): LeaseState.RELEASED,
        (LeaseState.READY, LeaseMove.LOAD): LeaseState.LOADING,
        (LeaseState.READY, LeaseMove.LOSE): LeaseState.LOST,
        (LeaseState.READY, LeaseMove.RELEASE): LeaseState.RELEASED,
        (LeaseState.LOST, LeaseMove.RELEASE): LeaseState.RELEASED,
    },
)

TABLES: tuple[
    Table[SlotState, SlotMove]
    | Table[OperationState, OperationMove]
    | Table[LeaseState, LeaseMove],
    ...,
] = (SLOT_TABLE, OPERATION_TABLE, LEASE_TABLE)
