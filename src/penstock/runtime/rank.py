"""One rank of an engine: it executes plans and reports; it decides nothing.

    rank = penstock.open_rank(config, rank=1, kv=tensors)      # in the rank's own process
    rank.take(plan)                                            # bytes from the owner
    report = rank.step()                                       # bytes for the owner, or None

Plans come with the engine's own step message. The one rule: whatever order, grouping or repetition
plans and steps come in, every copy is carried out once and reported once.
"""

from __future__ import annotations

import logging
import math
import reprlib
import time
from typing import TYPE_CHECKING

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import Purpose
from penstock.cache.settings import DEVICE
from penstock.errors import PeerError, UnavailableError, counted
from penstock.movers.base import Moved
from penstock.runtime.access import Access
from penstock.runtime.copy_executor import NOT_GIVEN_BACK
from penstock.runtime.messages import RankReport, decode_plan, encode_report
from penstock.runtime.status import Drained
from penstock.transport.waiting import wait_any
from penstock.vocabulary.arguments import (
    as_bytes,
    as_descriptors,
    as_int,
    as_seconds,
    as_text,
    as_time,
    as_waitables,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from penstock.machine.effects import Copy
    from penstock.runtime.copy_executor import CopyExecutor
    from penstock.runtime.messages import Plan, RankFacts
    from penstock.store.process.client import ArenaOffer
    from penstock.transport.base import Channel
    from penstock.vocabulary.keys import OperationId

logger = logging.getLogger(__name__)

STEP_BUDGET_BYTES = 64 << 20
"""A step copies at most this much: about ten milliseconds of one core's memory bandwidth."""


class Rank:
    """The tiers and movers of one rank, driven by the plans of its owner."""

    def __init__(
        self,
        executor: CopyExecutor,
        facts: RankFacts,
        *,
        arenas: Mapping[str, int],
        writes: bool = True,
        offer: ArenaOffer | None = None,
    ) -> None:
        self.facts = facts
        """What the owner must know: give it to `open` or `open_offload` as one of `ranks`."""
        self.arenas = arenas
        """The descriptor of each host tier, by name, for ranks that share it."""
        self.executor = executor
        self.offer = offer
        """Its hub, as it is offered to the store process, if there is one."""
        self.steps = executor.steps
        """What the engine calls around its steps on this rank."""
        self._writes = writes
        self._owner: int | None = None
        self._last_plan = 0
        self._last_report = 0
        self._ended: list[Moved] = []
        self._finishing = False
        self._finished = 0
        self._cut_short = 0
        self._closed: Drained | None = None
        self._access = Access(f"rank {facts.rank}")
        self._opened_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether copies are under way, or there is something to report."""
        return bool(self._ended) or self.executor.busy

    def take(self, plan: bytes) -> None:
        """Takes a plan in; its work is done in `step`. A plan it has seen before is left alone.

        Raises:
            PeerError: it is not a plan, one is missing before it, it comes from another owner, or
                it names what this rank does not have. Nothing of it was taken.
            UnavailableError: the rank is closed, or about to be.
            ValueError: it is not even bytes.
        """
        plan = as_bytes("plan", plan)
        with self._access:
            self._take(plan)

    def _take(self, plan: bytes) -> None:
        if self._finishing:
            raise UnavailableError(f"rank {self.facts.rank} takes no plan: it comes to its end")
        decoded = decode_plan(plan)
        if self._owner not in {None, decoded.incarnation}:
            raise PeerError(
                f"rank {self.facts.rank} was given a plan by owner {decoded.incarnation:016x}, "
                f"must be by {self._owner:016x}: open the rank anew for another owner"
            )
        if decoded.sequence <= self._last_plan:
            return
        self._require_place(decoded)
        ours = not decoded.lives or decoded.lives[self.facts.rank] == self.facts.life
        if ours:
            # A plan for an earlier life may name tiers that this one does not have.
            self._require_sense(decoded)
        self._owner = decoded.incarnation
        self._last_plan = decoded.sequence
        for copy in decoded.copies:
            if not ours:
                # The owner has given up on it here: the slots may belong to other blocks by now.
                failure = f"it was for another life of rank {self.facts.rank}"
                self._ended.append(Moved(copy.operation, failure=failure))
            elif self._is_mine(copy):
                self.executor.submit(copy)
            else:
                self._ended.append(Moved(copy.operation))
        for operation in decoded.abandoned:
            self.executor.abandon(operation)
        if ours:
            self._answer(decoded.asked)

    def step(self, *, budget_bytes: int = STEP_BUDGET_BYTES) -> bytes | None:
        """Moves blocks for at most `budget_bytes`; returns a report if something has ended.

        Raises:
            UnavailableError: the rank is closed.
            ValueError: the budget is not a number of bytes.
        """
        budget_bytes = as_int("budget_bytes", budget_bytes)
        with self._access:
            if self.offer is not None:
                self.offer.poll()
            moved, self._ended = self._ended, []
            moved += self.executor.collect(budget_bytes=budget_bytes)
            return self._report(moved) if moved else None

    def wait(
        self, deadline: float, *, channels: Sequence[Channel] = (), descriptors: Sequence[int] = ()
    ) -> bool:
        """Waits until there is something to do, or `deadline` on the monotonic clock.

        Args:
            deadline: After it, False is returned.
            channels: What arrives on them is something to do.
            descriptors: So is what can be read there.

        Raises:
            UnavailableError: the device does not end its copies: the rank is of no use any more.
            ValueError: the deadline is not a time on that clock, but a number of seconds, say.
        """
        self._access.require()
        now = time.monotonic()
        deadline = as_time("deadline", deadline, opened_at=self._opened_at, now=now)
        descriptors = as_descriptors("descriptors", descriptors)
        channels = as_waitables("channels", channels)
        if self._ended or self.executor.wait(deadline):
            return True
        due = math.inf
        if self.offer is not None:
            descriptors = (*descriptors, self.offer.descriptor)
            due = math.inf if self.offer.alarm is None else self.offer.alarm
        ready = wait_any(channels, descriptors, deadline=min(deadline, due))
        return bool(ready.channels or ready.descriptors) or time.monotonic() >= due

    def give_back(self, tier: str = "") -> int:
        """Returns memory to the system that the owner said holds nothing; it stays usable.

        Args:
            tier: A tier below the device; empty: the device's own blocks.

        Returns:
            How many bytes.

        Raises:
            UnavailableError: the system does not take it, or the memory of a GPU belongs to the
                engine, which cannot give it back.
            ValueError: there is no such tier, or copies are under way.
        """
        names = ["", *(each.name for each in self.facts.tiers)]
        if as_text("tier", tier) not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(f"tier is {reprlib.repr(tier)}, must be one of {known}")
        with self._access:
            if self.executor.busy:
                raise ValueError(
                    f"{counted(self.executor.copy_count, 'copy', 'copies')} under way, must be "
                    "none while a whole tier is given back"
                )
            if not self.executor.can_give_back:
                raise UnavailableError(NOT_GIVEN_BACK)
            return self.executor.give_back(names.index(tier))

    def take_again(self) -> None:
        """Takes memory again that a GPU gave back; after `give_back`, before the next copy.

        Raises:
            UnavailableError: there is not enough; may be called again.
        """
        with self._access:
            self.executor.take_again()

    def finish(self, timeout_s: float = 0.0) -> bytes | None:
        """Drains and fences: copies may end within the timeout, the rest is cut short.

        Returns the last report: send it to the owner, then `close`. No plan is taken any more.

        Raises:
            UnavailableError: the device does not end its copies, which may still touch the
                engine's memory.
        """
        timeout_s = as_seconds("timeout_s", timeout_s, zero=True)
        with self._access:
            return self._finish(timeout_s)

    def _finish(self, timeout_s: float) -> bytes | None:
        self._finishing = True
        deadline = time.monotonic() + timeout_s
        moved, self._ended = self._ended, []
        before = len(moved)
        while self.executor.busy and time.monotonic() < deadline:
            self.executor.wait(deadline)
            moved += self.executor.collect(budget_bytes=STEP_BUDGET_BYTES)
        self._finished += len(moved) - before
        cut_short = self.executor.fence()
        self._cut_short += len(cut_short)
        # A mover returns an abandoned copy without a failure, for the caller who abandoned it. Here
        # the owner did not, and must not take half a copy for a whole one.
        failure = f"rank {self.facts.rank} ended before it was made"
        moved += [each._replace(failure=each.failure or failure) for each in cut_short]
        return self._report(moved) if moved else None

    def close(self, timeout_s: float = 0.0) -> Drained:
        """Drains, fences, releases: copies may end within the timeout, the rest is cut short.

        After it nothing touches the engine's memory any more. A second call changes nothing.
        What ended last is not reported: send the owner the report of `finish` before. Where the
        device does not end its copies nothing is released, and `unsettled` counts them.
        """
        timeout_s = as_seconds("timeout_s", timeout_s, zero=True)
        if self._closed is not None:
            return self._closed
        if not (self._access.broken or self._access.closed):
            self._access.require()
        unsettled = 0
        try:
            if not (self._access.broken or self._access.closed):
                with self._access:
                    self._finish(timeout_s)
            self._access.close()
            if self.offer is not None:
                self.offer.close()
            self.executor.close()
        except UnavailableError as error:
            logger.error("rank not released: rank=%d cause=%s", self.facts.rank, error)  # noqa: TRY400
            unsettled = self.executor.copy_count
        self._access.close()
        self._closed = Drained(
            finished=self._finished, cancelled=self._cut_short + unsettled, unsettled=unsettled
        )
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child has nothing to close: all of it belongs to its parent.
        if not self._access.forked:
            self.close()

    def adopt_thread(self) -> None:
        """From now on the thread that calls this makes all calls.

        Raises:
            AccessError: a call of the thread before is under way, or this process was forked.
        """
        self._access.adopt()

    def __repr__(self) -> str:
        facts = self.facts
        tiers = "".join(f", {tier.name} {tier.slot_count}" for tier in facts.tiers)
        blocks = "+".join(map(str, facts.device_slots))
        return f"<penstock.Rank {facts.rank}: blocks: device {blocks}{tiers}; {self._access.state}>"

    def _answer(self, asked: Sequence[OperationId]) -> None:
        """Reports that operations it does not have failed; it may have reported them before."""
        reported_next = {each.operation for each in self._ended}
        for operation in asked:
            if operation not in reported_next and not self.executor.has(operation):
                failure = f"the report of rank {self.facts.rank} on it was lost"
                self._ended.append(Moved(operation, failure=failure))

    def _report(self, moved: Sequence[Moved]) -> bytes:
        assert self._owner is not None
        self._last_report += 1
        facts = self.facts
        report = RankReport(facts.rank, facts.life, self._owner, self._last_report, moved)
        return encode_report(report)

    def _is_mine(self, copy: Copy) -> bool:
        """Whether it is not another rank's part to write into the memory that all of them share."""
        return self._writes or copy.target == DEVICE

    def _require_place(self, plan: Plan) -> None:
        # A rank that has just started may join in the middle.
        if self._last_plan and plan.sequence != self._last_plan + 1:
            raise PeerError(
                f"rank {self.facts.rank} was given plan {plan.sequence} after {self._last_plan}, "
                f"must be {self._last_plan + 1}: a plan was lost on the way"
            )
        if plan.lives and len(plan.lives) <= self.facts.rank:
            raise PeerError(
                f"a plan is for {counted(len(plan.lives), 'rank')}, must be for at least "
                f"{self.facts.rank + 1}, with rank {self.facts.rank}"
            )

    def _require_sense(self, plan: Plan) -> None:
        for copy in filter(self._is_mine, plan.copies):
            if (copy.source, copy.target) not in self.executor.movers:
                raise PeerError(
                    f"operation {copy.operation} copies from tier {copy.source} to tier "
                    f"{copy.target}: rank {self.facts.rank} has no way between them"
                )
            self._require_slots(copy, copy.source, copy.source_slots)
            self._require_slots(copy, copy.target, copy.target_slots)

    def _require_slots(self, copy: Copy, tier: int, slots: NDArray[np.int32]) -> None:
        counts = self.facts.device_slots
        if tier != DEVICE:
            counts = (self.facts.tiers[tier - 1].slot_count,)
        elif slots.ndim == 1:
            # One slot for all groups, so it must exist in each.
            counts = (min(counts),)
        rows = slots.reshape(len(slots) if slots.ndim > 1 else 1, -1)
        if len(rows) != len(counts):
            raise PeerError(
                f"operation {copy.operation} has {len(rows)} rows of slots in tier {tier}, "
                f"must have {len(counts)}"
            )
        least = NOWHERE if tier == DEVICE and copy.purpose is Purpose.LOAD else 0
        for row, count in zip(rows, counts, strict=True):
            if row.min() < least or row.max() >= count:
                raise PeerError(
                    f"operation {copy.operation} names slots from {row.min()} to {row.max()} in "
                    f"tier {tier}, must be from {least} to {count - 1}"
                )
