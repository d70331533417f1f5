"""What must be waited for before a slot is read or written, and what breaks without the wait.

Every test runs twice: as it is, and with the wait taken out, which has to show. The engine's
steps are long on purpose (`torch.cuda._sleep` keeps a stream busy), two of them in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import Purpose
from penstock.errors import UnavailableError
from penstock.movers.cuda.mover import DuplicateMover, LoadMover, SaveMover
from penstock.movers.cuda.streams import Steps, StreamEvent
from penstock.testing.mover_suite import keys_of, make_copy
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import Axis, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.movers.cuda.mover import CudaMover

pytestmark = pytest.mark.gpu

LONG_CYCLES = 100_000_000
"""About 50 ms: much longer than any copy here."""
SLOTS = 4
OLD, NEW, OTHER = 1, 2, 3


class BlindSteps(Steps):
    """Steps for which nobody waits."""

    def event_of(self, step: int) -> StreamEvent | None:
        """Nothing to wait for."""
        return None if step >= 0 else super().event_of(step)


class Rig:
    """A KV tensor of four blocks, pinned slots, and the engine's stream."""

    def __init__(self) -> None:
        self.kv = torch.full((SLOTS, 16, 64), OLD, dtype=torch.uint8, device="cuda")
        held = Held.of(PlaneRole.LATENT, self.kv, (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL))
        group = TensorGroup(kind=GroupKind.LATENT, layers=[TensorLayer(number=0, planes=[held])])
        self.tier = TensorTier.of([group], block_tokens=16)
        self.host = PinnedTier(self.tier.layout, SLOTS)
        self.engine = torch.cuda.Stream()
        self.movers: list[CudaMover] = []
        torch.cuda.synchronize()

    def step(self, *, write: int | None, steps: Steps, slot: int = 0) -> None:
        """A long step of the engine that ends by writing a slot, or by not touching it."""
        with torch.cuda.stream(self.engine):
            torch.cuda._sleep(LONG_CYCLES)
            if write is not None:
                self.kv[slot].fill_(write)
        steps.submitted(self.engine.cuda_stream)

    def save(self, steps: Steps) -> SaveMover:
        mover = SaveMover(self.tier, self.host, Algorithm.MIX64, steps=steps)
        self.movers.append(mover)
        return mover

    def load(self, steps: Steps) -> LoadMover:
        mover = LoadMover(self.host, self.tier, Algorithm.MIX64, steps=steps)
        self.movers.append(mover)
        return mover

    def put(self, slot: int, value: int) -> None:
        """A good block in a host slot."""
        mover = self.save(Steps(SLOTS))
        kept = self.kv[slot].clone()
        self.kv[slot].fill_(value)
        torch.cuda.synchronize()
        run(mover, Purpose.SAVE, slot, slot)
        self.kv[slot].copy_(kept)
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.synchronize()
        for mover in self.movers:
            mover.close()
        self.host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def start(mover: CudaMover, purpose: Purpose, source: int, target: int) -> None:
    mover.submit(make_copy(1, [source], [target], purpose=purpose, keys=keys_of(1)))
    mover.poll(budget_bytes=1 << 30)


def run(mover: CudaMover, purpose: Purpose, source: int, target: int) -> None:
    start(mover, purpose, source, target)
    mover.wait()
    assert [moved.faults for moved in mover.collect()] == [()]


@pytest.mark.parametrize(("steps", "saved"), [(Steps, NEW), (BlindSteps, OLD)])
def test_a_save_waits_for_the_step_that_writes_the_block(
    rig: Rig, steps: type[Steps], saved: int
) -> None:
    seen = steps(SLOTS)
    mover = rig.save(seen)
    rig.step(write=NEW, steps=seen)
    rig.step(write=None, steps=seen)

    run(mover, Purpose.SAVE, 0, 2)

    assert np.unique(rig.host.packed[2]).tolist() == [saved]


@pytest.mark.parametrize(("steps", "left"), [(Steps, OTHER), (BlindSteps, NEW)])
def test_a_load_waits_for_the_last_step_that_could_touch_the_slot(
    rig: Rig, steps: type[Steps], left: int
) -> None:
    seen = steps(SLOTS)
    rig.put(3, OTHER)
    mover = rig.load(seen)
    rig.step(write=None, steps=seen)
    rig.step(write=NEW, steps=seen)

    run(mover, Purpose.LOAD, 3, 0)
    torch.cuda.synchronize()

    assert torch.unique(rig.kv[0]).tolist() == [left]


