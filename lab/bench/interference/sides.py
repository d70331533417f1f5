"""Who drives the copies beside a decode loop.

| side              | how                                                                     |
|-------------------|-------------------------------------------------------------------------|
| `Alone`           | nobody: there are none                                                   |
| `AtBoundaries`    | the engine's own thread polls each mover once a step, within a budget    |
| `PollingThread`   | a Python thread polls the movers without pause                           |
| `BlockingThreads` | a Python thread a direction submits what fits, and blocks on the event   |

The fourth way, a process of its own, is in `second_process`. The threads belong to the ways
that Penstock is compared with; it has none itself.

The one rule: a side that has ended has nothing in flight, so that the next one starts fresh.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from lab.bench.interference.shares import budget_bytes
from lab.bench.interference.traffic import DRAIN_S, UNLIMITED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lab.bench.interference.traffic import Traffic


_STEP_MIN_S = 1e-6
"""No step is shorter, whatever a coarse clock says."""


class Blocking(Protocol):
    """What a mover needs for a thread to block on it."""

    def wait(self) -> None:
        """Blocks until all that was submitted to the device has ended."""
        ...


class Alone:
    """No copies."""

    def begin(self) -> None:
        """There is nothing to start."""

    def at_boundary(self) -> None:
        """There is nothing to do."""

    def end(self, began: float, ended: float) -> int:  # noqa: ARG002 - every side has these
        """Nothing moved."""
        return 0


class AtBoundaries:
    """Penstock's way: one poll a mover and step, on the engine's own thread.

    Args:
        traffic: One a direction.
        gb_per_s: The rate, both ways together, that a step's budget is made for: it is what such
            a rate moves in the time since the step before. `None` is no limit.
        step_submitted: Tells the movers about the step, as an engine has to.
        clock: In seconds.
    """

    def __init__(
        self,
        traffic: Sequence[Traffic],
        *,
        gb_per_s: float | None,
        step_submitted: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._traffic = traffic
        self._gb_per_s = gb_per_s
        self._step_submitted = step_submitted
        self._clock = clock
        self._last = 0.0

    def begin(self) -> None:
        """The first poll comes with the first step."""
        self._last = self._clock()

    def at_boundary(self) -> None:
        """Tells the step and polls."""
        self._step_submitted()
        budget = self._budget_bytes()
        for each in self._traffic:
            each.advance(budget)

    def end(self, began: float, ended: float) -> int:
        """Waits for what is in flight."""
        for each in self._traffic:
            each.drain()
        return sum(each.moved_between(began, ended) for each in self._traffic)

    def _budget_bytes(self) -> int:
        """What each mover may submit in this step."""
        if self._gb_per_s is None:
            return UNLIMITED
        now = self._clock()
        step_s, self._last = now - self._last, now
        return budget_bytes(self._gb_per_s, max(step_s, _STEP_MIN_S), len(self._traffic))


class Threads:
    """Copies driven by threads of the engine's process, until they are told to stop."""

    def __init__(self, traffic: Sequence[Traffic], *, prepare: Callable[[], None]) -> None:
        self._traffic = traffic
        self._prepare = prepare
        """Makes the device current in a new thread."""
        self._stop = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []

    def begin(self) -> None:
        """Starts the threads."""
        self._stop.clear()
        work = self._work()
        self._pool = ThreadPoolExecutor(len(work), initializer=self._prepare)
        self._running = [self._pool.submit(each) for each in work]

    def at_boundary(self) -> None:
        """The engine's thread does nothing."""

    def end(self, began: float, ended: float) -> int:
        """Stops the threads; raises what they raised."""
        self._stop.set()
        for running in self._running:
            running.result(timeout=2 * DRAIN_S)
        if self._pool is not None:
            self._pool.shutdown()
        return sum(each.moved_between(began, ended) for each in self._traffic)

    def _work(self) -> list[Callable[[], None]]:
        """What each thread does."""
        raise NotImplementedError


class PollingThread(Threads):
    """One thread that asks all movers in turn, without pause."""

    def _work(self) -> list[Callable[[], None]]:
        return [self._poll]

    def _poll(self) -> None:
        while not self._stop.is_set():
            for each in self._traffic:
                each.advance()
        for each in self._traffic:
            each.drain()


class BlockingThreads(Threads):
    """One thread a direction, which submits what fits and blocks until it has ended."""

    def __init__(
        self,
        traffic: Sequence[tuple[Traffic, Blocking]],
        *,
        prepare: Callable[[], None],
    ) -> None:
        super().__init__([each for each, _ in traffic], prepare=prepare)
        self._pairs = traffic

    def _work(self) -> list[Callable[[], None]]:
        return [self._blocker(each, mover) for each, mover in self._pairs]

    def _blocker(self, traffic: Traffic, mover: Blocking) -> Callable[[], None]:
        def drive() -> None:
            while not self._stop.is_set():
                traffic.advance()
                mover.wait()
            traffic.drain()

        return drive
