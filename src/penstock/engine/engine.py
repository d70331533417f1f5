"""The engine: requests in, tokens out, one step at a time.

    engine.add(request)
    while engine.unfinished:
        for output in engine.step(): ...

`step` lets copies advance, plans the next step, hands it to the ranks and takes in what they
have finished. It never waits for a copy.
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
"""The speed of prompts is measured from steps of which at least this share is prompts."""


class Workers(Protocol):
    """The ranks, wherever they are."""

    def submit(self, step: Step) -> None:
        """Hands a step to every rank."""
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
        """What ranks in other processes have handed over, or taken in."""
        ...

    def close(self) -> None:
        """Ends the ranks."""
        ...

    def abandon(self) -> None:
        """Leaves the ranks: something is wrong, and they are to start anew."""
        ...


class LocalWorkers:
    """One rank, in this process: on a CPU, a step is computed when it is handed over."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[Pending] = deque()

    def submit(self, step: Step) -> None:
        """Computes the step, or has a GPU do so."""
        self._pending.append(self.worker.submit(step))

    def collect(self, *, deadline: float) -> StepResult | None:
        """The oldest step's result; waits for a GPU until the deadline."""
        return self._pending.popleft().result(deadline) if self._pending else None

    @property
    def channels(self) -> Sequence[Channel]:
        """None: this rank is no other process."""
        return ()

    def take_reports(self) -> list[bytes]:
        """None: the cache drives this rank itself."""
        return []

    @property
    def handed(self) -> HandedCounts:
        """Nothing: the one rank is in this process."""
        return HandedCounts()

    def close(self) -> None:
        """There is nobody to end."""

    def abandon(self) -> None:
        """There is nobody to leave."""


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
        """Its part in handoffs, if it has one: what to wait for beside the ranks."""
        self.workers = workers
        self._step_timeout_s = step_timeout_s
        self._flying: list[_Flight] = []
        self._finished = 0.0
        """When the last step was seen to have ended."""
        self.idle = False
        """Whether the last `step` found nothing to do: only messages or copies can change that."""

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return self.scheduler.unfinished

    def add(self, request: Request) -> None:
        """Takes a request in; see `Scheduler.add` for what it refuses."""
        self.scheduler.add(request)

    def abort(self, request: str) -> None:
        """Ends a request, whatever it is doing."""
        self.scheduler.abort(request)

    def abort_all(self) -> None:
        """Ends every request; nothing is returned for any of them."""
        self.scheduler.abort_all()
        if self.handoffs is not None:
            self.handoffs.delivered.clear()

    def step(self) -> list[Output]:
        """Lets copies advance and computes a step, if anything can run."""
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
            # Blocks that were asked for just now set out before anything is waited for.
            self.cache.step()
            self.idle = False
        # With room for another step in flight, the newest one need not be waited for.
        if self._flying and (step is None or self._is_full):
            outputs += self._finish()
        return outputs

    @property
    def channels(self) -> Sequence[Channel]:
        """What to wait for when nothing can run."""
        return self.workers.channels

    @property
    def copies_here(self) -> bool:
        """Whether `step` itself moves blocks, so that waiting would delay them."""
        return not self.workers.channels

    def change_weights(self, version: str) -> None:
        """The model has other weights: nothing that was computed before is used any more."""
        self.cache.change_weights(version)
        if self.handoffs is not None:
            self.handoffs.weights = version

    @property
    def handoff_outcomes(self) -> dict[str, int]:
        """How many handoffs ended how."""
        return {} if self.handoffs is None else dict(self.handoffs.outcomes)

    @property
    def handed(self) -> HandedCounts:
        """What its ranks have handed over, or taken in."""
        here = self.handoffs.rank if self.handoffs is not None else None
        return self.workers.handed if here is None else here.counts

    def close(self, timeout_s: float) -> None:
        """Ends what is under way, drains the copies, and lets the ranks go."""
        self._end_handoffs()
        self.cache.close(timeout_s)
        self.workers.close()

    def abandon(self) -> None:
        """A rank is lost: gives everything back without waiting for anything."""
        self._end_handoffs()
        self.workers.abandon()
        with warnings.catch_warnings():
            # What runs is given up with its leases.
            warnings.filterwarnings("ignore", "the cache was closed with open", ResourceWarning)
            self.cache.close(0.0)

    def _end_handoffs(self) -> None:
        """Before blocks are given back: nothing is read from them or put into them after it."""
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
        """Reports to the cache how fast prompts are computed, from steps that do little else."""
        # One that was handed over while another was computed began when that one ended.
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
