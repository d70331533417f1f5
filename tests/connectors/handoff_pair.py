"""Two engines in one process whose prompts are handed over: threads, listeners and KV are real."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from penstock.connectors.base.engine import (
    LayerGroup,
    ServedEngine,
    handed_layers,
    handed_tiers,
    tier_of,
)
from penstock.connectors.base.statistics import Counters
from penstock.connectors.handoff.rank import RankSides
from penstock.connectors.handoff.requests import (
    EngineBlocks,
    HandoffRequests,
    HandoffThread,
)
from penstock.connectors.handoff.scheduler import SchedulerHandoffs
from penstock.handoff import HandoffSettings
from penstock.transport.waiting import wait_readable
from penstock.vocabulary.layout import GroupKind
from tests.connectors.conftest import TOKENS, FakePool, FakeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.connectors.base.engine import HandedLayer
    from penstock.connectors.handoff.requests import HandoffStep
    from penstock.tiers.tensors import TensorTier

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, HEADS = 3, 16, 4
NULL = 0
"""The block that stands for those that have left a window."""
WINDOW = 5
"""Tokens that a layer with a window reads: the last block of the prompt, and the one before."""
SOON_S = 600.0
SETTINGS = HandoffSettings()
PROMPT = [100 + number for number in range(10)]
"""Two blocks and a half."""


class Engine:
    """One engine: the requests of its scheduler, the KV of its rank, and both their threads."""

    def __init__(
        self,
        name: str,
        *,
        weights: str = "v1",
        ranks: int = 1,
        by_head: bool = True,
        groups: Sequence[Sequence[int]] = (range(LAYERS),),
        step_tokens: int = 64,
        settings: HandoffSettings = SETTINGS,
        claim_steps: int = 0,
        transport: str = "auto",
    ) -> None:
        """Opens it; KV groups with these layers, of which all but the first have windows."""
        heads = HEADS // ranks
        self._group_of = {layer: at for at, group in enumerate(groups) for layer in group}
        shape = (BLOCKS, heads, TOKENS, 8)
        self.kv = [
            [torch.zeros(shape, dtype=torch.uint8) for _ in range(LAYERS)] for _ in range(ranks)
        ]
        """A tensor for each rank and layer."""
        described = [_described(rank, self.kv, groups, by_head=by_head) for rank in range(ranks)]
        self.ranks = [
            RankSides(name, rank, tiers, layers, settings)
            for rank, (tiers, layers) in enumerate(described)
        ]
        addresses = [rank.addresses for rank in self.ranks]
        self._rank_threads = [
            HandoffThread(f"{name}/{number}", rank) for number, rank in enumerate(self.ranks)
        ]
        handoffs = SchedulerHandoffs(
            name,
            addresses,
            model="toy",
            weights=weights,
            version="test 1",
            step_tokens=step_tokens,
            settings=settings,
            transport=transport,
        )
        self._handoffs = handoffs
        self.address = handoffs.address
        self.pool = FakePool(BLOCKS)
        self.counters = Counters()
        self.requests = HandoffRequests(
            HandoffThread(name, handoffs),
            handoffs,
            self.pool,
            counters=self.counters,
            blocks=_blocks(groups, claim_steps),
            answer={"remote_engine_id": name},
            prefills=True,
            decodes=True,
        )

    def step(
        self,
        scheduled: dict[str, int] | None = None,
        blocks: Sequence[int] = (),
        preempted: Sequence[str] = (),
        more: Sequence[Sequence[int]] = (),
    ) -> HandoffStep | None:
        """A step of the engine, as every worker of it sees it; `more` blocks of other KV groups."""
        tables = [list(blocks), *more]
        step = self.requests.plan_step(scheduled or {}, lambda _: tables, preempted)
        for thread, rank in zip(self._rank_threads, self.ranks, strict=True):
            if step is not None and step.restarted:
                thread.make(rank.restart, step.restarted)
            if step is not None and step.added:
                thread.post(rank.extend, step.added)
            if step is not None and step.computed:
                for layer in range(LAYERS):
                    thread.post(rank.computed, step.computed, layer)
        return step

    def prefill(
        self, request: FakeRequest, blocks: Sequence[int], *more: Sequence[int]
    ) -> dict[str, Any]:
        """Computes a prompt to its end, in one step, and answers it."""
        self.fill(request.all_token_ids, blocks, *more)
        self.requests.expect(request)
        self.step({request.request_id: request.num_tokens}, blocks, more=more)
        return self.answer(request)

    def answer(self, request: FakeRequest) -> dict[str, Any]:
        request.all_token_ids.append(7)
        params = self.requests.finish(request, completed=True)
        assert params is not None
        return params

    def fill(self, tokens: Sequence[int], *tables: Sequence[int]) -> None:
        """What a model would write: something of each token, layer and head."""
        own = HEADS // len(self.kv)
        for rank, layers in enumerate(self.kv):
            for layer, tensor in enumerate(layers):
                blocks = tables[self._group_of[layer]]
                for position, token in enumerate(tokens):
                    block, place = divmod(position, TOKENS)
                    for head in range(own):
                        number = (token + layer + 50 * (rank * own + head)) % 251
                        tensor[blocks[block], head, place] = number

    def claim(self, request: FakeRequest, *tables: Sequence[int], computed: int = 0) -> None:
        """A request is queued and gets blocks for what another engine computes."""
        self.requests.expect(request)
        external = self.requests.find_tokens(request, computed)
        # With a window, the last token is computed here.
        assert external == len(PROMPT) - computed - (len(tables) > 1)
        self.requests.start_claim(request, tables, external)

    def ended(self) -> HandoffStep:
        """Steps until a claim has ended."""
        return until(lambda: step if (step := self.step()) and step.received else None)

    def released(self) -> bool:
        """Steps until no prompt is on offer, and no block pinned."""
        return until(
            lambda: self.step() is None and not self.requests._pins and not self.pool.pinned
        )

    def close(self) -> None:
        self.requests.close()
        for thread in self._rank_threads:
            thread.close()


def _blocks(groups: Sequence[Sequence[int]], claim_steps: int) -> EngineBlocks:
    return EngineBlocks(
        TOKENS,
        lambda tokens: [
            0 if not at else max(0, tokens - WINDOW + 1) // TOKENS for at in range(len(groups))
        ],
        NULL if len(groups) > 1 else None,
        claim_steps,
    )


def _described(
    rank: int, kv: list[list[Any]], groups: Sequence[Sequence[int]], *, by_head: bool
) -> tuple[list[TensorTier], dict[int, HandedLayer]]:
    """The KV of a rank, as the connector of an engine on a CPU describes it."""
    names = [f"layers.{number}" for number in range(LAYERS)]
    served = ServedEngine(
        name="e",
        groups=tuple(
            LayerGroup(
                kind=GroupKind.SLIDING if at else GroupKind.ATTENTION,
                layer_names=tuple(names[layer] for layer in group),
                block_tokens=TOKENS,
                channels=0,
            )
            for at, group in enumerate(groups)
        ),
        block_count=BLOCKS,
        rank_count=len(kv),
        rank=rank,
        kv_heads=HEADS,
    )
    tier = tier_of(served, dict(zip(names, kv[rank], strict=True)), lambda _: "toy blocks")
    heads = dict.fromkeys(range(LAYERS), "toy heads") if by_head else {}
    return handed_tiers(served, tier, heads), handed_layers(tier.layout)


def until(done: Callable[[], Any]) -> Any:
    """Asks until something is there; threads go on meanwhile."""
    deadline = time.monotonic() + SOON_S
    while not (found := done()):
        assert time.monotonic() < deadline, "it did not happen"
        wait_readable(NEVER, time.monotonic() + 0.002)
    return found


NEVER = torch.multiprocessing.Pipe()[0].fileno()


def asked(name: str = "asked", **own: str) -> FakeRequest:
    return FakeRequest(name, PROMPT, kv_transfer_params={"do_remote_decode": True, "penstock": own})


def answered(prefill: Engine, handoff: str) -> FakeRequest:
    own = {"handoff": handoff, "address": prefill.address}
    return FakeRequest(
        "answered", PROMPT, kv_transfer_params={"do_remote_prefill": True, "penstock": own}
    )


def kv_of(engine: Engine, blocks: Sequence[int]) -> list[list[int]]:
    """Of each layer what all ranks together have of a prompt, token after token."""
    found = []
    for layers in zip(*engine.kv, strict=True):
        whole = torch.cat([tensor[list(blocks)] for tensor in layers], dim=1)
        found.append(whole.transpose(1, 2).flatten()[: len(PROMPT) * HEADS * 8].tolist())
    return found


TWO_GROUPS = [[0, 2], [1]]
"""A layer with a window between two without."""


def of_layer(engine: Engine, layer: int, blocks: Sequence[int]) -> list[int]:
    return (
        torch.cat([layers[layer][list(blocks)] for layers in engine.kv], dim=1).flatten().tolist()
    )
