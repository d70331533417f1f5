"""The handoff on a CUDA device: progress by events, parts through pinned staging."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from penstock.bench.handoff_cuda import LAYERS, CudaPair
from penstock.handoff.names import Life, WriteId
from penstock.runtime.handoff.moving import PartGather
from penstock.runtime.handoff.parts import RouteParts
from penstock.runtime.handoff.progress import LayerEvents
from penstock.runtime.handoff.tensors import TensorReader, TorchEvent
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.tensors import TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.dtypes import DType
from penstock.vocabulary.form import Form
from penstock.vocabulary.layers import HeadRange
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.reshard import plan_reshard

pytestmark = pytest.mark.gpu


def test_a_part_is_packed_on_the_device_as_on_the_cpu() -> None:
    layout = Layout.split(
        layers=range(2),
        heads=HeadRange.all_of(4),
        channels=64,
        dtype=DType.BF16,
        block_tokens=16,
        block_count=32,
    )
    sizes = layout.buffer_bytes
    chance = np.random.default_rng(1)
    arrays = [chance.integers(0, 256, sizes[at], dtype=np.uint8) for at in sorted(sizes)]
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    tier = TensorTier(layout, [each.untyped_storage() for each in tensors])
    form = Form(layout=layout)
    plan = plan_reshard([form], [form])
    parts = RouteParts(plan, plan.routes[0], form, form)
    part = parts.form_of(0, 1)
    slots, keys = [5, 1, 30, 31], [b"a", b"b", b"c", b"d"]
    berth, plain = (np.zeros(4 * part.block_bytes, dtype=np.uint8) for _ in range(2))
    reader = TensorReader(tier, Algorithm.XXH3, part_bytes=len(berth))
    write = WriteId(Life("target", 1), 1, 0, "a", 1, 0, 0)

    reader.read(write, part, slots, keys, berth)
    torch.cuda.synchronize()
    ((ended, sums),) = reader.ended()

    assert ended == write
    assert sums == PartGather(part, ArrayTier(layout, arrays), Algorithm.XXH3).gather(
        slots, keys, plain
    )
    assert bytes(berth) == bytes(plain)


def test_an_event_is_told_after_its_layer_and_not_before() -> None:
    events = LayerEvents(TorchEvent)
    side = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()

    events.begin({"a": 16}, range(1))
    for _ in range(20):
        side = torch.mm(side, side)
    events.layer_submitted(0, torch.cuda.current_stream())
    early = events.poll()
    found = events.drive(time.monotonic() + 30)

    assert early == []
    assert [(each.layer, each.tokens) for each in found] == [(0, 16)]


def test_a_prompt_goes_from_one_pool_to_the_other_while_it_is_computed() -> None:
    pair = CudaPair()

    _, exposed_s = pair.run(by_layers=True)
    pair.run(by_layers=False)

    assert exposed_s > 0
    assert pair.target.machine.counts["parts taken"] >= 2 * LAYERS
    assert "parts spoiled" not in pair.target.machine.counts
