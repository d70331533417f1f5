"""One rank at work: carries out a step, and the copies that travel with it.

The forward pass and the copies share the rank's thread. On a CPU a step is computed when
`execute` returns; copies advance after it, by a budget, as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.engine.batch import on_device
from penstock.engine.sampling import sample
from penstock.engine.steps import StepResult
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layers import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.engine.architecture import Architecture
    from penstock.engine.handed_ranks import HandedRank
    from penstock.engine.model import Decoder
    from penstock.engine.sharding import Share
    from penstock.engine.steps import Step


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


class Worker:
    """A rank's model and its blocks."""

    def __init__(self, decoder: Decoder, kv: Sequence[torch.Tensor], *, block_tokens: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._block_tokens = block_tokens
        self.handed: HandedRank | None = None
        """Its part in handoffs, if it has one."""

    def execute(self, step: Step) -> StepResult:
        """Computes a step; the first rank answers with the tokens it chose."""
        batch = on_device(step.spans, block_tokens=self._block_tokens, device=self._decoder.device)
        if self.handed is None:
            logits = self._decoder.forward(batch, self._kv)
        else:
            self.handed.begin(step)
            told = self.handed.layer_computed
            logits = self._decoder.forward(batch, self._kv, after_layer=told)
        if logits is None or not step.draws:
            return StepResult(step.number, [])
        rows: dict[int, int] = {}
        for index, span in enumerate(step.spans):
            if span.wants_output:
                rows[index] = len(rows)
        drawn = logits[torch.tensor([rows[draw.span] for draw in step.draws])]
        return StepResult(step.number, sample(drawn, [draw.wish for draw in step.draws]))
