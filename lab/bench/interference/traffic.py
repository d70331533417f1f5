"""Copies through one mover that never run out: the same ones again and again.

A copy is one operation of some blocks, as a cache would ask for it. It counts when the mover
reports it, at the time of the report, so a rate says what arrived rather than what was sent.

The one rule: a copy is not submitted again before it was reported.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.bench.interference.pool import LIFE
from penstock.errors import InvariantViolation, UnavailableError
from penstock.machine.effects import Copy
from penstock.vocabulary.ids import OperationId

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.operations import Purpose
    from penstock.movers.base import Mover

UNLIMITED = 1 << 40
CARRIED_BYTES = 128 << 20
"""What a step leaves of its budget is for the next ones, up to this: movers rest between steps
that are shorter than three milliseconds, and take the budget of several together."""
DRAIN_S = 30.0
"""What is in flight takes milliseconds; a mover that has not ended by then is broken."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Freight:
    """Blocks to be moved: keys, where each lies, and where it goes."""

    purpose: Purpose
    keys: Sequence[bytes]
    source_slots: NDArray[np.int32]
    target_slots: NDArray[np.int32]

    def copies(self, blocks: int) -> list[Copy]:
        """All of it, in copies of so many blocks."""
        if blocks < 1 or len(self.keys) % blocks:
            raise ValueError(f"blocks is {blocks}, must divide the {len(self.keys)} that there are")
        return [
            Copy(
                operation=OperationId(*LIFE, number),
                purpose=self.purpose,
                source=0,
                target=1,
                keys=self.keys[first : first + blocks],
                source_slots=self.source_slots[first : first + blocks],
                target_slots=self.target_slots[first : first + blocks],
                deadline=float("inf"),
                cause="bench",
            )
            for number, first in enumerate(range(0, len(self.keys), blocks))
        ]


class Traffic:
    """A mover, and the copies that keep it busy.

    Args:
        mover: Moves them.
        copies: What is moved, in turn, each of as many blocks as the first.
        block_bytes: Bytes of a block.
        ahead_bytes: So much waits for the mover, unless a budget is smaller.
    """

    def __init__(
        self, mover: Mover, copies: Sequence[Copy], *, block_bytes: int, ahead_bytes: int
    ) -> None:
        if len(copies) < 2:
            raise ValueError(f"copies has {len(copies)}, must have at least 2")
        self.mover = mover
        self._copy_bytes = len(copies[0].keys) * block_bytes
        self._ahead_bytes = ahead_bytes
        self._carried_bytes = 0
        """What earlier steps have left of their budgets."""
        self._left_bytes = 0
        """Submitted to the mover, which has not begun with it."""
        self._waiting = deque(copies)
        self._out: dict[OperationId, Copy] = {}
        self._ended: list[float] = []

    @property
    def upcoming(self) -> Copy:
        """What will be submitted next: of what is moved, this is moved for certain."""
        return self._waiting[0]

    def advance(self, budget_bytes: int = UNLIMITED) -> None:
        """Keeps enough copies submitted, and lets the mover work up to the budget."""
        budget_bytes += self._carried_bytes
        wanted_bytes = min(budget_bytes, self._ahead_bytes)
        # One stays back, so that there is always a next one.
        while self._left_bytes < wanted_bytes and len(self._waiting) > 1:
            copy = self._waiting.popleft()
            self._out[copy.operation] = copy
            self._left_bytes += self._copy_bytes
            self.mover.submit(copy)
        spent = self._work(budget_bytes)
        self._carried_bytes = min(CARRIED_BYTES, max(0, budget_bytes - spent))

    def drain(self) -> None:
        """Waits for the copies that are out; none is submitted again."""
        self._carried_bytes = 0
        give_up = time.monotonic() + DRAIN_S
        while self._out:
            self._work(UNLIMITED)
            if time.monotonic() > give_up:
                raise UnavailableError(f"copies have not ended {DRAIN_S:g} s after the last step")

    def moved_between(self, began: float, ended: float) -> int:
        """Bytes of the copies that ended between two times; all earlier ones are forgotten."""
        count = sum(began < at <= ended for at in self._ended)
        self._ended.clear()
        return count * self._copy_bytes

    def _work(self, budget_bytes: int) -> int:
        moved, spent = self.mover.poll(budget_bytes=budget_bytes)
        self._left_bytes -= spent
        for each in moved:
            self._waiting.append(self._out.pop(each.operation))
            self._ended.append(time.monotonic())
        wrong = [each for each in moved if each.faults or each.failure]
        if wrong:
            raise InvariantViolation(
                f"bench: good blocks were not delivered: {wrong[0].failure or wrong[0].faults}"
            )
        return spent
