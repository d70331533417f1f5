"""One rank at work: carries out a step, and tells the copies of its blocks about it.

    pending = worker.submit(step)       # computed on the CPU; under way on a GPU
    result = pending.result(deadline)   # waits for a GPU; None if it is not there by then

On a GPU, `submit` returns when the step's work is in the GPU's queue. The next step may be
submitted before anybody has read what this one chose: its tokens stay on the device for it.

The one rule: copies of a block wait for the last step that touches it, so every step is told,
with its blocks, right after it was submitted.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.engine.batch import lay_out
from penstock.engine.sampling import Named, SampledBatch, scored
from penstock.engine.steps import STEP_S, StepResult
from penstock.errors import UnavailableError
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layers import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from penstock.engine.architecture import Architecture
    from penstock.engine.batch import Sheet, StepBatch
    from penstock.engine.handoffs import RankHandoffs
    from penstock.engine.model import Decoder
    from penstock.engine.sharding import Share
    from penstock.engine.steps import Step
    from penstock.runtime.engine_steps import EngineSteps


def allocate_kv(
    architecture: Architecture,
    share: Share,
    *,
    block_count: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The device blocks of one rank: a tensor a layer."""
    shape = (2, block_count, block_tokens, len(share.kv_heads), architecture.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(architecture.layers)]


def kv_tier(
    architecture: Architecture, share: Share, kv: Sequence[torch.Tensor], *, block_tokens: int
) -> TensorTier:
    """The same blocks as the cache sees them: which layer and which heads lie where."""
    heads = HeadRange(
        first=share.kv_heads.start, count=len(share.kv_heads), total=architecture.kv_heads
    )
    group = TensorGroup(
        kind=GroupKind.ATTENTION,
        heads=heads,
        layers=[
            TensorLayer(number=number, planes=[Held.pair(tensor)])
            for number, tensor in enumerate(kv)
        ],
    )
    return TensorTier.of([group], block_tokens=block_tokens)


class StepLane(Protocol):
    """Where a rank's steps run, one after the other."""

    stream: int
    """The CUDA stream as a number; 0 where there is none."""

    def computing(self) -> AbstractContextManager[object]:
        """What is called inside runs there."""
        ...

    def send(self, sheet: Sheet) -> StepBatch:
        """A step's input on the device, for what is called next."""
        ...

    def forward(
        self, decoder: Decoder, batch: StepBatch, kv: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The logits of a step that nobody watches."""
        ...

    def mark(self) -> StepMark:
        """A point behind all that was called so far."""
        ...


class StepMark(Protocol):
    """A point in a lane's work."""

    def wait(self, seconds: float) -> bool:
        """Blocks this thread until the lane has got there; returns False if it takes too long."""
        ...


class Here:
    """The CPU: what was called is done."""

    stream = 0

    def computing(self) -> AbstractContextManager[object]:
        """Nothing has to be arranged."""
        return nullcontext()

    def send(self, sheet: Sheet) -> StepBatch:
        """A step's input."""
        return sheet.sent(torch.device("cpu"))

    def forward(
        self, decoder: Decoder, batch: StepBatch, kv: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """The logits of a step that nobody watches."""
        return decoder.forward(batch, kv)

    def mark(self) -> StepMark:
        """The point is reached."""
        return self

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        """There is nothing to wait for."""
        return True


class Pending:
    """A step under way."""

    def __init__(
        self, number: int, choice: SampledBatch | None, mark: StepMark, scores: Sequence[Named] = ()
    ) -> None:
        self.number = number
        self._choice = choice
        self._mark = mark
        self._scores = scores

    def result(self, deadline: float) -> StepResult | None:
        """What came of it; waits for it until the deadline, on the monotonic clock."""
        if not self._mark.wait(deadline - time.monotonic()):
            return None
        return StepResult(
            self.number,
            [] if self._choice is None else self._choice.read(),
            scored=[named.read() for named in self._scores],
        )


class Worker:
    """A rank's model and its blocks."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[torch.Tensor],
        *,
        block_tokens: int,
        lane: StepLane | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self._block_tokens = block_tokens
        self._lane: StepLane = lane or Here()
        self._chosen: torch.Tensor | None = None
        self._last: dict[int, int] = {}
        """What the last step chose, and which of it for which answer."""
        self.steps: EngineSteps | None = None
        """Who must know of steps: the copies of its blocks, once there are any."""
        self.handed: RankHandoffs | None = None
        """Its part in handoffs, if it has one."""

    def execute(self, step: Step) -> StepResult:
        """Computes a step; the first rank answers with the tokens it chose.

        Raises:
            UnavailableError: the device does not end it.
        """
        result = self.submit(step).result(time.monotonic() + STEP_S)
        if result is None:
            raise UnavailableError(f"step {step.number} was not computed within {STEP_S:g} s")
        return result

    def submit(self, step: Step) -> Pending:
        """Has a step computed; what it comes to can be asked for later."""
        sheet = lay_out(
            step.spans,
            block_tokens=self._block_tokens,
            draws=[draw.span for draw in step.draws],
            last=self._last,
            scored={score.span for score in step.scores},
        )
        lane = self._lane
        with lane.computing():
            batch = lane.send(sheet)
            batch.fill(self._chosen)
            logits = self._forward(step, batch)
            choice = None
            if logits is not None and step.draws:
                choice = SampledBatch(logits[batch.drawn], [draw.sampling for draw in step.draws])
            scores = [] if logits is None else _scores(logits, step, sheet)
            mark = lane.mark()
        if self.steps is not None:
            self.steps.submitted(lane.stream, sheet.slots())
        self._chosen = None if choice is None else choice.tokens
        self._last = {draw.answer: number for number, draw in enumerate(step.draws)}
        return Pending(step.number, choice, mark, scores)

    def _forward(self, step: Step, batch: StepBatch) -> torch.Tensor | None:
        if self.handed is None:
            return self._lane.forward(self.decoder, batch, self.kv)
        self.handed.begin(step)
        told = self.handed.layer_computed
        return self.decoder.forward(batch, self.kv, after_layer=told)


def _scores(logits: torch.Tensor, step: Step, sheet: Sheet) -> list[Named]:
    """The log-probabilities of prompts that are wanted."""
    found = []
    for score in step.scores:
        first = sheet.scored[score.span]
        rows = logits[first : first + len(score.targets)]
        found.append(scored(rows, score.targets, logprobs=score.logprobs))
    return found
