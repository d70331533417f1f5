"""Every operation that is under way, what it holds, and who still has to report.

An operation copies blocks between two tiers on every rank. It ends exactly once: done,
failed, cancelled or expired. Its outcome may be known before its end: a deadline ends the
interest in a copy, not a rank's ability to write. Until the last rank has reported, or is
known to be unable to write, the operation stays here and keeps its slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from penstock.cache.states import OPERATION_TABLE, OperationMove, OperationState
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.vocabulary.keys import Key, LeaseId


class Purpose(Enum):
    """What an operation is for."""

    LOAD = "load"
    """Hub to device: a request waits for it."""
    STAGE = "stage"
    """A lower tier to the hub, on the way to the device or ahead of need."""
    SAVE = "save"
    """Down, while the block stays above."""
    DEMOTE = "demote"
    """Down, after which the block leaves the tier above."""
    DUPLICATE = "duplicate"
    """Device to device: a forked request gets a copy of its unfinished block."""


class Outcome(Enum):
    """How an operation ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class BlockFault(Enum):
    """What went wrong with one block of an operation."""

    CORRUPT = "corrupt"
    """The source's bytes failed their checksum: the copy there is dropped."""
    MISSING = "missing"
    """The source does not have the block (any more): it is forgotten there."""
    UNREADABLE = "unreadable"
    """The source could not be read or the target not be written; the source may be fine."""


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """One copy of some blocks, on every rank."""

    id: OperationId
    purpose: Purpose
    source: int
    """Tier index."""
    target: int
    """Tier index."""
    keys: list[Key]
    source_slots: NDArray[np.intp]
    target_slots: NDArray[np.intp]
    """Slots are the operation's hold on blocks: as long as it holds one, the pool says what
    lies there. Device slots of an engine that offloads are its own, one row a KV group."""
    waiting_ranks: set[int]
    deadline: float
    cause: str
    """The request or event behind it."""
    onward: NDArray[np.intp] | None = None
    """For a stage: the device slots to load into afterwards, `NOWHERE` where none waits."""
    waiters: set[LeaseId] = field(default_factory=set)
    faults: dict[int, BlockFault] = field(default_factory=dict)
    """Position in the operation to what went wrong there."""
    state: OperationState = OperationState.RUNNING
    outcome: Outcome | None = None
    failure: str = ""
    settled_told: bool = False
    """Whether it was reported to the engine that nothing writes to its slots any more."""

    def move(self, move: OperationMove) -> None:
        """Changes the state by the table."""
        self.state = OPERATION_TABLE.after(self.state, move, subject=f"operation {self.id}")


class Ledger:
    """The operations that have not ended."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.epoch = 0
        self.operations: dict[OperationId, Operation] = {}
        self.started = 0
        self.ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self._deadlines: list[tuple[float, OperationId]] = []

    def next_id(self) -> OperationId:
        """A name that was never given before."""
        self.started += 1
        return OperationId(self.incarnation, self.epoch, self.started)

    def open(self, operation: Operation) -> None:
        """Enters a started operation."""
        self.operations[operation.id] = operation
        heappush(self._deadlines, (operation.deadline, operation.id))

    def close(self, operation: Operation, outcome: Outcome) -> None:
        """Strikes an operation out; its holder gives its slots back now."""
        del self.operations[operation.id]
        self.ended[outcome] += 1

    def running(self) -> Iterator[Operation]:
        """The operations whose outcome is open."""
        running = [o for o in self.operations.values() if o.state is OperationState.RUNNING]
        return iter(running)

    def next_deadline(self) -> float | None:
        """When the next running operation expires."""
        while self._deadlines:
            deadline, name = self._deadlines[0]
            operation = self.operations.get(name)
            if operation is not None and operation.state is OperationState.RUNNING:
                return deadline
            heappop(self._deadlines)
        return None

    def pop_expired(self, now: float) -> Operation | None:
        """The next running operation whose deadline has passed."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        return self.operations[heappop(self._deadlines)[1]]
