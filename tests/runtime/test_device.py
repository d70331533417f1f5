"""The engine's memory as a tier: arrays, tensors, or a tier that the engine described."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import ConfigError
from penstock.tiers.tensors import PART_FIRST, Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4 }\n'
    'tiers = [{ name = "host", kind = "memory", blocks = 16 }]\n'
)
KEYS = CONFIG.key_chain().extend(range(8))


def round_trip(kv: object) -> None:
    """Saves two blocks and loads them elsewhere."""
    with penstock.open_offload(CONFIG, kv=kv) as offload:  # type: ignore[arg-type]
        offload.save(KEYS, [0, 3], cause="save")
        while offload.busy:
            offload.step()
        offload.load(KEYS, [5, 1], cause="load")
        while offload.busy:
            offload.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_are_saved_and_loaded(dtype: torch.dtype) -> None:
    layers = [torch.rand(8, 4, 3).to(dtype) for _ in range(2)]
    before = [layer.view(torch.uint8).clone() for layer in layers]

    round_trip(layers)

    for layer, saved in zip(layers, before, strict=True):
        assert torch.equal(layer.view(torch.uint8)[[5, 1]], saved[[0, 3]])


def test_one_tensor_is_one_layer() -> None:
    kv = torch.rand(8, 4, 3)
    before = kv.clone()

    round_trip(kv)

    assert torch.equal(kv[[5, 1]], before[[0, 3]])


def test_a_tier_that_the_engine_described_is_taken_as_it_is() -> None:
    kv = torch.rand(2, 8, 4, 2, 3)
    before = kv.clone()
    layer = TensorLayer(number=0, planes=[Held.pair(kv, PART_FIRST)])
    group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(2), layers=[layer])
    tier = TensorTier.of([group], block_tokens=4)

    round_trip(tier)

    assert torch.equal(kv[:, [5, 1]], before[:, [0, 3]])
    with pytest.raises(ValueError, match="layout is given, must be left out"):
        penstock.open_offload(CONFIG, kv=tier, layout=tier.layout)


def test_tensors_and_arrays_do_not_mix() -> None:
    with pytest.raises(ValueError, match="kv has Tensor, ndarray in it, must have NumPy arrays or"):
        penstock.open_offload(CONFIG, kv=[torch.zeros(8, 4), np.zeros((8, 4))])


def test_memory_on_a_device_without_movers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv lies on 'meta', must be on one of arrays"):
        penstock.open_offload(CONFIG, kv=torch.zeros(8, 4, device="meta"))


def test_blocks_of_tensors_are_counted_like_those_of_arrays() -> None:
    managed = penstock.parse_config(
        'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 9 }\n'
    )

    with pytest.raises(ConfigError, match="is 9, must be at most 8, the blocks that kv has"):
        penstock.open(managed, kv=torch.zeros(8, 4))
