"""Loads that a step computes on while they arrive: a request joins the step that starts its load.

| class                | does                                                                     |
|----------------------|--------------------------------------------------------------------------|
| `LayerwiseScheduler` | chooses which requests join, hides their blocks from other requests, and |
|                      | keeps them out of steps planned before their loads are verified          |
| `LayerwiseWorker`    | starts loads before the forward pass, waits layer by layer, ends them    |

On a GPU a layer waits on the device for its own blocks, or the whole step for all of them where
the engine does not call at every layer. On the CPU, whose own thread copies, the first layer that
needs a load copies all of them.

The one rule: nothing that was computed on a load leaves its step before the load was verified on
every rank. Until then no other request can match its blocks, and they are not saved. Where the
load fails, its blocks are reported as invalid in the same step, and the engine drops the token and
computes the blocks.

An engine that schedules asynchronously plans the next step before it has the results of this one.
Then no further step of the request is planned until they are there: it has nothing to take back
but the one step. If it loses its blocks meanwhile, to others or because it is aborted, what the
step gives is not used, and nobody gets the blocks before the results are there.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from penstock.connectors.base.statistics import GIVEN_UP
from penstock.errors import InvariantViolation, UnavailableError
from penstock.movers.base import WAIT_S
from penstock.runtime.copy_executor import DEVICE_SHARE
from penstock.runtime.messages import decode_plan
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from penstock.connectors.base.keys import EngineRequest
    from penstock.connectors.base.requests import Pins
    from penstock.connectors.base.scheduler import RequestLoad, StepPlan
    from penstock.movers.base import Moved
    from penstock.runtime.messages import RankFacts
    from penstock.runtime.rank import Rank
    from penstock.vocabulary.keys import OperationId

    Withhold = Callable[[str, Sequence[int], int], None]

log = logging.getLogger("penstock.connectors")

LOADS_MAX = 8
"""Loads that can join one step: a GPU has no more of them in flight at a time."""


def joined_blocks(ranks: Iterable[RankFacts]) -> int:
    """How many blocks a step may wait for: what the slowest rank copies in a step anyway.

    A longer hit would stall the requests beside it, and is loaded asynchronously.
    """
    return min(
        STEP_BUDGET_BYTES
        * (DEVICE_SHARE if facts.algorithm == Algorithm.MIX64.value else 1)
        // facts.block_bytes
        for facts in ranks
    )


class OverlappingEngine(Protocol):
    """What can be done to a request of an engine that plans a step before it has the last one's."""

    def hold(self, request: EngineRequest) -> None:
        """Plans no further step of it."""
        ...

    def resume(self, request: EngineRequest) -> None:
        """Plans steps of it again; the results of all its steps are there."""
        ...

    def discard(self, request: EngineRequest) -> None:
        """Uses nothing of what its steps will give; it has lost its blocks and starts over."""
        ...


