"""A small engine in vLLM's place: its requests and its pool as plain values, the rest for real."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.connectors.base.requests import Pins
from penstock.connectors.base.scheduler import SchedulerConnector
from penstock.connectors.base.statistics import PrefillTimer
from penstock.connectors.base.worker import WorkerConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.connectors.handoff_pair import Engine

TOKENS = 4
NULL = 0
SOON_S = 600.0
DISK = """
cache.load_tokens_min = 1
model.weights_version = "{weights}"
[[tiers]]
name = "host"
kind = "host"
blocks = {host}
[[tiers]]
name = "disk"
kind = "disk"
path = "{path}"
gib = 0.03
write = "write_through"
"""


class Clock:
    """The time, as a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeRequest:
    """The attributes of vLLM's Request that the connector reads."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.all_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


class FakePool:
    """Reference counts, as vLLM's pool keeps them; how many blocks are free is set."""

    def __init__(self, count: int) -> None:
        self.blocks = [FakeBlock(number) for number in range(count)]
        self.free = 0

    def get_num_free_blocks(self) -> int:
        return self.free

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def pinned(self) -> int:
        return sum(block.ref_cnt for block in self.blocks)


class FakeEngine:
    """Scheduler and one worker, in one process, with memory of their own."""

    def __init__(
        self,
        *,
        pool: int = 400,
        host: int = 64,
        groups: int = 1,
        window_groups: Sequence[int] | None = None,
        step_blocks: int = 0,
        announcer: Any = None,
        clock: Any = None,
        counts: Any = None,
        disk: Path | None = None,
        weights: str = "v1",
        record: Path | None = None,
    ) -> None:
        text = f"""
            version = 1
            model.name = "toy"
            cache.block_tokens = {TOKENS}
            cache.groups = {groups}
            """
        if record is not None:
            text += f'serve.record = "{record}"\n'
        if disk is None:
            text += f'tiers = [{{ name = "host", kind = "memory", blocks = {host} }}]'
        else:
            text += DISK.format(host=host, path=disk, weights=weights)
        self.config = penstock.parse_config(text)
        self.kv = np.zeros((groups, pool, TOKENS, 8), dtype=np.float32)
        layout = penstock.Layout.join(
            *(
                penstock.Layout.opaque(
                    layers=[group],
                    block_bytes=TOKENS * 32,
                    block_tokens=TOKENS,
                    block_count=pool,
                    encoding="toy",
                )
                for group in range(groups)
            )
        )
        self.rank = penstock.open_rank(self.config, rank=0, kv=list(self.kv), layout=layout)
        self.offload = penstock.open_offload(self.config, ranks=[self.rank.facts])
        self.pool = FakePool(pool)
        self.tables: dict[str, list[list[int]]] = {}
        self.scheduler = SchedulerConnector(
            self.config,
            self.offload,
            Pins(self.pool),
            null_block=NULL,
            window_groups=range(groups) if window_groups is None else window_groups,
            step_blocks=step_blocks,
            announcer=announcer,
            speed=PrefillTimer(self.offload.computed, clock=clock) if clock else None,
            counts=counts,
        )
        self.worker = WorkerConnector(self.rank, group_count=groups, stream=lambda: 0)
        self.next_block = 1

    def allocate(self, request: FakeRequest, blocks: int, groups: int = 1) -> list[list[int]]:
        rows = self.tables.setdefault(request.request_id, [[] for _ in range(groups)])
        for row in rows:
            row.extend(range(self.next_block, self.next_block + blocks))
            self.next_block += blocks
        return rows

    def compute(self, request: FakeRequest) -> None:
        """Writes what stands for KV: the tokens of each block."""
        for group, row in enumerate(self.tables[request.request_id]):
            for number, block in enumerate(row):
                tokens = request.all_token_ids[number * TOKENS : (number + 1) * TOKENS]
                self.kv[group, block, : len(tokens)] = np.array(tokens)[:, None]

    def step(self, scheduled: dict[str, int] | None = None) -> Any:
        """One step of the engine: plan, forward pass, copies, reports."""
        reported = self.scheduler.plan_step(scheduled or {}, self.tables.__getitem__)
        self.worker.after_forward(reported)
        self.scheduler.apply_reports(self.worker.take_reports())
        return reported

    def run(self, request: FakeRequest) -> None:
        """Prefills a request in one step, and steps until nothing is under way."""
        self.scheduler.find_tokens(request, 0)
        self.allocate(request, -(-request.num_tokens // TOKENS), len(self.kv))
        self.compute(request)
        self.step({request.request_id: request.num_tokens})
        request.num_computed_tokens = request.num_tokens
        while self.scheduler.pending:
            self.step()

    def run_until(self, done: Callable[[], Any]) -> None:
        """Steps as an engine with nothing to compute does."""
        deadline = time.monotonic() + SOON_S
        while not done():
            assert time.monotonic() < deadline, self.offload.health()
            self.offload.wait(time.monotonic() + 0.01)
            self.step()

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def opened() -> Iterator[Callable[..., Engine]]:
    """Opens engines that hand prompts over, and closes them."""
    from tests.connectors.handoff_pair import Engine  # noqa: PLC0415 - needs torch

    engines: list[Engine] = []

    def open_engine(name: str, **how: Any) -> Engine:
        engines.append(Engine(name, **how))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def prefill(opened: Callable[..., Engine]) -> Engine:
    return opened("prefill")


@pytest.fixture
def decode(opened: Callable[..., Engine]) -> Engine:
    return opened("decode")
