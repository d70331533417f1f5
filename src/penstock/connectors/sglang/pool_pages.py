"""Pages of a host pool in the tiers below it, for threads of an engine that may wait.

    found = pages.find(keys)          # how many leading pages are there, in one question
    good = pages.load(keys, slots)    # into pages of the pool; False: not there, or damaged
    kept = pages.save(keys, slots)    # out of pages of the pool; ends when the store has them
    pages.reset(why); pages.close(timeout_s)

An `Offload` belongs to one thread at a time. Here each call is a generator that yields while it
waits, and one of the threads that are in a call advances all of them: it alone steps and waits.
When its own call has ended, another takes over. So no call waits for the end of another, and no
thread of ours is needed.

The rules: every call ends by its deadline, and after a call no copy touches its pages. A page
counts when its bytes agree with their sums.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from penstock.cache.operations import BlockFault, Outcome
from penstock.connectors.sglang.versions import log
from penstock.errors import UnavailableError, counted
from penstock.machine.effects import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from numpy.typing import NDArray

    from penstock.machine.effects import Started
    from penstock.machine.statistics import CacheStatistics
    from penstock.runtime.offload import Offload
    from penstock.runtime.status import Health
    from penstock.vocabulary.keys import Key, OperationId

FIND_S = 0.5
"""A store answers within milliseconds what it has; a request waits for this answer."""
LOAD_S = 5.0
"""For some tens of pages from a disk or a shared store."""
SAVE_S = 10.0
"""For as many to be written; nobody waits for it but the thread that saves."""
ASKED_MAX = 3
"""How often a store is asked for pages of a call: it may have more than there is room for."""
SHARE = 4
"""A call moves at most one in so many slots of host memory at a time: others need some, too."""

AGAIN_S = 0.05
"""Between looks at copies that were cancelled and have not come to rest."""

ResultT = TypeVar("ResultT")


class _Call(Generic[ResultT]):
    """A call of a thread, and how far it is."""

    def __init__(self, work: Generator[None, None, ResultT], deadline: float) -> None:
        self.deadline = deadline
        self.ended = False
        self._work = work
        self._result: list[ResultT] = []
        self._error: BaseException | None = None

    def advance(self) -> None:
        """Goes on until it waits or has ended."""
        try:
            next(self._work)
        except StopIteration as end:
            self._result.append(end.value)
            self.ended = True
        except Exception as error:  # noqa: BLE001 - as the next line says
            # For the thread whose call it is, which may be another one.
            self._error, self.ended = error, True

    def result(self) -> ResultT:
        if self._error is not None:
            raise self._error
        return self._result[0]


class PoolPages:
    """Pages below one pool. Any thread may call; `close` comes last."""

    def __init__(self, offload: Offload, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._offload = offload
        self._clock = clock
        self._calls: list[_Call[Any]] = []
        self._turn = threading.Condition()
        self._led = False
        """Whether a thread advances the calls."""
        self._closed = False
        self._saving = False
        self._damaged = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is a call that the thread which waits has not seen."""
        self._ends: dict[OperationId, Ended | None] = {}
        """Operations that calls wait for, and how they have ended."""
        self._unsettled: set[OperationId] = set()
        self._numbers = itertools.count()
        self._most = max(1, offload.hub_counts().slots // SHARE)

    # ---------------------------------------------------------------- what a thread may ask

    def find(self, keys: Sequence[Key]) -> int:
        """How many leading pages lie in some tier, as far as the store says within `FIND_S`."""
        return self._run(self._find(keys, deadline := self._clock() + FIND_S), deadline)

    def load(self, keys: Sequence[Key], slots: Sequence[int]) -> list[bool]:
        """Brings pages into pages of the pool; which of them have arrived, verified.

        They arrive in order: after one that has not, none has.
        """
        return self._run(self._load(keys, slots, deadline := self._clock() + LOAD_S), deadline)

    def save(self, keys: Sequence[Key], slots: Sequence[int]) -> list[bool]:
        """Writes pages of the pool down; which of them lie in some tier now."""
        return self._run(self._save(keys, slots, deadline := self._clock() + SAVE_S), deadline)

    def reset(self, why: str) -> None:
        """Voids all pages, for all engines of the model."""

        def work() -> Generator[None, None, None]:
            self._offload.reset(why)
            yield from ()

        self._run(work(), self._clock() + FIND_S)

    def statistics(self) -> CacheStatistics:
        """Counts and sizes, as a frozen value."""

        def work() -> Generator[None, None, CacheStatistics]:
            yield from ()
            return self._offload.statistics()

        return self._run(work(), self._clock() + FIND_S)

    @property
    def health(self) -> Health:
        """What is lost or off now, and why."""

        def work() -> Generator[None, None, Health]:
            yield from ()
            return self._offload.health()

        return self._run(work(), self._clock() + FIND_S)

    def close(self, timeout_s: float) -> None:
        """Gives everything back; what is being written may take `timeout_s`."""

        def work() -> Generator[None, None, None]:
            self._offload.close(timeout_s)
            yield from ()

        self._run(work(), self._clock() + timeout_s)
        with self._turn:
            self._closed = True
            os.close(self._wake)

    # ---------------------------------------------------------------- whose turn it is

    def _run(self, work: Generator[None, None, ResultT], deadline: float) -> ResultT:
        """Has a call advanced until it has ended, by this thread or by another one."""
        call = _Call(work, deadline)
        with self._turn:
            if self._closed:
                raise UnavailableError("the pages are closed")
            self._calls.append(call)
            if self._led:
                os.eventfd_write(self._wake, 1)
            while self._led and not call.ended:
                self._turn.wait()
            if call.ended:
                return call.result()
            self._led = True
        try:
            self._lead(call)
        finally:
            with self._turn:
                self._led = False
                if call in self._calls:
                    self._calls.remove(call)
                self._turn.notify_all()
        return call.result()

    def _lead(self, mine: _Call[Any]) -> None:
        """Steps and waits for all calls until this one has ended."""
        self._offload.adopt_thread()
        self._step()
        while True:
            with self._turn:
                calls = list(self._calls)
            for call in calls:
                call.advance()
            if ended := [call for call in calls if call.ended]:
                with self._turn:
                    self._calls = [call for call in self._calls if not call.ended]
                    self._turn.notify_all()
            if mine.ended:
                return
            if not ended:
                # Past its deadline a call waits for nothing but copies that it has cancelled.
                until = min(max(call.deadline, self._clock() + AGAIN_S) for call in calls)
                self._offload.wait(until, descriptors=(self._wake,))
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            self._step()

    def _step(self) -> None:
        self._offload.step()
        for result in self._offload.poll():
            if isinstance(result, Ended) and result.faults:
                self._tell_damage([fault for _, fault in result.faults])
            if result.operation in self._ends:
                if isinstance(result, Ended):
                    self._ends[result.operation] = result
                if not isinstance(result, Ended) or result.settled:
                    self._unsettled.discard(result.operation)

    def _tell_damage(self, faults: Sequence[BlockFault]) -> None:
        damaged = faults.count(BlockFault.CORRUPT)
        if damaged:
            self._damaged += damaged
            log.warning(
                "%s with wrong sums, computed again: damaged_pages=%d",
                counted(damaged, "page"),
                self._damaged,
            )

    # ---------------------------------------------------------------- what becomes of it

    def _find(self, keys: Sequence[Key], deadline: float) -> Generator[None, None, int]:
        offload, cause = self._offload, f"find {next(self._numbers)}"
        found = offload.lookup(keys)
        if found.ready + found.pending < len(keys) and self._store_is_on(cause):
            # What is not known here the store is asked for; what it has comes up meanwhile.
            offload.prefetch(keys, cause=cause, deadline=self._clock() + LOAD_S)
            while self._awaits_answer(cause) and self._clock() < deadline:
                yield
            found = offload.lookup(keys)
        return found.ready + found.pending

    def _load(
        self, keys: Sequence[Key], slots: Sequence[int], deadline: float
    ) -> Generator[None, None, list[bool]]:
        arrived = [False] * len(keys)
        for first in range(0, len(keys), self._most):
            part = keys[first : first + self._most]
            ready = yield from self._bring_up(part, deadline)
            if ready:
                started = self._offload.load(
                    part[:ready],
                    _slots(slots[first : first + ready]),
                    cause="load",
                    deadline=deadline,
                )
                for position in (yield from self._copied(started, deadline)):
                    arrived[first + position] = True
            if not all(arrived[first : first + len(part)]):
                break
        end = arrived.index(False) if False in arrived else len(arrived)
        return [True] * end + [False] * (len(keys) - end)

    def _bring_up(self, keys: Sequence[Key], deadline: float) -> Generator[None, None, int]:
        """Waits until what lies below host memory has come up; how many leading pages are there."""
        offload, cause, asked = self._offload, f"load {next(self._numbers)}", 0
        found = offload.lookup(keys)
        while found.ready < len(keys) and self._clock() < deadline:
            if found.rising or self._awaits_answer(cause):
                yield
            elif asked == ASKED_MAX or (asked and not found.below) or not self._store_is_on(cause):
                break
            else:
                asked += 1
                offload.prefetch(keys, cause=cause, deadline=deadline)
            found = offload.lookup(keys)
        return found.ready

    def _save(
        self, keys: Sequence[Key], slots: Sequence[int], deadline: float
    ) -> Generator[None, None, list[bool]]:
        # One at a time: several together would not all be written to a disk.
        while self._saving and self._clock() < deadline:
            yield
        if self._saving:
            return [False] * len(keys)
        self._saving = True
        try:
            return (yield from self._save_alone(keys, slots, deadline))
        finally:
            self._saving = False

    def _save_alone(
        self, keys: Sequence[Key], slots: Sequence[int], deadline: float
    ) -> Generator[None, None, list[bool]]:
        kept: list[bool] = []
        # No part follows another: a chain may be longer than host memory, where a block stays as
        # long as one that follows it.
        for first in range(0, len(keys), self._most):
            part = keys[first : first + self._most]
            started = self._offload.save(
                part,
                _slots(slots[first : first + len(part)]),
                cause="save",
                deadline=deadline,
            )
            yield from self._copied(started, deadline)
            # Those that a tier has refused, or had no room for, are not there.
            found = self._offload.lookup(part)
            while self._offload.sinking(part) and self._clock() < deadline:
                yield
            there = found.ready + found.pending
            kept += [True] * there + [False] * (len(part) - there)
            if there < len(part):
                break
        return kept + [False] * (len(keys) - len(kept))

    def _copied(self, started: Started, deadline: float) -> Generator[None, None, list[int]]:
        """Waits until nothing touches the pages of these copies; the positions that were copied."""
        self._ends.update(dict.fromkeys(started.operations))
        self._unsettled.update(started.operations)
        wanted = True
        while not self._unsettled.isdisjoint(started.operations):
            if wanted and self._clock() >= deadline:
                wanted = False
                for operation in started.operations:
                    self._offload.cancel(operation)
            yield
        positions, copied = iter(started.accepted), []
        for operation in started.operations:
            ended = self._ends.pop(operation)
            assert ended is not None  # It has settled, which comes last.
            mine = list(itertools.islice(positions, ended.block_count))
            faulty = {position for position, _ in ended.faults}
            if ended.outcome is Outcome.DONE or (faulty and not ended.failure):
                copied += [each for place, each in enumerate(mine) if place not in faulty]
        return copied

    def _store_is_on(self, cause: str) -> bool:
        status = self._offload.store_status(cause)
        return status is not None and status.on

    def _awaits_answer(self, cause: str) -> bool:
        status = self._offload.store_status(cause)
        return status is not None and status.on and status.asked


def _slots(slots: Sequence[int]) -> NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)
