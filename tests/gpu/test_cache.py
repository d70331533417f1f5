"""A cache over KV on a GPU and a host tier, driven as an engine drives it: every byte is checked.

The engine here computes the KV of a token from all tokens up to it, by a kernel at the end of a
long step, and goes on without waiting: two steps are in flight when copies are submitted.
"""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import penstock
from penstock.cache.states import LeaseState
from penstock.movers.cuda.buffers import RegisteredHost
from penstock.movers.cuda.mover import CudaTier
from penstock.tiers.host import HostTier
from penstock.tiers.tensors import Held, TensorGroup, TensorLayer, TensorTier
from penstock.vocabulary.layout import GroupKind, HeadRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.runtime.cache import Lease

pytestmark = pytest.mark.gpu

BLOCKS, TOKENS, HEADS, CHANNELS, LAYERS = 12, 4, 2, 8, 3
STEP_CYCLES = 2_000_000
"""About 1 ms."""
LONG_CYCLES = 100_000_000
DEADLINE_S = 30.0
CONFIG = f"""
version = 1
model.name = "none"
cache = {{ block_tokens = {TOKENS}, blocks = {BLOCKS} }}
tiers = [{{ name = "host", kind = "host", blocks = 200, huge_pages = "never" }}]
"""


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """The KV of a sequence: [layers, K and V, tokens, heads, channels]."""
    past = torch.cumsum(torch.tensor([hash((token, 7)) % 251 for token in tokens]), dim=0)
    lanes = torch.arange(1, LAYERS * 2 * HEADS * CHANNELS + 1)
    wide = (past[:, None] * 31 + lanes[None, :] * 17) % 256
    shaped = wide.view(len(tokens), LAYERS, 2, HEADS, CHANNELS).permute(1, 2, 0, 3, 4)
    return shaped.to(torch.uint8)


def make_kv() -> tuple[list[torch.Tensor], TensorTier]:
    """KV of every layer, K and V in one tensor, and the tier of it."""
    tensors = [
        torch.zeros((2, BLOCKS, TOKENS, HEADS, CHANNELS), dtype=torch.uint8, device="cuda")
        for _ in range(LAYERS)
    ]
    layers = [
        TensorLayer(number=number, planes=[Held.pair(kv)]) for number, kv in enumerate(tensors)
    ]
    group = TensorGroup(kind=GroupKind.ATTENTION, heads=HeadRange.all_of(HEADS), layers=layers)
    return tensors, TensorTier.of([group], block_tokens=TOKENS)


class Engine:
    """KV tensors on the GPU, a cache over them, and a stream for its steps."""

    def __init__(self, *, layerwise: bool = False) -> None:
        self.kv, tier = make_kv()
        config = penstock.parse_config(CONFIG)
        kv: CudaTier | TensorTier = CudaTier(tier, layerwise=True) if layerwise else tier
        self.cache = penstock.open(config, kv=kv)
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    @property
    def host(self) -> HostTier:
        (store,) = self.cache._driver.links.executor.stores[1:]
        assert isinstance(store, HostTier)
        return store

    def wait(self, lease: Lease) -> None:
        self.cache.step()
        deadline = time.monotonic() + DEADLINE_S
        while lease.state is LeaseState.LOADING:
            assert self.cache.wait(deadline)
            self.cache.step()

    def acquire(self, tokens: Sequence[int]) -> Lease:
        """Slots whose saves are under way cannot be reused yet: on a slow machine that takes a
        few waits, and `CapacityError` says "not now"."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return self.cache.acquire(tokens)
            except penstock.CapacityError:
                assert self.cache.busy, "nothing is under way that could make room"
                assert self.cache.wait(deadline)
                self.cache.step()

    def settle(self) -> None:
        self.cache.step()
        deadline = time.monotonic() + DEADLINE_S
        while self.cache.busy:
            assert self.cache.wait(deadline)
            self.cache.step()

    def compute(self, lease: Lease, tokens: Sequence[int], *, cycles: int = STEP_CYCLES) -> None:
        """A step: long, and at its end it writes the KV that is missing. Nobody waits for it."""
        wanted = kv_of(tokens).cuda()
        # It is freed when this function returns, but the step reads it later: without this, the
        # allocator hands the memory out again, and the step writes what lies there by then.
        wanted.record_stream(self.stream)
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            for position in range(lease.token_count, len(tokens)):
                block, row = divmod(position, TOKENS)
                for number, kv in enumerate(self.kv):
                    kv[:, int(lease.block_table[block]), row] = wanted[number, :, position]
        self.cache.steps.submitted(self.stream.cuda_stream, lease.block_table)

    def check(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Every token that the lease says has KV has the right one, when the step comes to it."""
        count = lease.token_count
        wanted = kv_of(tokens[:count]) if count else None
        with torch.cuda.stream(self.stream):
            table = torch.tensor(lease.block_table, dtype=torch.int64, device="cuda")
            for number, kv in enumerate(self.kv):
                held = kv[:, table].reshape(2, -1, HEADS, CHANNELS)[:, :count].cpu()
                assert wanted is None or torch.equal(held, wanted[number])

    def turn(self, tokens: Sequence[int]) -> int:
        with self.acquire(tokens) as lease:
            self.wait(lease)
            found = lease.cached_tokens
            self.check(lease, tokens)
            self.compute(lease, tokens)
            lease.commit(tokens[lease.token_count :])
        self.cache.step()
        return found


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.cache.close(1.0)


