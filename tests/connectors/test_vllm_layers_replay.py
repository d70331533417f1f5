"""vLLM's order of calls where steps compute on loads: register, start_load, layers, results.

| way        | the step                                       | waits                            |
|------------|------------------------------------------------|----------------------------------|
| `cpu`      | layer by layer                                 | at its first layer, for all      |
| `cuda`     | layer by layer                                 | at each layer, on the device     |
| `captured` | replayed from a graph that no hook is part of  | as a whole, on the device        |

The step reads the blocks that are being loaded, in each layer, and puts aside what it read. On a
GPU the load of the last layer is made late: whoever does not wait reads what lay there before.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import penstock
from penstock.cache.settings import DEVICE, HUB
from penstock.connectors.base.engine import LayerGroup, ServedEngine, layer_numbers, tier_of
from penstock.connectors.base.layerwise import LayerwiseScheduler
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.worker import WorkerConnector
from penstock.runtime.messages import decode_plan
from penstock.vocabulary.layout import GroupKind
from tests.connectors.conftest import FakePool, FakeRequest

BLOCKS, HEADS, TOKENS, CHANNELS, LAYERS = 64, 2, 16, 32, 3
PROMPT = list(range(100, 100 + 3 * TOKENS + 1))
FIRST, AGAIN = [5, 9, 2, 7], [20, 21, 30, 31]
LOADED = AGAIN[:3]
LONG_CYCLES = 100_000_000
"""About 50 ms: much longer than any load here."""
STEPS_MAX = 200
WAIT_S = 600.0
WAYS = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("captured", marks=pytest.mark.gpu),
]


class Replay:
    """A scheduler and a worker with `layerwise`, called as vLLM calls them."""

    def __init__(self, way: str, pool: Any) -> None:
        self.by_layer = way != "captured"
        device = "cpu" if way == "cpu" else "cuda"
        shape = (BLOCKS, HEADS, TOKENS, 2 * CHANNELS)
        self.kv = {
            f"model.layers.{layer}.attn": torch.zeros(shape, device=device)
            for layer in range(LAYERS)
        }
        self.rows = torch.tensor(LOADED, device=device)
        self.seen = torch.zeros((LAYERS, len(LOADED), *shape[1:]), device=device)
        group = LayerGroup(
            kind=GroupKind.ATTENTION,
            layer_names=tuple(self.kv),
            block_tokens=TOKENS,
            channels=CHANNELS,
        )
        engine = ServedEngine(
            name="replay", groups=(group,), block_count=BLOCKS, rank_count=1, kv_heads=HEADS
        )
        toml = (
            'version = 1\nmodel.name = "toy"\n[[tiers]]\nname = "host"\nkind = "host"\nblocks = 32'
        )
        config = engine.fit_config(penstock.parse_config(toml), layerwise=True)
        tier = tier_of(engine, self.kv, lambda name: f"replayed {name}")
        self.rank = penstock.open_rank(config, rank=0, kv=tier)
        offload = penstock.open_offload(config, ranks=[self.rank.facts])
        self.scheduler = SchedulerConnector(
            config,
            offload,
            Pins(pool),
            null_block=0,
            window_groups=(),
            joins=LayerwiseScheduler(lambda *_: None, blocks_max=BLOCKS),
        )
        beside = torch.cuda.Stream() if device == "cuda" else None
        self.worker = WorkerConnector(
            self.rank,
            group_count=1,
            stream=lambda: 0 if beside is None else torch.cuda.current_stream().cuda_stream,
            beside=None if beside is None else lambda: beside.cuda_stream,
            layers=layer_numbers(engine, self.kv),
        )
        self.tables = {"first": [FIRST], "again": [AGAIN]}
        self.graph: Any = None
        # Kernels are brought to a GPU at their first use, which may wait for what is under way.
        self.read(waits=False)
        if way == "captured":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.read(waits=False)

    def read(self, *, waits: bool) -> None:
        """What attention does with its context, a layer after the other."""
        for number, (name, tensor) in enumerate(self.kv.items()):
            if waits:
                self.worker.wait_layer(name)
            self.seen[number].copy_(tensor[self.rows])

    def keep(self, request: Any) -> torch.Tensor:
        """A prompt is computed and saved; what its blocks hold."""
        self.scheduler.find_tokens(request, 0)
        for layer, tensor in enumerate(self.kv.values(), start=1):
            for number, block in enumerate(FIRST[:3]):
                tokens = torch.tensor(PROMPT[number * TOKENS : (number + 1) * TOKENS])
                tensor[block] = (tokens * layer)[None, :, None].to(tensor)
        self.finish(self.scheduler.plan_step({"first": len(PROMPT)}, self.tables.__getitem__))
        for _ in range(STEPS_MAX):
            if not self.scheduler.pending:
                break
            if self.rank.busy:
                self.rank.wait(time.monotonic() + WAIT_S)
            self.finish(self.scheduler.plan_step({}, self.tables.__getitem__))
        return torch.stack([tensor[FIRST[:3]] for tensor in self.kv.values()]).cpu()

    def join(self, request: Any) -> Any:
        """vLLM schedules a request whose prefix lies below: its message to the worker."""
        matched = self.scheduler.find_tokens(request, 0)
        assert self.scheduler.can_join(request, matched)
        self.scheduler.start_load(request, [AGAIN], matched)
        return self.scheduler.plan_step({"again": 1}, self.tables.__getitem__)

    def forward(self, reported: Any, *, waits: bool = True) -> Any:
        self.worker.before_forward(reported, by_layer=self.by_layer)
        if self.graph is None:
            self.read(waits=waits)
        else:
            self.graph.replay()
        return self.finish(reported)

    def finish(self, reported: Any) -> Any:
        self.worker.after_forward(reported)
        received = self.worker.take_received()
        self.scheduler.apply_reports(self.worker.take_reports())
        return received

    def make_late(self) -> None:
        """On a GPU: has the load of the last layer begin only after a long wait."""
        mover: Any = self.rank.executor.movers[HUB, DEVICE]
        if self.rows.device.type == "cpu":
            return
        calls, (part, *_) = mover._calls, mover._parts[-1]
        launch = calls.launch

        def launch_late(kernel: Any, rows: int, blocks: int, given: Any, stream: Any) -> None:
            if given[0] == part.address:
                calls.make()
                with torch.cuda.stream(torch.cuda.ExternalStream(stream.number)):
                    torch.cuda._sleep(LONG_CYCLES)
            launch(kernel, rows, blocks, given, stream)

        vars(calls)["launch"] = launch_late

    def damage(self, reported: Any) -> None:
        """Flips a bit, in host memory, of the second block that is about to be loaded."""
        (copy, *_) = decode_plan(reported.early[0]).copies
        slot = int(copy.source_slots[1])
        blocks = self.rank.executor.stores[HUB].blocks([slot])  # type: ignore[union-attr]
        (buffer,) = blocks.buffers.values()
        plane = blocks.layout.groups[0].layers[0].planes[0]
        buffer[plane.offset + slot * plane.block_stride + 5] ^= 1


@pytest.fixture(params=WAYS)
def replay(request: pytest.FixtureRequest) -> Any:
    replay = Replay(request.param, FakePool(BLOCKS * 20))
    yield replay
    replay.rank.close()


def test_a_step_reads_what_its_loads_bring(replay: Replay) -> None:
    computed = replay.keep(FakeRequest("first", PROMPT))
    reported = replay.join(FakeRequest("again", PROMPT))
    replay.make_late()

    received = replay.forward(reported)

    assert torch.equal(replay.seen.cpu(), computed)
    assert computed.any()
    assert not received.invalid_blocks
    assert not replay.scheduler.pending


@pytest.mark.parametrize("replay", WAYS[:2], indirect=True)
def test_a_step_that_does_not_wait_counts_for_nothing(replay: Replay) -> None:
    """The control: what it reads is not there. A captured step has waited before it is replayed."""
    computed = replay.keep(FakeRequest("first", PROMPT))
    reported = replay.join(FakeRequest("again", PROMPT))
    replay.make_late()

    received = replay.forward(reported, waits=False)

    assert not torch.equal(replay.seen.cpu(), computed)
    assert received.invalid_blocks == set(LOADED)


def test_a_damaged_block_is_reported_with_the_step_that_read_it(replay: Replay) -> None:
    replay.keep(FakeRequest("first", PROMPT))
    reported = replay.join(FakeRequest("again", PROMPT))
    replay.damage(reported)

    received = replay.forward(reported)

    assert received.invalid_blocks == {LOADED[1]}
    assert not received.requests
