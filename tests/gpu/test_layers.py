"""Loads layer by layer: a step waits for the layer it needs, and nothing unverified gets out.

The engine's step here is a copy of each layer's block to where the test can see it, so what the
step has computed on is what lies there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lab.fixtures.pinned_tier import PinnedTier
from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.cuda.layers import LayerLoadMover
from penstock.movers.cuda.mover import SaveMover
from penstock.movers.cuda.streams import Steps
from penstock.testing.mover_suite import keys_of, make_copy
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.layout import GroupKind
from penstock.vocabulary.planes import Axis, PlaneRole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.movers.cuda.packer import PackingKernel
    from penstock.movers.cuda.streams import Stream

pytestmark = pytest.mark.gpu

LONG_CYCLES = 100_000_000
"""About 50 ms: much longer than any load here."""
SLOTS, LAYERS = 4, 3
OLD, NEW = 1, 2


def make_late(mover: LayerLoadMover, number: int) -> None:
    """Has the kernel of a layer begin only after a long wait."""
    calls, (part,) = mover._calls, mover._parts[number]
    launch = calls.launch

    def launch_late(
        kernel: PackingKernel, rows: int, blocks: int, arguments: tuple[int, ...], stream: Stream
    ) -> None:
        if arguments[0] == part.address:
            calls.make()
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.number)):
                torch.cuda._sleep(LONG_CYCLES)
        launch(kernel, rows, blocks, arguments, stream)

    vars(calls)["launch"] = launch_late


class Rig:
    """Three layers of four blocks, all OLD; NEW ones in host memory, and a step that reads."""

    def __init__(self) -> None:
        self.kv = [
            torch.full((SLOTS, 16, 64), NEW, dtype=torch.uint8, device="cuda")
            for _ in range(LAYERS)
        ]
        axes = (Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)
        layers = [
            TensorLayer(number=number, planes=[Held.of(PlaneRole.LATENT, kv, axes)])
            for number, kv in enumerate(self.kv)
        ]
        group = TensorGroup(kind=GroupKind.LATENT, layers=layers)
        self.tier = TensorTier.of([group], block_tokens=16)
        self.host = PinnedTier(self.tier.layout, SLOTS)
        self.steps = Steps(SLOTS)
        self.load = LayerLoadMover(self.host, self.tier, Algorithm.MIX64, steps=self.steps)
        self.engine = torch.cuda.Stream()
        self.seen = [torch.zeros(16, 64, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
        self._fill_host()

    def _fill_host(self) -> None:
        torch.cuda.synchronize()
        save = SaveMover(self.tier, self.host, Algorithm.MIX64)
        slots = np.arange(SLOTS)
        save.submit(make_copy(1, slots, slots, purpose=Purpose.SAVE, keys=keys_of(SLOTS)))
        save.poll(budget_bytes=1 << 30)
        save.close()
        for kv in self.kv:
            kv.fill_(OLD)
        torch.cuda.synchronize()

    def begin(self, number: int = 2, slot: int = 0) -> None:
        copy = make_copy(number, [slot], [slot], purpose=Purpose.LOAD, keys=[keys_of(SLOTS)[slot]])
        self.load.submit(copy)
        self.load.poll(budget_bytes=1 << 30)

    def occupy(self, slots: list[int]) -> torch.cuda.Stream:
        """A long step on another stream touches the slots, so that loads into them are late."""
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG_CYCLES)
        self.steps.submitted(other.cuda_stream, slots)
        return other

    def forward(self, *, waits: bool = True) -> None:
        """The step: every layer is read in its turn."""
        for number, (kv, seen) in enumerate(zip(self.kv, self.seen, strict=True)):
            if waits:
                self.load.wait_layer(number, torch.cuda.current_stream().cuda_stream)
            seen.copy_(kv[0])

    @property
    def found(self) -> list[int]:
        torch.cuda.synchronize()
        return [int(seen[0, 0]) for seen in self.seen]

    def close(self) -> None:
        torch.cuda.synchronize()
        self.load.close()
        self.host.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def operation(number: int = 2) -> object:
    return make_copy(number, [0], [0], purpose=Purpose.LOAD, keys=keys_of(1)).operation


@pytest.mark.parametrize(("waits", "found"), [(True, [NEW] * 3), (False, [OLD] * 3)])
def test_each_layer_of_a_step_waits_for_the_load_it_has_joined(
    rig: Rig, *, waits: bool, found: list[int]
) -> None:
    rig.occupy([0])
    rig.begin()

    rig.load.join([operation()])
    with torch.cuda.stream(rig.engine):
        rig.forward(waits=waits)

    assert rig.found == found


def test_a_layer_waits_for_itself_alone(rig: Rig) -> None:
    make_late(rig.load, 2)
    rig.begin()
    rig.load.join([operation()])
    first_two = torch.cuda.Event()

    with torch.cuda.stream(rig.engine):
        for number in range(2):
            rig.load.wait_layer(number, rig.engine.cuda_stream)
            rig.seen[number].copy_(rig.kv[number][0])
        first_two.record()
    first_two.synchronize()
    seen = [int(each[0, 0]) for each in rig.seen[:2]]
    going = rig.load.collect() == []

    assert seen == [NEW, NEW]
    assert going
    assert rig.load.unverified == {operation()}


def test_a_step_does_not_wait_for_a_load_that_it_has_not_joined(rig: Rig) -> None:
    other = rig.occupy([0])
    rig.begin()

    rig.load.join([])
    with torch.cuda.stream(rig.engine):
        rig.forward()
    rig.engine.synchronize()

    assert not other.query()
    assert rig.load.collect() == []


def capture(rig: Rig) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=rig.engine):
        rig.forward()
    return graph


def replay(rig: Rig, graph: torch.cuda.CUDAGraph) -> None:
    with torch.cuda.stream(rig.engine):
        graph.replay()


def test_a_captured_step_waits_for_a_late_load(rig: Rig) -> None:
    graph = capture(rig)
    rig.occupy([0])
    rig.begin()

    rig.load.join([operation()])
    replay(rig, graph)

    assert rig.found == [NEW] * 3


def test_a_captured_step_without_a_load_does_not_wait(rig: Rig) -> None:
    graph = capture(rig)
    other = rig.occupy([0])
    rig.begin()

    rig.load.join([])
    replay(rig, graph)
    rig.engine.synchronize()

    assert not other.query()
    assert [int(seen[0, 0]) for seen in rig.seen] == [OLD] * 3


def test_a_captured_step_waits_anew_at_every_replay(rig: Rig) -> None:
    graph = capture(rig)
    found = []
    for number in (2, 3, 4):
        for kv in rig.kv:
            kv.fill_(OLD)
        torch.cuda.synchronize()
        rig.load.collect()
        rig.occupy([0])
        rig.begin(number)
        rig.load.join([operation(number)])
        replay(rig, graph)
        found.append(rig.found)

    assert found == [[NEW] * 3] * 3


def test_a_captured_step_in_flight_does_not_wait_for_what_the_next_one_joins(rig: Rig) -> None:
    """With two steps in flight: or a load that waits for the first would never begin."""
    graph = capture(rig)
    first_ended = torch.cuda.Event()
    with torch.cuda.stream(rig.engine):
        torch.cuda._sleep(LONG_CYCLES)
    replay(rig, graph)
    first_ended.record(rig.engine)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        for _ in range(5):
            torch.cuda._sleep(LONG_CYCLES)
    rig.steps.submitted(other.cuda_stream, [0])
    rig.begin()

    rig.load.join([operation()])
    first_ended.synchronize()

    assert not other.query()


@pytest.mark.parametrize("damaged_layer", range(LAYERS))
def test_a_step_may_have_read_what_was_damaged_and_is_told_before_anything_leaves_it(
    rig: Rig, damaged_layer: int
) -> None:
    rig.host.packed[0, damaged_layer * 1024 + 7] ^= 4
    rig.begin()
    rig.load.join([operation()])
    with torch.cuda.stream(rig.engine):
        rig.forward()
    rig.engine.synchronize()
    held = rig.load.unverified

    rig.load.wait()
    (moved,) = rig.load.collect()

    assert held == {operation()}
    assert moved.faults == ((0, BlockFault.CORRUPT),)
    assert rig.load.unverified == set()


def test_before_anything_was_measured_no_load_is_joined(rig: Rig) -> None:
    make_late(rig.load, 0)
    rig.begin()

    assert rig.load.bytes_per_s is None
    assert rig.load.predict(operation()) is None
    assert not rig.load.joinable(operation(), step_s=1e9)


def test_a_load_joins_when_its_layers_will_be_there_in_time(rig: Rig) -> None:
    make_late(rig.load, 0)
    rig.begin(2)
    rig.load.wait()
    rig.load.collect()
    rig.begin(3, slot=1)

    arrivals = rig.load.predict(operation(3))

    assert rig.load.bytes_per_s is not None
    assert arrivals is not None
    assert arrivals == sorted(arrivals)
    assert 0.01 < arrivals[-1] < 1
    assert rig.load.joinable(operation(3), step_s=100 * arrivals[-1])
    assert not rig.load.joinable(operation(3), step_s=arrivals[0])


def test_a_load_behind_another_is_expected_after_it(rig: Rig) -> None:
    rig.begin(2)
    rig.load.wait()
    rig.load.collect()
    rig.occupy([1])
    rig.begin(3, slot=1)
    rig.begin(4, slot=2)

    first, second = rig.load.predict(operation(3)), rig.load.predict(operation(4))

    assert first is not None
    assert second is not None
    assert second[0] > first[-1]


def test_what_has_arrived_needs_no_more_time(rig: Rig) -> None:
    rig.begin(2)
    rig.load.wait()
    rig.load.collect()
    rig.begin(3)
    rig.load.wait()

    assert rig.load.predict(operation(3)) == [0.0] * LAYERS
