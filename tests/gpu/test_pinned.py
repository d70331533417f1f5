"""A host arena, registered in extents, is as good a place for blocks as any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.cache.operations import Purpose
from penstock.errors import UnavailableError
from penstock.movers.cuda.buffers import RegisteredHost, register
from penstock.movers.cuda.mover import LoadMover, SaveMover
from penstock.testing.mover_suite import keys_of, make_copy
from penstock.tiers.host import HostTier
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import Axis, PlaneRole

pytestmark = pytest.mark.gpu

COUNT = 12


def test_blocks_go_through_a_host_arena_across_its_extents() -> None:
    kv = torch.randint(1, 255, (2 * COUNT, 16, 256), dtype=torch.uint8, device="cuda")
    held = Held.of(PlaneRole.LATENT, kv, (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL))
    layers = [TensorLayer(number=0, planes=[held])]
    tier = TensorTier.of([TensorGroup(kind=GroupKind.LATENT, layers=layers)], block_tokens=16)
    host = HostTier.create(tier.layout, COUNT)
    area = RegisteredHost(host, extent_bytes=5 * host.slot_bytes)
    save = SaveMover(tier, area, Algorithm.MIX64)
    load = LoadMover(area, tier, Algorithm.MIX64)
    slots, others = np.arange(COUNT), np.arange(COUNT, 2 * COUNT)
    torch.cuda.synchronize()

    save.submit(make_copy(1, slots, slots, purpose=Purpose.SAVE, keys=keys_of(COUNT)))
    save.poll(budget_bytes=1 << 30)
    save.wait()
    saved = save.collect()
    load.submit(make_copy(2, slots, others, purpose=Purpose.LOAD, keys=keys_of(COUNT)))
    load.poll(budget_bytes=1 << 30)
    load.wait()
    loaded = load.collect()

    assert area.run_slots == 5
    assert [moved.faults for moved in (*saved, *loaded)] == [(), ()]
    assert torch.equal(kv[:COUNT], kv[COUNT:])
    for each in (save, load, area, host):
        each.close()


def test_memory_that_cannot_be_registered_is_refused_and_what_was_is_undone() -> None:
    memory = np.zeros(1 << 20, dtype=np.uint8)
    start = -(-memory.ctypes.data // 4096) * 4096

    for _ in range(2):
        with pytest.raises(UnavailableError, match="CUDA"):
            register([(start, 8192), (start, 8192)])
