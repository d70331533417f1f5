"""A thousand of every kind of damage in the host arena of a cache on a GPU, end to end.

All are found, counted and dropped from their tier; none is served, and the requests compute what
they lack. The arena is damaged as a stray write would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import penstock
from lab.fixtures.arena_damage import DAMAGES
from penstock.movers.cuda.mover import CudaTier
from penstock.tiers.host import HostTier
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind
from tests.damaged_engine import CONFIG, DEVICE_BLOCKS, LAYERS, TOKENS, DamagedEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from lab.fixtures.arena_damage import Damageable

pytestmark = pytest.mark.gpu

ROW_BYTES = 256


class Engine(DamagedEngine):
    """KV on the GPU, opaque blocks of one row a layer, and a cache over it with a host arena."""

    def __init__(self, *, layerwise: bool = False) -> None:
        shape = (DEVICE_BLOCKS, ROW_BYTES)
        self.kv = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        layers = [
            TensorLayer(number=number, planes=[Held.opaque(tensor, "test")])
            for number, tensor in enumerate(self.kv)
        ]
        group = TensorGroup(kind=GroupKind.OPAQUE, layers=layers)
        device = CudaTier(TensorTier.of([group], block_tokens=TOKENS), layerwise=layerwise)
        cache = penstock.open(penstock.parse_config(CONFIG), kv=device)
        (host,) = cache._driver.links.executor.stores[1:]
        assert isinstance(host, HostTier)
        super().__init__(cache, host)

    def read(self, slots: list[int]) -> NDArray[np.uint8]:
        layers = [kv[slots] for kv in self.kv]
        return torch.stack(layers, dim=1).reshape(len(slots), -1).cpu().numpy()

    def write(self, slots: list[int], blocks: NDArray[np.uint8]) -> None:
        content = torch.from_numpy(blocks).view(len(slots), LAYERS, ROW_BYTES).cuda()
        for layer, kv in enumerate(self.kv):
            kv[slots] = content[:, layer]
        self.cache.steps.submitted(torch.cuda.current_stream().cuda_stream, slots)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_thousand_damaged_blocks_are_found_dropped_and_computed_anew(
    damage: Callable[[Damageable], None], *, layerwise: bool
) -> None:
    engine = Engine(layerwise=layerwise)
    damage(engine)

    engine.check_all_found()

    engine.cache.close(1.0)
