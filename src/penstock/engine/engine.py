"""The engine: requests in, tokens out, one step at a time.

    engine.add(request)
    while engine.unfinished:
        for output in engine.step(): ...

`step` advances copies, plans the next step, submits it to the ranks and collects their results. It
never waits for a copy.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from penstock.engine.batch import is_decode
from penstock.engine.requests import Phase
from penstock.engine.steps import COPIES_ALONE, STEP_S, HandedCounts, Step
from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.handoffs import Side
    from penstock.engine.requests import Output, Request
    from penstock.engine.scheduler import Scheduler
    from penstock.engine.steps import StepResult
    from penstock.engine.worker import Pending, Worker
    from penstock.transport.base import Channel


PREFILL_SHARE = 0.75
"""Prefill speed is measured in steps in which at least this share of the tokens is prompts."""


class Workers(Protocol):
    """The ranks of one model, in this process or in others."""

    def submit(self, step: Step) -> None:
        """Starts a step on every rank."""
        ...

    def collect(self, *, deadline: float) -> StepResult | None:
        """The oldest step's result; waits for it until the deadline."""
        ...

    @property
    def channels(self) -> Sequence[Channel]:
        """The channels to ranks in other processes, to wait on."""
        ...

    def take_reports(self) -> list[bytes]:
        """Reports of the ranks about copies since the last call."""
        ...

    @property
    def handed(self) -> HandedCounts:
        """The handoff counters of ranks in other processes."""
        ...

    def close(self) -> None:
        """Ends the ranks gracefully."""
        ...

    def abandon(self) -> None:
        """Disconnects from the ranks after a failure; they are restarted."""
        ...


class LocalWorkers:
    """One rank in this process; on a CPU, `submit` computes the step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[Pending] = deque()

    def submit(self, step: Step) -> None:
        self._pending.append(self.worker.submit(step))

    def collect(self, *, deadline: float) -> StepResult | None:
        return self._pending.popleft().result(deadline) if self._pending else None

    @property
    def channels(self) -> Sequence[Channel]:
        return ()

    def take_reports(self) -> list[bytes]:
        # The cache drives this rank itself.
        return []

    @property
    def handed(self) -> HandedCounts:
        return HandedCounts()

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class Engine:
    """A scheduler, its cache and its ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        handoffs: Side | None = None,
        *,
        step_timeout_s: float = STEP_S,
    ) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.handoffs = handoffs
        """Its side of handoffs, if it has one."""
        self.workers = workers
        self._step_timeout_s = step_timeout_s
        self._flying: list[_Flight] = []
        self._finished = 0.0
        """When the last step ended."""
        self.idle = False
        """Whether the last `step` found nothing to do; only messages or copies change that."""

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished

    def add(self, request: Request) -> None:
        """Adds a request; raises as `Scheduler.add` does."""
        self.scheduler.add(request)

    def abort(self, request: str) -> None:
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """Ends every request without outputs."""
        self.scheduler.abort_all()
        if self.handoffs is not None:
            self.handoffs.delivered.clear()

    def step(self) -> list[Output]:
        """Advances copies and computes a step, if anything can run."""
        for report in self.workers.take_reports():
            self.cache.ranks.receive(report)
        self.cache.step()
        self.scheduler.step_handoffs()
        loading = self.scheduler.count(Phase.LOADING)
        step = self.scheduler.plan()
        outputs = self.scheduler.take_outputs()
        plan = self.cache.ranks.take_plan()
        self.idle = not (outputs or step or plan or self._flying)
        if step is not None:
            self._flying.append(_Flight(step, time.monotonic()))
            self.workers.submit(msgspec.structs.replace(step, plan=plan))
        elif plan is not None:
            self.workers.submit(Step(COPIES_ALONE, [], [], plan))
        if self.copies_here and self.scheduler.count(Phase.LOADING) > loading:
            # Loads that have just been requested start before anything is waited for.
            self.cache.step()
            self.idle = False
        # While another step may be in flight, the newest one is not waited for.
        if self._flying and (step is None or self._is_full):
            outputs += self._finish()
        return outputs

    @property
    def channels(self) -> Sequence[Channel]:
        """The channels to wait on when nothing can run."""
        return self.workers.channels

    @property
    def copies_here(self) -> bool:
        """Whether `step` itself copies blocks, so that waiting would delay them."""
        return not self.workers.channels

    def change_weights(self, version: str) -> None:
        """The model has other weights: KV of the old ones is not used any more."""
        self.cache.change_weights(version)
        if self.handoffs is not None:
            self.handoffs.weights = version

    @property
    def handoff_outcomes(self) -> dict[str, int]:
        """The number of handoffs by outcome."""
        return {} if self.handoffs is None else dict(self.handoffs.outcomes)

    @property
    def handed(self) -> HandedCounts:
        """The handoff counters of its ranks."""
        here = self.handoffs.rank if self.handoffs is not None else None
        return self.workers.handed if here is None else here.counts

    def close(self, timeout_s: float) -> None:
        """Ends handoffs, finishes copies within `timeout_s`, and ends the ranks."""
        self._end_handoffs()
        self.cache.close(timeout_s)
        self.workers.close()

    def abandon(self) -> None:
        """A rank is lost: releases everything without waiting."""
        self._end_handoffs()
        self.workers.abandon()
        with warnings.catch_warnings():
            # Running requests are dropped with their leases.
            warnings.filterwarnings("ignore", "the cache was closed with open", ResourceWarning)
            self.cache.close(0.0)

    def _end_handoffs(self) -> None:
        """Must come before blocks are released: handoffs read and write them."""
        if self.handoffs is not None:
            self.handoffs.door.close()

    @property
    def _is_full(self) -> bool:
        return len(self._flying) >= self.scheduler.settings.steps_in_flight

    def _finish(self) -> list[Output]:
        deadline = time.monotonic() + self._step_timeout_s
        result = self.workers.collect(deadline=deadline)
        flight = self._flying[0]
        if result is None:
            raise UnavailableError(
                f"step {flight.step.number} was not computed within {self._step_timeout_s:g} s"
            )
        del self._flying[0]
        self._report_speed(flight, time.monotonic())
        return self.scheduler.finish(flight.step, result.sampled, result.scored)

    def _report_speed(self, flight: _Flight, now: float) -> None:
        """Reports the prefill speed to the cache, from steps that do little else."""
        # A step that was submitted while another one was computed began when that one ended.
        seconds = now - max(flight.began, self._finished)
        self._finished = now
        prefilled = sum(len(span.tokens) for span in flight.step.spans if not is_decode(span))
        decoded = sum(is_decode(span) for span in flight.step.spans)
        if prefilled > PREFILL_SHARE * (prefilled + decoded):
            self.cache.computed(prefilled, max(1e-9, seconds))


class _Flight(NamedTuple):
    """A step under way."""

    step: Step
    began: float
