"""One rank: loads its part of the model, computes steps, and reports them to the block copies.

    worker = load_rank(spec, …)
    pending = worker.submit(step)       # finished on the CPU; queued on a GPU
    result = pending.result(deadline)   # waits for a GPU; None if it is not ready by then

On a GPU, `submit` returns when the step's kernels are queued. The next step may be submitted before
the tokens of this one were read: they stay on the device.

Two rules. Copies of a block wait for the last step that uses it, so every step is reported, with
its blocks, right after it was submitted. And Triton and CUDA are imported only for a GPU.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from penstock import GroupKind, HeadRange
from penstock.errors import ConfigError, UnavailableError
from penstock.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.toolkit import give_back_private
from penstock_serve.engine.architecture import share_of
from penstock_serve.engine.batch import lay_out
from penstock_serve.engine.checkpoints import (
    RankWeights,
    WeightsNotLoaded,
    find_model,
    load_weights,
)
from penstock_serve.engine.model import Alone, Decoder, Ranks, Together, layer_waits
from penstock_serve.engine.sampling import Named, SampledBatch, scored
from penstock_serve.engine.steps import STEP_S, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from penstock import EngineSteps
    from penstock.config import Config
    from penstock.tensors import StreamMark
    from penstock_serve.engine.architecture import Architecture, Share
    from penstock_serve.engine.batch import Sheet, StepBatch
    from penstock_serve.engine.checkpoints import ModelFiles
    from penstock_serve.engine.cuda.lane import CudaLane
    from penstock_serve.engine.cuda.memory import GpuMemory
    from penstock_serve.engine.model import Attention
    from penstock_serve.engine.peers import Peers
    from penstock_serve.engine.spec import InstanceSpec
    from penstock_serve.engine.steps import Step

    StepLane: TypeAlias = "CpuLane | CudaLane"
    StepMark: TypeAlias = "CpuLane | StreamMark"


def allocate_kv(
    architecture: Architecture,
    share: Share,
    *,
    block_count: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: GpuMemory | None = None,
) -> list[torch.Tensor]:
    """The device blocks of one rank: a tensor a layer, in `memory` if that is given."""
    shape = (2, block_count, block_tokens, len(share.kv_heads), architecture.head_dim)
    layers = range(architecture.layers)
    if memory is not None:
        return [memory.zeros(shape, dtype) for _ in layers]
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]


def kv_tier(
    architecture: Architecture,
    share: Share,
    kv: Sequence[torch.Tensor],
    *,
    block_tokens: int,
    memory: GpuMemory | None = None,
) -> TensorTier:
    """The same blocks as a tier of the cache, with the layer and heads of each tensor."""
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
    return TensorTier.of([group], block_tokens=block_tokens, memory=memory)


DRIVE_S = 100e-6
"""A step that is waited for is looked at this often beside a handoff: a layer of a prompt takes
some milliseconds."""
LAST_PARTS_S = 500e-6
"""How long the result of a step may wait until the parts of its last layer are on their way. The
device packs them in some microseconds; their target cannot go on without them."""


class CpuLane:
    """Where a rank's steps run, one after the other: here they are finished when a call returns."""

    stream = 0
    """The CUDA stream as a number; 0 where there is none."""

    def computing(self) -> AbstractContextManager[object]:
        """A context in which torch calls run in this lane."""
        return nullcontext()

    def send(self, sheet: Sheet) -> StepBatch:
        """Copies a step's input to the device."""
        return sheet.sent(torch.device("cpu"))

    def forward(
        self,
        decoder: Decoder,
        batch: StepBatch,
        kv: Sequence[torch.Tensor],
        gates: EngineSteps | None = None,
    ) -> torch.Tensor | None:
        """The logits of a step that nobody watches; its layers wait for what has joined it."""
        return decoder.forward(batch, kv, before_layer=layer_waits(gates, self.stream))

    def mark(self) -> StepMark:
        """A point behind all calls so far."""
        return self

    def wait(self, seconds: float) -> bool:  # noqa: ARG002
        """Blocks this thread until the point is reached; returns False after `seconds`."""
        return True