class LayerwiseScheduler:
    """The scheduler's side: the requests that join the step being put together.

    Args:
        withhold: has the engine's prefix cache forget blocks of a request, from a number on.
        blocks_max: how many blocks a step may wait for.
        overlapping: an engine that plans a step before it has the results of the last one, and
            the pins of its blocks.
    """

    def __init__(
        self,
        withhold: Withhold,
        *,
        blocks_max: int,
        overlapping: tuple[OverlappingEngine, Pins] | None = None,
    ) -> None:
        self._withhold = withhold
        self._overlapping = overlapping
        self.step = 0
        """The number of the last step that requests have joined."""
        self._room = self._blocks_max = blocks_max
        self.starting: list[RequestLoad] = []
        self._held: dict[str, tuple[int, EngineRequest, OverlappingEngine]] = {}
        """Requests of an overlapping engine that have joined a step, with its number, whose results
        are not there."""
        self._joining: dict[str, EngineRequest] = {}
        self._counted: dict[str, tuple[EngineRequest, int]] = {}
        """Requests that have joined the last step they were in, and how many computed tokens they
        have after it, if it is not taken back."""
        self.taken_back: list[EngineRequest] = []
        """Requests in the step that was planned last whose step before was taken back."""

    def has_room(self, blocks: int, loads: int) -> bool:
        """Whether this step has room for these blocks and loads."""
        begun = sum(len(loading.operations) for loading in self.starting)
        return blocks <= self._room and begun + loads <= LOADS_MAX

    def add(
        self,
        loading: RequestLoad,
        request: EngineRequest,
        row: Sequence[int],
        *,
        first: int,
        blocks: int,
    ) -> None:
        """A request joins: no other request may use its blocks from `first` on yet."""
        self._withhold(loading.request, row[first:], first)
        if self._overlapping is not None:
            engine, pins = self._overlapping
            engine.hold(request)
            self._held[loading.request] = self.step + 1, request, engine
            if loading.operations:
                pins.add(row[first:], loading.operations)
        self._room -= blocks
        self._joining[loading.request] = request
        self.starting.append(loading)

    def take(
        self, scheduled: Mapping[str, int], preempted: Collection[str] = ()
    ) -> tuple[RequestLoad, ...]:
        """The loads that join this step; later ones join the next.

        Raises `InvariantViolation`: the engine has planned a step of a request that is held.
        """
        self._count(scheduled, preempted)
        for name, (joined, request, engine) in [*self._held.items()]:
            if joined == self.step + 1:
                continue  # It may have been preempted before that: it starts over with this step.
            if name in preempted:
                del self._held[name]
                engine.discard(request)
            elif name in scheduled:
                raise InvariantViolation(
                    f"request {name} is in a step that was planned before its loads were verified"
                )
        taken, self.starting = tuple(self.starting), []
        self.step += bool(taken)
        self._room = self._blocks_max
        return taken

    def _count(self, scheduled: Mapping[str, int], preempted: Collection[str]) -> None:
        """Notes which requests have fewer computed tokens than the workers were told to compute."""
        self.taken_back = []
        for name, (request, computed) in [*self._counted.items()]:
            if name in scheduled or name in preempted:
                del self._counted[name]
                if name not in preempted and request.num_computed_tokens < computed:
                    self.taken_back.append(request)
        for name, request in self._joining.items():
            if name in scheduled:
                self._counted[name] = request, request.num_computed_tokens + scheduled[name]
        self._joining = {}

    def end_step(self, step: int) -> None:
        """The engine has the results of a step: those who joined it, or one before, go on."""
        for name, (joined, request, engine) in [*self._held.items()]:
            if joined <= step:
                del self._held[name]
                engine.resume(request)

    def forget(self, name: str) -> None:
        """A request has ended."""
        self._held.pop(name, None)
        self._joining.pop(name, None)
        self._counted.pop(name, None)


def load_slots(plan: bytes, operations: Collection[OperationId]) -> dict[OperationId, list[int]]:
    """The device blocks, of the first KV group, that these loads of a plan fill."""
    return {
        copy.operation: copy.target_slots[0].tolist()
        for copy in decode_plan(plan).copies
        if copy.operation in operations
    }


def lost_slots(moved: Moved, slots: Sequence[int]) -> set[int]:
    """Those of a load's blocks that it did not load."""
    wrong = range(len(slots)) if moved.failure else [at for at, _ in moved.faults]
    return {slots[position] for position in wrong}


