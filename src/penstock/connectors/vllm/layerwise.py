"""Loads that a step computes on while they arrive: the request joins the step that begins them.

| where        | what                                                                            |
|--------------|---------------------------------------------------------------------------------|
| scheduler    | `Joins`: which requests join, and what of them vLLM's cache must not offer yet  |
| worker       | `Joined`: begin before the forward pass, wait layer by layer in it, end after it |

On a GPU a layer waits on the device for its own blocks, or the whole step for all of them where
vLLM does not come by at every layer. On the CPU, whose own thread copies, the first layer that
needs any brings all.

The one rule: nothing that was computed on a load leaves its step before the load was verified on
every rank. Until then its blocks can be matched by nobody and are not saved; where it fails, its
blocks are told as invalid in the same step, and vLLM drops the token and computes them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock.errors import UnavailableError
from penstock.movers.base import WAIT_S
from penstock.runtime.carrier import DEVICE_SHARE
from penstock.runtime.plans import decode_plan
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.connectors.vllm.messages import Loading, StepPlan
    from penstock.movers.base import Moved
    from penstock.runtime.facts import RankFacts
    from penstock.runtime.rank import Rank
    from penstock.vocabulary.ids import OperationId

    Withhold = Callable[[str, Sequence[int], int], None]

log = logging.getLogger("vllm.penstock")

LOADS_MAX = 8
"""So many loads of a step can be joined: a GPU has no more of them in flight at a time."""
GIVEN_UP = "it had not ended when its step did"


def joined_blocks(ranks: Iterable[RankFacts]) -> int:
    """How many blocks a step may wait for: what a step copies anyway, on the slowest rank.

    A longer hit would stall the requests beside it, and is loaded asynchronously.
    """
    return min(
        STEP_BUDGET_BYTES
        * (DEVICE_SHARE if facts.algorithm == Algorithm.MIX64.value else 1)
        // facts.block_bytes
        for facts in ranks
    )


class Joins:
    """The requests that join the step which is being put together."""

    def __init__(self, withhold: Withhold, *, blocks_max: int) -> None:
        """No request yet.

        Args:
            withhold: Has vLLM's own cache forget blocks of a request, from one of them on. vLLM
                enters a request's blocks there before they hold anything.
            blocks_max: So many blocks may be joined in a step.
        """
        self._withhold = withhold
        self._room = self._blocks_max = blocks_max
        self.starting: list[Loading] = []

    def has_room(self, blocks: int, loads: int) -> bool:
        """Whether so much more can be joined in this step."""
        begun = sum(len(loading.operations) for loading in self.starting)
        return blocks <= self._room and begun + loads <= LOADS_MAX

    def add(self, loading: Loading, row: Sequence[int], *, first: int, blocks: int) -> None:
        """A request joins: its blocks from `first` on hold nothing that anybody may use yet."""
        self._withhold(loading.request, row[first:], first)
        self._room -= blocks
        self.starting.append(loading)

    def take(self) -> tuple[Loading, ...]:
        """Those that join this step; the next one begins."""
        taken, self.starting = tuple(self.starting), []
        self._room = self._blocks_max
        return taken


class Joined:
    """The loads that one rank's step computes on."""

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
        """No loads yet.

        Args:
            rank: What carries them out.
            work: Lets copies get on by so many bytes, and tells `moved` what has ended.
            layers: The number of each of vLLM's layers in the layout.
            stream: The handle of the stream that the step is submitted to; 0 on the CPU.
            beside: That of a stream in which nothing is ever computed; `None` on the CPU.
            wait_s: A load that has not ended after so long has failed.
        """
        self._rank = rank
        self._work = work
        self._layers = layers
        self._stream = stream
        self._beside = beside
        self._wait_s = wait_s
        self._told: StepPlan | None = None
        self._deadline = 0.0
        self._slots_of: dict[OperationId, list[int]] = {}
        """Of the loads that have not ended."""
        self._slots: set[int] = set()
        """Of all of them."""
        self._invalid: set[int] = set()
        self._left: set[int] | None = None
        """Layers that the step has not come to; `None` where it waits for the whole."""
        self._given_up: set[OperationId] = set()

    @property
    def under_way(self) -> bool:
        """Whether a step has begun with its loads and not ended."""
        return self._told is not None

    @property
    def has_given_up(self) -> bool:
        """Whether loads that were given up are still to be reported."""
        return bool(self._given_up)

    def has_begun(self, told: StepPlan) -> bool:
        """Whether these are the loads of that step."""
        return self._told is told

    def begin(self, told: StepPlan, *, by_layer: bool) -> None:
        """Begins a step's loads; without layers to wait at, its stream waits for all of them."""
        self._told = told
        self._deadline = time.monotonic() + self._wait_s
        wanted = {each for loading in told.joined for each in loading.operations}
        self._invalid = {block for loading in told.joined for block in loading.missing}
        # Whatever used these blocks before was submitted before.
        self._rank.steps.submitted(self._stream())
        for plan in told.early:
            for copy in decode_plan(plan).copies:
                if copy.operation in wanted:
                    self._slots_of[copy.operation] = copy.target_slots[0].tolist()
            self._rank.take(plan)
        self._slots = {slot for slots in self._slots_of.values() for slot in slots}
        if self._beside is not None:
            self._submit(self._beside)
        self._left = set(self._layers.values()) if by_layer else None
        if not by_layer:
            self._wait_whole()

    def wait_layer(self, name: str) -> None:
        """The step comes to a layer: what it reads there is there, or has failed."""
        if self._left is None:
            return
        number = self._layers.get(name)
        if self._beside is None or number is None:
            self._wait_whole()
        else:
            self._rank.steps.wait_layer(number, self._stream())
        self._left.discard(-1 if number is None else number)

    def moved(self, moved: Moved) -> None:
        """A copy has ended here; what it did not bring is invalid."""
        slots = self._slots_of.pop(moved.operation, None)
        if slots is not None:
            wrong = range(len(slots)) if moved.failure else [at for at, _ in moved.faults]
            self._invalid |= {slots[position] for position in wrong}

    def judged(self, moved: Moved) -> Moved:
        """The same; what was given up has failed, which a mover does not know."""
        if moved.operation not in self._given_up:
            return moved
        self._given_up.discard(moved.operation)
        return moved._replace(failure=moved.failure or GIVEN_UP)

    def end(self) -> set[int]:
        """The step was submitted: which blocks of it do not hold what they should."""
        self._drive()
        if self._left:
            # Layers that nobody waited at were computed on what happened to lie there.
            log.error("Penstock: %d layers of a step did not wait for its loads", len(self._left))
            self._invalid |= self._slots
        for operation, slots in self._slots_of.items():
            self._invalid |= set(slots)
            self._given_up.add(operation)
            self._rank.carrier.abandon(operation)
        if self._slots_of:
            log.error("Penstock: %d loads given up: cause=%s", len(self._slots_of), GIVEN_UP)
            self._slots_of.clear()
            self._work(0)
        self._told, self._left = None, None
        return self._invalid

    def _submit(self, beside: Callable[[], int]) -> None:
        """On a GPU: has every load begin on the device, so that layers can wait for it there."""
        self._work(STEP_BUDGET_BYTES)
        # Asked in a stream beside: the step's own would have to wait for the whole.
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
        """Lets copies get on until these have ended here, or their time is up."""
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
            log.error("Penstock: loads of a step have failed: cause=%s", error)  # noqa: TRY400
            self._deadline = 0.0