@dataclass(eq=False, slots=True)
class Pending:
    """A step under way."""

    number: int
    choice: SampledBatch | None
    mark: StepMark
    scores: Sequence[Named] = ()
    handed: Peers | None = None
    hands_over: bool = False
    """Whether it computes prompts that other instances answer."""

    def result(self, deadline: float) -> StepResult | None:
        """Its result; waits for it until the deadline, on the monotonic clock."""
        if not self._wait(deadline):
            return None
        return StepResult(
            self.number,
            [] if self.choice is None else self.choice.read(),
            scored=[named.read() for named in self.scores],
        )

    def _wait(self, deadline: float) -> bool:
        if self.handed is None:
            return self.mark.wait(deadline - time.monotonic())
        # KV goes out, or comes in, while the device computes.
        while not self.mark.wait(0.0 if time.monotonic() >= deadline else DRIVE_S):
            if time.monotonic() >= deadline:
                return False
            self.handed.drive(DRIVE_S)
        if self.hands_over:
            self.handed.drive(LAST_PARTS_S)
        return True


class Worker:
    """A rank's model and its blocks."""

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[torch.Tensor],
        *,
        block_tokens: int,
        lane: StepLane | None = None,
        memory: GpuMemory | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv = kv
        self._memory = memory
        """That of the weights on a GPU, if it can be given back."""
        self._block_tokens = block_tokens
        self._lane: StepLane = lane or CpuLane()
        self._chosen: torch.Tensor | None = None
        self._last: dict[int, int] = {}
        """The tokens of the last step, and the index of each answer's token."""
        self.steps: EngineSteps | None = None
        """Gets every submitted step, so that copies of its blocks wait for it."""
        self.handed: Peers | None = None
        """Its part in handoffs, if it has one."""

    def execute(self, step: Step) -> StepResult:
        """Computes a step; the first rank returns the sampled tokens.

        Raises `UnavailableError`: the device does not finish it.
        """
        result = self.submit(step).result(time.monotonic() + STEP_S)
        if result is None:
            raise UnavailableError(f"step {step.number} was not computed within {STEP_S:g} s")
        return result

    def submit(self, step: Step) -> Pending:
        """Starts a step, whose result can be waited for later."""
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
        return Pending(step.number, choice, mark, scores, self.handed, bool(step.handed))

    def give_back_weights(self) -> int:
        """Returns the memory of the weights to the system, until `load_weights`.

        Returns how many bytes that were.
        Raises `UnavailableError`: the system does not take it.
        """
        if self._memory is not None:
            return self._memory.give_back()
        if self.decoder.device.type != "cpu":
            raise UnavailableError(
                f"the weights are on {self.decoder.device}, which cannot give memory back"
            )
        return sum(
            give_back_private(tensor.data_ptr(), tensor.nbytes) for tensor in self.decoder.tensors()
        )

    def load_weights(self, path: str, digest: str) -> None:
        """Replaces the weights; no step may be under way.

        Raises `WeightsNotLoaded`: the weights may be mixed now: another load must succeed first.
        """
        if self._memory is not None:
            try:
                self._memory.take_again()
            except UnavailableError as error:
                raise WeightsNotLoaded(str(error)) from error
        with self._lane.computing():
            load_weights(self.decoder, path, digest)
            mark = self._lane.mark()
        if not mark.wait(STEP_S):
            raise WeightsNotLoaded(f"the device did not take them within {STEP_S:g} s")

    def _forward(self, step: Step, batch: StepBatch) -> torch.Tensor | None:
        lane = self._lane
        computed = None if self.handed is None else self.handed.begin(step, lane.stream)
        gates = self.steps if self.steps is not None and self.steps.fills_layers else None
        if gates is not None and step.joins:
            gates.join(step.joins)
        if computed is None:
            return lane.forward(self.decoder, batch, self.kv, gates)
        waits = layer_waits(gates, lane.stream)
        return self.decoder.forward(batch, self.kv, before_layer=waits, after_layer=computed)


def _scores(logits: torch.Tensor, step: Step, sheet: Sheet) -> list[Named]:
    """The requested log-probabilities of prompts."""
    found = []
    for score in step.scores:
        first = sheet.scored[score.span]
        rows = logits[first : first + len(score.targets)]
        found.append(scored(rows, score.targets, logprobs=score.logprobs))
    return found