class LayerwiseWorker:
    """A worker's side: the loads that the step of one rank computes on."""

    def __init__(
        self,
        rank: Rank,
        work: Callable[[int], None],
        *,
        layers: Mapping[str, int],
        stream: Callable[[], int],
        beside: Callable[[], int] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        """No loads yet."""
        self._rank = rank
        self._work = work
        self._layers = layers
        self._stream = stream
        self._beside = beside
        self._wait_s = wait_s
        self._step: StepPlan | None = None
        self._deadline = 0.0
        self._slots_of: dict[OperationId, list[int]] = {}
        """Device blocks of the loads that have not ended."""
        self._slots: set[int] = set()
        """Device blocks of all loads of the step."""
        self._invalid: set[int] = set()
        self._left: set[int] | None = None
        """Layers that have not waited yet; `None` where the step waits for all loads at once."""
        self._given_up: set[OperationId] = set()
        self._ended = 0

    @property
    def under_way(self) -> bool:
        """Whether a step has started its loads and not ended."""
        return self._step is not None

    @property
    def has_given_up(self) -> bool:
        """Whether loads that were given up are still to be reported."""
        return bool(self._given_up)

    def has_begun(self, step: StepPlan) -> bool:
        """Whether these are the loads of that step."""
        return self._step is step

    def begin(self, step: StepPlan, *, by_layer: bool) -> None:
        """Starts a step's loads; if layers do not wait, the step's stream waits for all of them."""
        self._step = step
        self._deadline = time.monotonic() + self._wait_s
        wanted = {each for loading in step.joined for each in loading.operations}
        self._invalid = {block for loading in step.joined for block in loading.missing}
        # Earlier users of these blocks were submitted earlier.
        self._rank.steps.submitted(self._stream())
        for plan in step.early:
            self._slots_of |= load_slots(plan, wanted)
            self._rank.take(plan)
        self._slots = {slot for slots in self._slots_of.values() for slot in slots}
        if self._beside is not None:
            self._submit(self._beside)
        self._left = set(self._layers.values()) if by_layer else None
        if not by_layer:
            self._wait_whole()

    def wait_layer(self, name: str) -> None:
        """Waits for what a layer reads; afterwards it is loaded or has failed."""
        if self._left is None:
            return
        number = self._layers.get(name)
        if self._beside is None or number is None:
            self._wait_whole()
        else:
            self._rank.steps.wait_layer(number, self._stream())
        self._left.discard(-1 if number is None else number)

    def moved(self, moved: Moved) -> None:
        """A copy has ended on this rank; blocks that it did not load are invalid."""
        slots = self._slots_of.pop(moved.operation, None)
        if slots is not None:
            self._invalid |= lost_slots(moved, slots)

    def correct(self, moved: Moved) -> Moved:
        """The same report; a load that was given up counts as failed, which a mover cannot know."""
        if moved.operation not in self._given_up:
            return moved
        self._given_up.discard(moved.operation)
        return moved._replace(failure=moved.failure or GIVEN_UP)

    def end(self) -> set[int]:
        """The step was submitted: returns its invalid blocks."""
        self._drive()
        if self._left:
            # Layers that did not wait may have been computed on old data.
            log.error("%d layers of a step did not wait for its loads", len(self._left))
            self._invalid |= self._slots
        for operation, slots in self._slots_of.items():
            self._invalid |= set(slots)
            self._given_up.add(operation)
            self._rank.executor.abandon(operation)
        if self._slots_of:
            log.error("%d loads given up: cause=%s", len(self._slots_of), GIVEN_UP)
            self._slots_of.clear()
            self._work(0)
        if self._step is not None:
            self._ended = self._step.step
        self._step, self._left = None, None
        return self._invalid

    def take_ended(self) -> int:
        """The number of the step that has ended since the last call; 0 if none has."""
        ended, self._ended = self._ended, 0
        return ended

    def _submit(self, beside: Callable[[], int]) -> None:
        """On a GPU: starts every load on the device, so that layers can wait for it there."""
        self._work(STEP_BUDGET_BYTES)
        # In another stream: the step's own stream would wait for all loads.
        while not self._rank.steps.guard(beside(), [*self._slots]) and self._has_time:
            self._wait_device()
            self._work(STEP_BUDGET_BYTES)
        self._rank.steps.join([*self._slots_of])

    def _wait_whole(self) -> None:
        if self._beside is None:
            self._drive()
        else:
            self._rank.steps.guard(self._stream(), [*self._slots])

    def _drive(self) -> None:
        """Drives copies until these loads have ended on this rank, or have timed out."""
        while self._slots_of and self._has_time:
            left = sum(map(len, self._slots_of.values()))
            self._work(left * self._rank.facts.block_bytes)
            if self._slots_of:
                self._wait_device()

    @property
    def _has_time(self) -> bool:
        return time.monotonic() < self._deadline

    def _wait_device(self) -> None:
        try:
            self._rank.wait(self._deadline)
        except UnavailableError as error:
            log.error("loads of a step have failed: cause=%s", error)  # noqa: TRY400
            self._deadline = 0.0
