"""The engine: requests in, tokens out, one step at a time.

    engine.add(request)
    while engine.unfinished:
        for output in engine.step(): ...

`step` advances copies, plans the next step, submits it to the ranks and collects their results. It
never waits for a copy.
"""

from __future__ import annotations

import enum
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import CapacityError, UnavailableError, counted
from penstock_serve.engine.batch import is_decode
from penstock_serve.engine.checkpoints import WeightsNotLoaded
from penstock_serve.engine.requests import Phase
from penstock_serve.engine.steps import (
    COPIES_ALONE,
    PREFILL_SHARE,
    STEP_S,
    HandedCounts,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.toolkit import Channel
    from penstock_serve.engine.handoffs import InstanceHandoffs
    from penstock_serve.engine.requests import Output, Request
    from penstock_serve.engine.scheduler import Scheduler
    from penstock_serve.engine.spec import PairSpec
    from penstock_serve.engine.steps import StepResult
    from penstock_serve.engine.worker import Pending, Worker


class Workers:
    """The ranks of one model, in this process or in others.

    What has a body here is nothing to do for a rank in this process.
    """

    channels: Sequence[Channel] = ()
    """The channels to ranks in other processes, to wait on."""
    handoff_addresses: list[str] | None = None
    """Where they accept others for handoffs; `None` if the rank is in this process."""

    def submit(self, step: Step) -> None:
        """Starts a step on every rank."""
        raise NotImplementedError

    def collect(self, *, deadline: float) -> StepResult | None:
        """The oldest step's result; waits for it until the deadline."""
        raise NotImplementedError

    def load_weights(self, path: str, digest: str) -> None:
        """Replaces the weights on every rank; raises `WeightsNotLoaded`."""
        raise NotImplementedError

    def give_back(self, tiers: Sequence[str], *, weights: bool = False) -> None:
        """Has ranks in other processes return memory of tiers, and every rank its weights.

        An empty name means the device's blocks.
        """
        raise NotImplementedError

    def take_again(self) -> None:
        """Has ranks in other processes take memory of tiers again."""

    def open_pair(self, pair: PairSpec, *, weights: str) -> None:
        """Ranks in other processes open their part of a pair."""

    def close_pair(self, prefill: str, decode: str) -> None:
        """They close it before their next step."""

    def take_reports(self) -> list[bytes]:
        """Reports of ranks in other processes about copies since the last call."""
        return []

    @property
    def handed(self) -> HandedCounts:
        """The handoff counters of ranks in other processes."""
        return HandedCounts()

    def close(self) -> None:
        """Ends the ranks gracefully."""

    def abandon(self) -> None:
        """Disconnects from the ranks after a failure; they are restarted."""


class LocalWorkers(Workers):
    """One rank in this process, which its cache drives; on a CPU, `submit` computes the step."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._pending: deque[Pending] = deque()

    def submit(self, step: Step) -> None:
        self._pending.append(self.worker.submit(step))

    def collect(self, *, deadline: float) -> StepResult | None:
        return self._pending.popleft().result(deadline) if self._pending else None

    def load_weights(self, path: str, digest: str) -> None:
        self.worker.load_weights(path, digest)

    def give_back(self, tiers: Sequence[str], *, weights: bool = False) -> None:  # noqa: ARG002
        # The cache has given its tiers back itself.
        if weights:
            self.worker.give_back_weights()


class EngineState(enum.Enum):
    """Whether an engine accepts requests."""

    RUNNING = "running"
    PAUSED = "paused"
    ASLEEP = "asleep"
    UNLOADED = "without weights"
    """A load failed, so its weights may be mixed; another load must succeed."""


_NEXT = {
    EngineState.PAUSED: "resumed",
    EngineState.ASLEEP: "woken",
    EngineState.UNLOADED: "given whole weights",
}
"""What an engine that refuses requests needs."""


class EnginePaused(UnavailableError):  # noqa: N818 - a state, not a failure
    """The engine accepts no requests now."""


class Engine:
    """A scheduler, its cache and its ranks."""

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Workers,
        handoffs: InstanceHandoffs | None = None,
        *,
        step_timeout_s: float = STEP_S,
    ) -> None:
        self.scheduler = scheduler
        self.cache = scheduler.cache
        self.handoffs = handoffs
        """Its side of handoffs, if it has one."""
        self.workers = workers
        self._step_timeout_s = step_timeout_s
        self._paused = False
        self._unloaded = False
        self.checkpoint: tuple[str, str] | None = None
        """Where its weights came from: a path, and the digest of its files."""
        self._weights_away = False
        self._flying: list[_Flight] = []
        self._finished = 0.0
        """When the last step ended."""
        self.step_s = 0.0
        """Time in which steps were computed, or prepared one after the other."""
        self.place_s = 0.0
        """That time, by the number of their requests."""
        self.idle = False
        """Whether the last `step` found nothing to do; only messages or copies change that."""

    @property
    def unfinished(self) -> int:
        return self.scheduler.unfinished

    @property
    def state(self) -> EngineState:
        if self.cache.asleep:
            return EngineState.ASLEEP
        if self._unloaded:
            return EngineState.UNLOADED
        return EngineState.PAUSED if self._paused else EngineState.RUNNING

    def pause(self) -> None:
        """Refuses further requests; those under way go on. May be called twice."""
        self._paused = True

    def resume(self) -> None:
        """Accepts requests again; may be called twice."""
        self._paused = False

    @property
    def settled(self) -> bool:
        """Whether no request, step or handoff uses blocks any more."""
        return not (self.unfinished or self._flying)

    def add(self, request: Request) -> None:
        """Adds a request.

        Raises `EnginePaused`: it is paused, or has no whole weights; `ValueError`: as
        `Scheduler.add` does; `CapacityError`: as `Scheduler.add` does.
        """
        self.require_running()
        self.scheduler.add(request)

    def require_running(self) -> None:
        """Refuses what needs an engine that accepts requests.

        Raises `EnginePaused`: it accepts none.
        """
        state = self.state
        if state is not EngineState.RUNNING:
            raise EnginePaused(f"the engine is {state.value}, must be {_NEXT[state]} first")

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
        follows = not self.idle and self._finished > 0
        step = self.scheduler.plan()
        outputs = self.scheduler.take_outputs()
        plan = self.cache.ranks.take_plan()
        self.idle = not (outputs or step or plan or self._flying)
        if step is not None:
            self._flying.append(_Flight(step, time.monotonic(), follows))
            self.workers.submit(msgspec.structs.replace(step, plan=plan))
        elif plan is not None:
            self.workers.submit(Step(COPIES_ALONE, [], [], plan))
        if self.copies_here and self.scheduler.count(Phase.LOADING) > loading:
            # Loads that have just been requested start before anything is waited for.
            self.cache.step(again=True)
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

    def load_weights(self, path: str, *, digest: str, version: str) -> None:
        """Replaces the weights by those of another checkpoint; all that is cached is void.

        Raises `WeightsNotLoaded` or `UnavailableError`.
        """
        if not self.settled:
            raise WeightsNotLoaded(f"{counted(self.unfinished, 'request')} under way")
        if self.cache.asleep:
            raise WeightsNotLoaded("the engine is asleep, must be woken first")
        # Before the first tensor changes: whatever happens then, nothing old is found.
        self.change_weights(version)
        self._unloaded = True
        self.workers.load_weights(path, digest)
        self.checkpoint = (path, digest)
        self._unloaded = False

    @property
    def can_sleep(self) -> bool:
        """Whether nothing uses the memory that `sleep` gives back."""
        return self.settled and not self.cache.busy

    def sleep(self, *, host: bool = False, weights: bool = False) -> None:
        """Gives the memory of the KV back to the system, until `wake`.

        Raises `UnavailableError`: the memory is that of a GPU without virtual memory, or a rank is
        lost; `ValueError`: requests or copies are under way: see `can_sleep`.
        """
        if not self.settled:
            raise ValueError(f"{counted(self.unfinished, 'request')} under way, must be none")
        away = weights and not self._weights_away
        if away and self.checkpoint is None:
            raise UnavailableError("it is not known where the weights came from")
        hub = [tier.name for tier in self.cache.config.cache.tiers[:1] if host]
        self.cache.sleep(host=host)
        self._weights_away |= away
        self.workers.give_back(["", *hub], weights=away)

    def wake(self) -> None:
        """Ends `sleep`; may be called twice.

        Raises `WeightsNotLoaded`: the weights cannot be read any more; it sleeps on;
        `UnavailableError`: there is no memory for the cache, and it sleeps on; or a rank is lost.
        """
        if self._weights_away:
            assert self.checkpoint is not None
            self.workers.load_weights(*self.checkpoint)
            self._weights_away = False
        if self.cache.asleep:
            self.workers.take_again()
        self.cache.wake()

    def change_weights(self, version: str) -> None:
        """The model has other weights: KV of the old ones is not used any more."""
        self.cache.change_weights(version)
        if self.handoffs is not None:
            self.handoffs.weights = version

    def open_pair(self, pair: PairSpec) -> None:
        """Opens a pair with another instance; raises as `Peers.open` does."""
        if self.handoffs is None:
            raise ValueError("pair is given, must not be: this instance takes part in no handoffs")
        # Ranks first: opening waits for them to connect. They are told to close it in any case.
        self.workers.open_pair(pair, weights=self.handoffs.weights)
        try:
            self.handoffs.open(pair)
        except (ValueError, UnavailableError, CapacityError):
            self.close_pair(pair.prefill.name, pair.decode.name)
            raise

    def close_pair(self, prefill: str, decode: str, *, lost: bool = False) -> None:
        """Closes a pair; prompts that it was to bring are computed here."""
        if self.handoffs is not None:
            self.workers.close_pair(prefill, decode)
            self.handoffs.close_pair(prefill, decode, lost=lost)

    def close_pairs(self) -> None:
        """Closes all pairs: the router that introduced them is gone."""
        for names in [] if self.handoffs is None else self.handoffs.peers.open_pairs:
            self.close_pair(*names)

    @property
    def handed(self) -> HandedCounts:
        """The handoff counters of its ranks."""
        peers = None if self.handoffs is None else self.handoffs.peers
        return self.workers.handed if peers is None or not peers.has_rank else peers.counts

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
            self.handoffs.peers.close()

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
        busy_s = now - self._finished if flight.follows else seconds
        self.step_s += busy_s
        self.place_s += busy_s * len(flight.step.spans)
        self._finished = now
        prefilled = sum(len(span.tokens) for span in flight.step.spans if not is_decode(span))
        decoded = sum(is_decode(span) for span in flight.step.spans)
        if flight.step.joins:
            # It may have waited for blocks.
            return
        self.scheduler.step_times.add(prefilled, decoded, max(1e-9, seconds))
        if prefilled > PREFILL_SHARE * (prefilled + decoded):
            self.cache.computed(prefilled, max(1e-9, seconds))


class _Flight(NamedTuple):
    """A step under way."""

    step: Step
    began: float
    follows: bool
    """Whether it was planned when the one before had ended, without a pause."""