def device_of(name: str, rank: int) -> torch.device:
    """The device of a rank, which becomes the current one; with `cuda` alone, rank N gets GPU N.

    Raises `UnavailableError`: torch sees no such device.
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    number = rank if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise UnavailableError(
            f"device is {name!r} for rank {rank}: torch sees {torch.cuda.device_count()} GPUs"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def attention_on(device: torch.device) -> Attention | None:
    """The attention kernels of a device; `None`: plain torch."""
    if device.type != "cuda":
        return None
    from penstock_serve.engine.cuda.attention import CudaAttention  # noqa: PLC0415 - needs Triton

    return CudaAttention()


def memory_on(device: torch.device, adopted: Iterable[torch.Tensor] = ()) -> GpuMemory | None:
    """Memory of a GPU that can be given back; `None` on the CPU, and where there is none.

    Tensors of that device that are `adopted` are moved there.
    """
    if device.type != "cuda":
        return None
    from penstock_serve.engine.cuda.memory import GpuMemory, has_virtual_memory  # noqa: PLC0415 - CUDA

    if not has_virtual_memory(device):
        return None
    memory = GpuMemory(device)
    memory.adopt(adopted)
    return memory


def lane_on(device: torch.device, *, graphs: bool) -> StepLane | None:
    """The lane of a GPU; `None` on the CPU. Blocks and weights must be on the device."""
    if device.type != "cuda":
        return None
    from penstock_serve.engine.cuda.lane import CudaLane  # noqa: PLC0415 - needs CUDA

    return CudaLane(device, graphs=graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRank:
    """A rank's model, and its blocks as the cache sees them."""

    worker: Worker
    tier: TensorTier
    config: Config
    architecture: Architecture


def load_rank(
    spec: InstanceSpec,
    *,
    rank: int = 0,
    progress: Callable[[int, int], None] = lambda _layers, _of: None,
) -> LoadedRank:
    """Loads the weights of one rank and allocates its device blocks.

    Raises `ConfigError` or `UnavailableError`.
    """
    config, dtype = spec.config, spec.torch_dtype
    if config.cache.device is None:
        raise ConfigError("cache.blocks", "is 0, must be the blocks that the device has room for")
    model = find_model(spec.model)
    architecture, checkpoint = model.open()
    share, head_dim = share_of(architecture, rank=rank, ranks=spec.ranks), architecture.head_dim
    device = device_of(spec.engine.device, spec.first_gpu + rank)
    weights = RankWeights(checkpoint, share, head_dim=head_dim, dtype=dtype, device=device)
    decoder = Decoder(
        architecture,
        weights,
        _ranks(architecture, share),
        attention=attention_on(device),
        progress=lambda layers: progress(layers, architecture.layers),
    )
    checkpoint.close()
    _require_same_files(spec, model)
    block_tokens, block_count = config.cache.block_tokens, config.cache.device.slot_count
    weights_memory, kv_memory = memory_on(device, decoder.tensors()), memory_on(device)
    kv = allocate_kv(
        architecture,
        share,
        block_count=block_count,
        block_tokens=block_tokens,
        dtype=dtype,
        device=device,
        memory=kv_memory,
    )
    return LoadedRank(
        worker=Worker(
            decoder,
            kv,
            block_tokens=block_tokens,
            lane=lane_on(device, graphs=spec.engine.graphs and spec.ranks == 1),
            memory=weights_memory,
        ),
        tier=kv_tier(architecture, share, kv, block_tokens=block_tokens, memory=kv_memory),
        config=config,
        architecture=architecture,
    )


def _require_same_files(spec: InstanceSpec, model: ModelFiles) -> None:
    """Keys name the version of the weights: KV of other files must not get the same keys."""
    if spec.digest and model.weights_version() != spec.digest:
        raise UnavailableError(
            f"the files of {model.path} have changed since the server started: it would call "
            "other weights by the same name, and has to be started anew"
        )


def _ranks(architecture: Architecture, share: Share) -> Ranks:
    if share.ranks == 1:
        return Alone(share)
    shares = [share_of(architecture, rank=rank, ranks=share.ranks) for rank in range(share.ranks)]
    sizes = [len(each.vocabulary) for each in shares]
    return Together(share, sizes)
