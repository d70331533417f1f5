"""Staging is used again in the device's own order: many batches a poll, none over another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import Purpose
from penstock.movers.cuda.buffers import StagingSize
from penstock.movers.cuda.mover import LoadMover, SaveMover
from penstock.testing.mover_suite import keys_of, make_copy
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import Axis, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.movers.cuda.mover import CudaMover
    from penstock.movers.cuda.streams import Stream

pytestmark = pytest.mark.gpu

BLOCKS = 64
BLOCK_BYTES = 4096
IN_BATCH = 4
SIZE = StagingSize(
    batch_bytes=IN_BATCH * BLOCK_BYTES, batch_count=2, turn_bytes=BLOCK_BYTES, queue_batches=8
)
LONG_CYCLES = 100_000_000
"""About 50 ms: much longer than any copy here."""
SLOTS = np.arange(BLOCKS)
KEYS = keys_of(BLOCKS)


class Rig:
    """A KV tensor whose blocks are all different, and pinned slots for all of them."""

    def __init__(self) -> None:
        self.kv = torch.zeros((BLOCKS, 16, 256), dtype=torch.uint8, device="cuda")
        self.kv += torch.arange(1, BLOCKS + 1, device="cuda", dtype=torch.uint8)[:, None, None]
        held = Held.of(PlaneRole.LATENT, self.kv, (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL))
        group = TensorGroup(kind=GroupKind.LATENT, layers=[TensorLayer(number=0, planes=[held])])
        self.tier = TensorTier.of([group], block_tokens=16)
        self.host = PinnedTier(self.tier.layout, BLOCKS)
        self.save = SaveMover(self.tier, self.host, Algorithm.MIX64, size=SIZE)
        self.load = LoadMover(self.host, self.tier, Algorithm.MIX64, size=SIZE)
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        for each in (self.save, self.load, self.host):
            each.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def hold_up(stream: Stream) -> None:
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.number)):
        torch.cuda._sleep(LONG_CYCLES)


def finish(mover: CudaMover) -> list[tuple[object, ...]]:
    faults: list[tuple[object, ...]] = []
    while mover.busy:
        moved, _ = mover.poll(budget_bytes=1 << 30)
        faults += [each.faults for each in moved]
        mover.wait()
    return faults


def test_a_poll_submits_more_than_staging_holds_and_no_more_than_the_queue(rig: Rig) -> None:
    rig.save.submit(make_copy(1, SLOTS, SLOTS, purpose=Purpose.SAVE, keys=KEYS))

    _, spent = rig.save.poll(budget_bytes=1 << 30)
    _, spent_again = rig.save.poll(budget_bytes=IN_BATCH * BLOCK_BYTES)

    assert spent == SIZE.queue_batches * IN_BATCH * BLOCK_BYTES
    assert spent_again <= IN_BATCH * BLOCK_BYTES
    assert rig.save.staging_bytes < 3 * SIZE.batch_count * IN_BATCH * BLOCK_BYTES
    assert finish(rig.save) == [()]
    assert [np.unique(block).tolist() for block in rig.host.packed] == [
        [number] for number in range(1, BLOCKS + 1)
    ]


def test_an_engine_that_only_waits_for_a_load_has_more_than_a_queue_of_it_in_flight(
    rig: Rig,
) -> None:
    rig.load.submit(make_copy(1, SLOTS, SLOTS, purpose=Purpose.LOAD, keys=KEYS))
    hold_up(rig.load._kernels)

    rig.load.poll(budget_bytes=1 << 30)
    beside_steps = rig.load.in_flight
    rig.load.wait_for_room()
    rig.load.poll(budget_bytes=1 << 30)

    assert beside_steps == SIZE.queue_batches
    assert rig.load.in_flight == BLOCKS // IN_BATCH == 2 * SIZE.queue_batches
    finish(rig.load)


def test_a_wait_for_copies_that_take_long_ends_before_them(rig: Rig) -> None:
    """New requests are heard of meanwhile."""
    rig.load.submit(make_copy(1, SLOTS[:4], SLOTS[:4], purpose=Purpose.LOAD, keys=KEYS[:4]))
    for _ in range(40):
        hold_up(rig.load._kernels)
    rig.load.poll(budget_bytes=1 << 30)

    rig.load.wait_for_room()
    moved, _ = rig.load.poll(budget_bytes=1 << 30)

    assert moved == []
    finish(rig.load)


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_is_packed_only_when_the_one_before_has_left_its_berth(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    if not waits:
        next_berth = rig.save._ring.next_berth
        monkeypatch.setattr(
            rig.save._ring, "next_berth", lambda manifest: (next_berth(manifest)[0], None)
        )
    rig.save.submit(make_copy(1, SLOTS, SLOTS, purpose=Purpose.SAVE, keys=KEYS))

    # The first batches stay in staging, while more are packed than it holds.
    hold_up(rig.save._link._streams[1])
    rig.save.poll(budget_bytes=1 << 30)
    rig.save.wait()

    arrived = [np.unique(block).tolist() for block in rig.host.packed[:IN_BATCH]]
    assert (arrived == [[number] for number in range(1, IN_BATCH + 1)]) is waits


def test_what_went_through_staging_many_times_over_comes_back(rig: Rig) -> None:
    order = np.random.default_rng(3).permutation(BLOCKS)
    before = rig.kv.clone()
    rig.save.submit(make_copy(1, SLOTS, order, purpose=Purpose.SAVE, keys=KEYS))
    saved = finish(rig.save)
    rig.kv.zero_()
    torch.cuda.synchronize()

    rig.load.submit(make_copy(2, order, SLOTS, purpose=Purpose.LOAD, keys=KEYS))
    hold_up(rig.load._kernels)
    loaded = finish(rig.load)
    torch.cuda.synchronize()

    assert (saved, loaded) == ([()], [()])
    assert torch.equal(rig.kv, before)


def test_small_copies_of_the_engine_are_not_held_up_by_a_long_queue(rig: Rig) -> None:
    """In turns, others come in between; all that was submitted would take much longer."""
    large = torch.zeros((256, 1 << 20), dtype=torch.uint8, device="cuda")
    held = Held.opaque(large, "bytes")
    group = TensorGroup(kind=GroupKind.OPAQUE, layers=[TensorLayer(number=0, planes=[held])])
    tier = TensorTier.of([group], block_tokens=16)
    host = PinnedTier(tier.layout, 256)
    mover = SaveMover(tier, host, Algorithm.MIX64)
    slots = np.arange(256)
    keys = [number.to_bytes(16, "little") for number in range(256)]
    engine = torch.cuda.Stream()
    here, there = rig.kv[0, 0].contiguous(), torch.empty(256, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()

    mover.submit(make_copy(1, slots, slots, purpose=Purpose.SAVE, keys=keys))
    mover.poll(budget_bytes=1 << 30)
    with torch.cuda.stream(engine):
        there.copy_(here, non_blocking=True)
    engine.synchronize()
    still_going = mover.collect() == []

    assert still_going
    mover.wait()
    mover.close()
    host.close()


@pytest.mark.parametrize(
    ("total_bytes", "batch_bytes", "batches"),
    [(8 << 30, 16 << 20, 64), (80 << 30, 80 << 20, 13), (141 << 30, 128 << 20, 8)],
)
def test_staging_grows_with_the_device_up_to_a_bound(
    total_bytes: int, batch_bytes: int, batches: int
) -> None:
    size = StagingSize.for_device(total_bytes)

    assert (size.batch_bytes, size.queue_batches) == (batch_bytes, batches)


def test_a_queue_that_is_shorter_than_staging_is_refused() -> None:
    with pytest.raises(ValueError, match="queue_batches is 1, must be at least batch_count, 2"):
        StagingSize(batch_count=2, queue_batches=1)
