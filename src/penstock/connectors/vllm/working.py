"""A worker's half: it carries plans out at the end of each step, and tells what failed.

Copies start after the step's forward pass was submitted, in vLLM's own thread, and are asked
about once a step. On a GPU they wait on the device for the steps before them; on the CPU a
step copies a bounded number of bytes. Loads that the step itself computes on start before it
and end with it (`layerwise`).

A step that computes nothing ends, on the CPU, with the first request whose load is complete: that
request is computed next, and the loads behind it go on after its forward pass. Otherwise all of
them would be ready at once and be computed in one step, and the first would wait for the last.

The one rule: every other load that was announced is told as received exactly once, whatever
became of it. vLLM keeps a request's blocks until then, even when the request was aborted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.ledger import Purpose
from penstock.cache.nodes import NOWHERE
from penstock.connectors.vllm.layerwise import Joined
from penstock.movers.base import WAIT_S
from penstock.runtime.plans import decode_plan, decode_report, encode_report
from penstock.runtime.rank import STEP_BUDGET_BYTES
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.connectors.vllm.messages import StepPlan
    from penstock.movers.base import Moved
    from penstock.runtime.facts import RankFacts
    from penstock.runtime.rank import Rank
    from penstock.vocabulary.ids import OperationId


def copied_blocks(ranks: Iterable[RankFacts]) -> int:
    """How many blocks every rank copies within a step, before vLLM hands out blocks again.

    None where a device copies by itself: its copies may end in a later step.
    """
    return min(
        0 if facts.algorithm == Algorithm.MIX64.value else STEP_BUDGET_BYTES // facts.block_bytes
        for facts in ranks
    )


@dataclass(slots=True)
class _Waiting:
    """A request whose blocks are on their way to this rank."""

    operations: set[OperationId]
    invalid: set[int] = field(default_factory=set)
    failed: bool = False


@dataclass(slots=True)
class Received:
    """Requests whose loads have ended here, and what they did not bring."""

    requests: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
    """Device blocks of those requests, where block ids tell which request is meant."""


class Working:
    """The half of the connector that lives in one of vLLM's workers."""

    def __init__(
        self,
        rank: Rank,
        *,
        group_count: int,
        stream: Callable[[], int],
        blocks_stay: bool = True,
        beside: Callable[[], int] | None = None,
        layers: Mapping[str, int] | None = None,
        wait_s: float = WAIT_S,
        copies_itself: bool = True,
    ) -> None:
        """A half for an open rank.

        Args:
            rank: What carries the plans out.
            group_count: How many KV groups there are.
            stream: The handle of the stream that the step was submitted to; 0 on the CPU.
            blocks_stay: Whether a request has all the blocks before any of its blocks.
            beside: That of a stream in which nothing is computed; `None` on the CPU.
            layers: The number of each layer in the layout, where steps wait for layers.
            wait_s: How long a step waits for the loads it computes on.
            copies_itself: Whether the worker's own thread copies, as it does on the CPU.
        """
        self._rank = rank
        self._names_blocks = group_count == 1 and blocks_stay
        self._stream = stream
        self._copies_itself = copies_itself
        self._waiting: dict[str, _Waiting] = {}
        self._request_of: dict[OperationId, str] = {}
        self._slots_of: dict[OperationId, list[int]] = {}
        self._received = Received()
        self._reports: list[bytes] = []
        self._joined = Joined(
            rank, self._work, layers=layers or {}, stream=stream, beside=beside, wait_s=wait_s
        )

    def before_forward(self, told: StepPlan | None, *, by_layer: bool) -> bool:
        """Begins the loads that the step computes on, if any: whether its layers must wait.

        Args:
            told: What the scheduler said of this step.
            by_layer: Whether `wait_layer` will be called before each layer is computed.
        """
        if told is None or not told.joined:
            return False
        self._joined.begin(told, by_layer=by_layer)
        return by_layer

    def wait_layer(self, name: str) -> None:
        """In the forward pass, before a layer is computed: what it needs of loads is there."""
        self._joined.wait_layer(name)

    def after_forward(self, told: StepPlan | None, *, computes: bool = True) -> None:
        """The step was submitted: takes its plan in, if any, and lets the copies get on.

        Args:
            told: What the scheduler said of this step.
            computes: Whether the step has a forward pass; without one it is there for copies.
        """
        if told is not None and told.joined and not self._joined.has_begun(told):
            # Nobody came by before the step: no layer of it has waited, and so it is judged.
            self._joined.begin(told, by_layer=True)
        if self._joined.under_way:
            self._end_joined()
        if told is not None:
            self._begin(told)
        self._work(STEP_BUDGET_BYTES if computes else self._idle_budget_bytes())

    def _idle_budget_bytes(self) -> int:
        """How much a step copies that computes nothing: one request's load, if any waits.

        Loads are copied in the order in which their requests came.
        """
        first = next(iter(self._waiting.values()), None)
        if first is None or not self._copies_itself:
            return STEP_BUDGET_BYTES
        # What the owner has not planned yet cannot be copied, and does not count.
        blocks = sum(len(self._slots_of.get(each, ())) for each in first.operations)
        return min(STEP_BUDGET_BYTES, blocks * self._rank.facts.block_bytes)

    def _work(self, budget_bytes: int) -> None:
        """Lets copies get on; what has ended is noted, and told to the scheduler's half."""
        if not self._rank.busy or (report := self._rank.step(budget_bytes=budget_bytes)) is None:
            return
        told = decode_report(report)
        if self._joined.has_given_up:
            told = told._replace(moved=[self._joined.judged(moved) for moved in told.moved])
            report = encode_report(told)
        self._reports.append(report)
        for moved in told.moved:
            self._moved(moved)

    def _end_joined(self) -> None:
        # These are no requests that vLLM waits for: it learns which blocks to compute, no more.
        self._received.invalid_blocks |= self._joined.end()

    def _begin(self, told: StepPlan) -> None:
        for loading in told.loads:
            waiting = _Waiting(set(loading.operations), set(loading.missing), bool(loading.missing))
            self._waiting[loading.request] = waiting
            self._request_of |= dict.fromkeys(loading.operations, loading.request)
            self._end_if_done(loading.request, waiting)
        if told.plan is not None:
            self._note_slots(told.plan)
            # Copies of this plan follow the step that was just submitted.
            self._rank.steps.submitted(self._stream())
            self._rank.take(told.plan)

    def take_received(self) -> Received:
        """What has ended since the last call."""
        if self._joined.under_way:
            self._end_joined()
        received, self._received = self._received, Received()
        return received

    def take_reports(self) -> list[bytes]:
        """What the scheduler's half must hear, since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        """Nothing touches vLLM's memory after this."""
        self._rank.close()

    def _note_slots(self, plan: bytes) -> None:
        # A plan may bring operations that were announced steps ago: long ones are continued.
        if not self._request_of:
            return
        for copy in decode_plan(plan).copies:
            if copy.purpose is Purpose.LOAD and copy.operation in self._request_of:
                self._slots_of[copy.operation] = copy.target_slots[0].tolist()

    def _moved(self, moved: Moved) -> None:
        self._joined.moved(moved)
        name = self._request_of.pop(moved.operation, None)
        if name is None:
            return
        slots = self._slots_of.pop(moved.operation)
        waiting = self._waiting[name]
        waiting.operations.discard(moved.operation)
        wrong = range(len(slots)) if moved.failure else [position for position, _ in moved.faults]
        waiting.failed |= bool(wrong)
        waiting.invalid |= {slots[position] for position in wrong} - {NOWHERE}
        self._end_if_done(name, waiting)

    def _end_if_done(self, name: str, waiting: _Waiting) -> None:
        if waiting.operations:
            return
        del self._waiting[name]
        self._received.requests.add(name)
        if not waiting.failed:
            return
        if self._names_blocks:
            self._received.invalid_blocks |= waiting.invalid
        else:
            # With several groups a block id does not tell whose block it is. Behind a window
            # that has moved on, a block cannot be computed: what it needs was not kept.
            self._received.failed.add(name)