@pytest.mark.parametrize(("steps", "copied"), [(Steps, NEW), (BlindSteps, OLD)])
def test_a_duplicate_waits_for_the_step_that_writes_the_block(
    rig: Rig, steps: type[Steps], copied: int
) -> None:
    seen = steps(SLOTS)
    mover = DuplicateMover(rig.tier, rig.tier, Algorithm.MIX64, steps=seen)
    rig.movers.append(mover)
    rig.step(write=NEW, steps=seen)

    run(mover, Purpose.DUPLICATE, 0, 1)

    assert torch.unique(rig.kv[1]).tolist() == [copied]


@pytest.mark.parametrize(("guarded", "saved"), [(True, OLD), (False, NEW)])
def test_a_slot_is_written_again_only_after_its_pack(
    rig: Rig, *, guarded: bool, saved: int
) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG_CYCLES)
    steps.submitted(other.cuda_stream)
    start(mover, Purpose.SAVE, 0, 2)

    covered = mover.guard(rig.engine.cuda_stream, [0]) if guarded else True
    with torch.cuda.stream(rig.engine):
        rig.kv[0].fill_(NEW)
    mover.wait()
    mover.collect()

    assert covered
    assert np.unique(rig.host.packed[2]).tolist() == [saved]


def test_a_copy_that_has_not_begun_cannot_be_waited_for_on_the_device(rig: Rig) -> None:
    mover = rig.save(Steps(SLOTS))
    mover.submit(make_copy(1, [0], [2], purpose=Purpose.SAVE, keys=keys_of(1)))

    assert not mover.guard(rig.engine.cuda_stream, [0, 1])
    assert mover.guard(rig.engine.cuda_stream, [1, 3])


def test_the_cpu_does_not_wait_for_any_of_it(rig: Rig) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    rig.step(write=NEW, steps=steps)
    rig.step(write=None, steps=steps)

    start(mover, Purpose.SAVE, 0, 2)
    guarded = mover.guard(rig.engine.cuda_stream, [0])

    assert guarded
    assert not rig.engine.query()


@pytest.mark.parametrize("seen", [True, False])
def test_a_host_slot_is_reported_once_the_cpu_has_seen_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, seen: bool
) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    rig.step(write=NEW, steps=steps)
    start(mover, Purpose.SAVE, 0, 2)
    if not seen:
        monkeypatch.setattr(mover._calls, "reached", len)

    reported = mover.collect()
    there = np.unique(rig.host.packed[2]).tolist() == [NEW]
    mover.wait()
    reported_later = mover.collect()
    torch.cuda.synchronize()

    assert not there
    assert bool(reported) is not seen
    assert bool(reported_later) is seen
    assert np.unique(rig.host.packed[2]).tolist() == [NEW]


def test_a_wait_for_the_device_ends_at_its_deadline(rig: Rig) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    rig.step(write=NEW, steps=steps)
    start(mover, Purpose.SAVE, 0, 2)

    with pytest.raises(UnavailableError, match=r"1 batches have not ended .* 0\.001 s"):
        mover.wait(0.001)
    mover.wait(10.0)

    assert [moved.faults for moved in mover.collect()] == [()]
    assert np.unique(rig.host.packed[2]).tolist() == [NEW]


def test_short_steps_are_not_polled_one_by_one_while_copies_are_on_their_way(rig: Rig) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    rig.step(write=NEW, steps=steps)
    start(mover, Purpose.SAVE, 0, 2)
    mover.submit(make_copy(2, [1], [3], purpose=Purpose.SAVE, keys=keys_of(1)))
    steps.submitted(rig.engine.cuda_stream, [3])

    mover._rests_until = float("inf")
    rested = mover.poll(budget_bytes=1 << 30)
    mover._rests_until = 0.0
    _, spent = mover.poll(budget_bytes=1 << 30)

    assert rested == ([], 0)
    assert spent == rig.tier.layout.block_bytes


def test_a_slot_that_no_step_touched_is_not_waited_for(rig: Rig) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    with torch.cuda.stream(rig.engine):
        torch.cuda._sleep(LONG_CYCLES)
    steps.submitted(rig.engine.cuda_stream, [0, 1])

    run(mover, Purpose.SAVE, 3, 2)

    assert not rig.engine.query()


def test_more_steps_than_are_kept_are_still_waited_for(rig: Rig) -> None:
    steps = Steps(SLOTS)
    mover = rig.save(steps)
    rig.step(write=NEW, steps=steps)
    mover.submit(make_copy(1, [0], [2], purpose=Purpose.SAVE, keys=keys_of(1)))
    for _ in range(40):
        steps.submitted(rig.engine.cuda_stream, [1])

    mover.poll(budget_bytes=1 << 30)
    mover.wait()
    mover.collect()

    assert np.unique(rig.host.packed[2]).tolist() == [NEW]
