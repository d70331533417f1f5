"""vLLM's order of calls with a small model, on the CPU and on a GPU, in every physical layout.

register, bind, forward, wait_for_save, results, reports: what vLLM does with a worker in each
step, without vLLM. The model writes the KV of its tokens and reads all of its context, as an
attention layer does; on a GPU its step is also run as a captured graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from penstock.connectors.base.engine import LayerGroup, ServedEngine, tier_of
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.worker import WorkerConnector
from penstock.vocabulary.layout import GroupKind
from tests.connectors.conftest import FakePool, FakeRequest
from tests.connectors.orders import LOGICAL, ORDERS

BLOCKS, HEADS, TOKENS, CHANNELS, LAYERS = 64, 2, 16, 32, 3
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * CHANNELS}
WAYS = [
    *(pytest.param("cpu", order, id=f"cpu-{order}") for order in ORDERS if order[-3:] == "HNC"),
    *(
        pytest.param(device, order, id=f"{device}-{order}", marks=pytest.mark.gpu)
        for device in ("cuda", "captured")
        for order in ORDERS
    ),
]
STEPS_MAX = 200
"""A load that has not ended after so many steps hangs."""


class Model:
    """Layers whose KV is a function of token and position, in vLLM's kind of memory."""

    def __init__(self, way: str, order: str) -> None:
        self.device = "cpu" if way == "cpu" else "cuda"
        whole = torch.zeros([SIZES[axis] for axis in order], device=self.device)
        logical = whole.permute([order.index(axis) for axis in LOGICAL])
        self.kv = {f"model.layers.{layer}.attn": logical[layer] for layer in range(LAYERS)}
        self.block = torch.zeros(1, dtype=torch.long, device=self.device)
        self.token = torch.zeros(TOKENS, device=self.device)
        self.read = torch.zeros(1, device=self.device)
        self.graph: Any = None
        if way == "captured":
            self._step()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()

    def _step(self) -> None:
        """Writes one block's KV in every layer, and reads it back."""
        self.read.zero_()
        for number, tensor in enumerate(self.kv.values(), start=1):
            written = (self.token * number)[None, None, :, None].expand(1, HEADS, TOKENS, 1)
            tensor.index_copy_(
                0, self.block, written.expand(1, HEADS, TOKENS, 2 * CHANNELS).contiguous()
            )
            self.read += tensor[self.block].double().sum().float()

    def forward(self, block: int, tokens: list[int]) -> None:
        self.block.fill_(block)
        self.token.copy_(torch.tensor(tokens, dtype=torch.float32))
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def content(self, block: int) -> torch.Tensor:
        return torch.stack([tensor[block] for tensor in self.kv.values()]).cpu()


class Replay:
    """A scheduler and a worker, called as vLLM calls them."""

    def __init__(self, way: str, order: str, pool: Any) -> None:
        self.model = Model(way, order)
        group = LayerGroup(
            kind=GroupKind.ATTENTION,
            layer_names=tuple(self.model.kv),
            block_tokens=TOKENS,
            channels=CHANNELS,
        )
        engine = ServedEngine(
            name="replay", groups=(group,), block_count=BLOCKS, rank_count=1, kv_heads=HEADS
        )
        config = engine.fit_config(
            penstock.parse_config(
                'version = 1\nmodel.name = "toy"\n'
                '[[tiers]]\nname = "host"\nkind = "host"\nblocks = 32'
            )
        )
        tier = tier_of(engine, self.model.kv, lambda name: f"replayed {name}")
        self.rank = penstock.open_rank(config, rank=0, kv=tier)
        offload = penstock.open_offload(config, ranks=[self.rank.facts])
        self.scheduler = SchedulerConnector(
            config, offload, Pins(pool), null_block=0, window_groups=()
        )
        on_gpu = self.model.device == "cuda"
        self.worker = WorkerConnector(
            self.rank,
            group_count=1,
            stream=(lambda: torch.cuda.current_stream().cuda_stream) if on_gpu else lambda: 0,
        )
        self.tables: dict[str, list[list[int]]] = {}

    def step(self, scheduled: dict[str, int], forward: Any = None) -> Any:
        reported = self.scheduler.plan_step(scheduled, self.tables.__getitem__)
        if forward is not None:
            forward()
        self.worker.after_forward(reported)
        received = self.worker.take_received()
        self.scheduler.apply_reports(self.worker.take_reports())
        return received

    def until(self, done: Any) -> None:
        """Steps with something else to compute, until something holds."""
        for _ in range(STEPS_MAX):
            if done(self.step({}, lambda: self.model.forward(BLOCKS - 1, [1] * TOKENS))):
                return
        raise AssertionError(f"nothing after {STEPS_MAX} steps")


@pytest.mark.parametrize(("way", "order"), WAYS)
def test_what_a_step_computed_comes_back_into_other_blocks(way: str, order: str) -> None:
    replay = Replay(way, order, FakePool(BLOCKS * 20))
    prompt = list(range(100, 100 + 3 * TOKENS + 1))
    first = FakeRequest("first", prompt)
    replay.scheduler.find_tokens(first, 0)
    replay.tables["first"] = [[5, 9, 2, 7]]

    def prefill() -> None:
        for number, block in enumerate([5, 9, 2]):
            replay.model.forward(block, prompt[number * TOKENS : (number + 1) * TOKENS])

    replay.step({"first": len(prompt)}, prefill)
    replay.until(lambda _: not replay.scheduler.pending)
    computed = [replay.model.content(block) for block in (5, 9, 2)]
    again = FakeRequest("again", prompt)
    matched = replay.scheduler.find_tokens(again, 0)
    replay.tables["again"] = [[20, 21, 30, 31]]
    replay.scheduler.start_load(again, replay.tables["again"], matched)
    replay.until(lambda received: received.requests == {"again"})

    assert matched == 3 * TOKENS
    for block, expected in zip((20, 21, 30), computed, strict=True):
        assert torch.equal(replay.model.content(block), expected)
        assert expected.any()
    replay.rank.close()