@pytest.fixture
def layerwise() -> Iterator[Engine]:
    engine = Engine(layerwise=True)
    yield engine
    engine.cache.close(1.0)


@pytest.mark.parametrize("kind", ["engine", "layerwise"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_found_is_what_was_computed(
    kind: str, seed: int, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    random = Random(seed)
    past: list[list[int]] = [[]]
    found = 0

    for _ in range(60):
        prefix = random.choice(past[-8:])
        tokens = [*prefix[: random.randint(0, len(prefix))], *random.choices(range(50), k=7)][:40]
        found += engine.turn(tokens)
        past.append(tokens)
    engine.settle()
    engine.cache.audit()

    statistics = engine.cache.statistics()
    assert found > 100
    assert statistics.tiers[1].tokens_cached > 0


def test_a_save_that_is_begun_at_once_waits_for_the_step(engine: Engine) -> None:
    tokens = list(range(9))
    with engine.cache.acquire(tokens) as lease:
        engine.compute(lease, tokens, cycles=LONG_CYCLES)
        engine.compute(lease, tokens, cycles=1)
        lease.commit(tokens)
        engine.cache.step()
        in_flight = not engine.stream.query()
    engine.settle()
    for other in range(9):
        engine.turn([*range(100 * other + 100, 100 * other + 109)])

    assert in_flight
    with engine.cache.acquire(tokens) as lease:
        assert lease.cached_by_tier[1] == 8
        engine.wait(lease)
        engine.check(lease, tokens)


def test_a_prompt_finds_room_once_the_saves_that_hold_the_slots_have_ended(engine: Engine) -> None:
    first, second = list(range(44)), list(range(100, 144))
    with engine.acquire(first) as lease:
        engine.compute(lease, first, cycles=LONG_CYCLES)
        lease.commit(first)
    engine.cache.step()

    # The saves of the first prompt wait for its step, and so do their 11 of 12 slots.
    with pytest.raises(penstock.CapacityError):
        engine.cache.acquire(second)
    found = engine.turn(second)

    assert found == 0
    with engine.acquire(first) as lease:
        engine.wait(lease)
        assert lease.cached_tokens == 40
        engine.check(lease, first)


def push_out(engine: Engine, tokens: list[int]) -> None:
    """Leaves the blocks of `tokens` in host memory alone."""
    engine.turn(tokens)
    engine.settle()
    for other in range(9):
        engine.turn([*range(100 * other + 100, 100 * other + 109)])
    engine.settle()


def join(engine: Engine, lease: Lease, seen: list[torch.Tensor]) -> None:
    """A step that computes on blocks while they arrive: it reads them, layer by layer."""
    engine.cache.step()
    engine.cache.steps.join(lease.loads)
    with torch.cuda.stream(engine.stream):
        for number, (kv, copy) in enumerate(zip(engine.kv, seen, strict=True)):
            engine.cache.steps.wait_layer(number, engine.stream.cuda_stream)
            copy.copy_(kv[:, int(lease.block_table[0])])
    engine.cache.steps.submitted(engine.stream.cuda_stream, lease.block_table)


def test_a_request_joins_a_step_while_its_blocks_arrive(layerwise: Engine) -> None:
    tokens = list(range(9))
    push_out(layerwise, tokens)
    seen = [torch.zeros_like(kv[:, 0]) for kv in layerwise.kv]

    lease = layerwise.cache.acquire(tokens)
    loads = lease.loads
    join(layerwise, lease, seen)
    held = lease.state
    layerwise.wait(lease)
    layerwise.stream.synchronize()

    assert loads
    assert held is LeaseState.LOADING
    assert lease.cached_tokens == 8
    wanted = kv_of(tokens)
    for number, each in enumerate(seen):
        assert torch.equal(each.cpu(), wanted[number, :, :TOKENS])
    lease.release()


def test_what_was_computed_on_a_damaged_block_is_rolled_back(layerwise: Engine) -> None:
    tokens = list(range(9))
    push_out(layerwise, tokens)
    # A stray write damages a byte of every block in host memory.
    layerwise.host.arena.bytes[layerwise.host.blocks_offset + 5 :: layerwise.host.slot_bytes] ^= 1
    seen = [torch.zeros_like(kv[:, 0]) for kv in layerwise.kv]

    lease = layerwise.cache.acquire(tokens)
    join(layerwise, lease, seen)
    with pytest.raises(penstock.LeaseError):
        lease.commit(tokens[8:])
    layerwise.wait(lease)

    assert lease.state is LeaseState.READY
    assert lease.cached_tokens == 0
    assert lease.miss.reason is penstock.MissReason.CORRUPT
    layerwise.compute(lease, tokens)
    lease.commit(tokens)
    layerwise.check(lease, tokens)
    lease.release()


def test_loads_are_joined_once_their_rate_is_known(layerwise: Engine) -> None:
    tokens = list(range(9))
    push_out(layerwise, tokens)

    lease = layerwise.cache.acquire(tokens)
    layerwise.cache.step()
    at_first = layerwise.cache.steps.joinable(lease.loads, step_s=1.0)
    layerwise.wait(lease)
    lease.release()
    push_out(layerwise, [*range(50, 59)])
    again = layerwise.cache.acquire([*range(50, 59)])
    with torch.cuda.stream(layerwise.stream):
        torch.cuda._sleep(LONG_CYCLES)
    layerwise.cache.steps.submitted(layerwise.stream.cuda_stream)
    layerwise.cache.step()
    later = layerwise.cache.steps.joinable(again.loads, step_s=1.0)
    layerwise.wait(again)

    assert not at_first
    assert later
    again.release()


def test_host_memory_that_cannot_be_pinned_leaves_an_engine_without_the_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise penstock.UnavailableError("CUDA: no memory can be pinned")

    monkeypatch.setattr(RegisteredHost, "__init__", refuse)
    engine = Engine()

    tokens = list(range(9))
    engine.turn(tokens)
    found = engine.turn(tokens)

    assert found == 8
    assert not engine.cache.health().ok
    assert "no memory can be pinned" in str(engine.cache.health().reasons)
    engine.cache.close(1.0)


def test_the_staging_that_was_taken_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="penstock"):
        engine = Engine()

    told = [record.getMessage() for record in caplog.records]
    assert any("staging taken on the device: for=saves" in line for line in told)
    assert any("host memory registered" in line for line in told)
    engine.cache.close(1.0)


def test_tensors_of_another_device_are_refused() -> None:
    tier = TensorTier.of(
        [
            TensorGroup(
                kind=GroupKind.OPAQUE,
                layers=[TensorLayer(number=0, planes=[Held.opaque(torch.zeros(4, 8), "x")])],
            )
        ],
        block_tokens=TOKENS,
    )

    with pytest.raises(ValueError, match="kv lies on cpu, must be on the current device"):
        CudaTier(tier)


def test_a_rank_on_a_gpu_carries_out_the_plans_of_its_owner() -> None:
    config = penstock.parse_config(CONFIG)
    tensors, tier = make_kv()
    rank = penstock.open_rank(config, rank=0, kv=tier)
    owner = penstock.open(config, ranks=[rank.facts])
    stream = torch.cuda.Stream()
    tokens = list(range(9))
    lease = owner.acquire(tokens)
    table = [int(slot) for slot in lease.block_table]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        for number, kv in enumerate(tensors):
            kv[:, table[:2]] = number + 3
    rank.steps.submitted(stream.cuda_stream, table)
    lease.commit(tokens)
    lease.release()

    deadline = time.monotonic() + DEADLINE_S
    while owner.busy:
        owner.step()
        plan = owner.ranks.take_plan()
        if plan is not None:
            rank.take(plan)
        report = rank.step()
        if report is not None:
            owner.ranks.receive(report)
        assert time.monotonic() < deadline

    assert owner.statistics().tiers[1].ready == 2
    host = rank.executor.stores[1]
    assert isinstance(host, HostTier)
    packed = host.arena.bytes[host.blocks_offset :].reshape(-1, host.slot_bytes)
    block_bytes = tier.layout.block_bytes
    saved = [row for row in packed[:, :block_bytes] if row.any()]
    assert len(saved) == 2
    assert np.unique(np.array(saved)).tolist() == [3, 4, 5]
    owner.close()
    rank.close()
