"""Thousands of requests at random, held against what a dictionary says may be cached.

Prompts share prefixes, requests run side by side in chunks, fork, are preempted and aborted;
bytes below the device are damaged, the cache is reset. Whatever happens: a block is found only
if somebody computed it since the last reset, and the KV that a request reads is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pytest

from penstock.cache.states import LeaseState
from penstock.errors import CapacityError
from tests.runtime.conftest import make_engine

if TYPE_CHECKING:
    from penstock.runtime.cache import Lease
    from tests.runtime.conftest import Engine

RUNNING_MAX = 4
TOKENS_MAX = 48
BLOCK_TOKENS = 4


@dataclass
class Request:
    """A lease, and the tokens that it is to have in the end."""

    lease: Lease
    tokens: list[int]
    tenant: str
    store: bool
    epoch: int


@dataclass
class Workload:
    """Draws what happens next, and remembers what may be cached."""

    engine: Engine
    seed: int
    requests: int
    running: list[Request] = field(default_factory=list)
    started: int = 0
    epoch: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.stored: dict[str, set[tuple[int, ...]]] = {"": set(), "red": set()}
        """For each tenant, every prefix of whole blocks that was published since the reset."""
        self.past: dict[str, list[list[int]]] = {"": [[]], "red": [[]]}

    def live(self) -> None:
        while self.started < self.requests:
            for request in [*self.running]:
                self.advance(request)
            if len(self.running) < RUNNING_MAX:
                self.begin()
            self.suffer()
            budget_blocks = self.random.choice((0, 1, 3, 100))
            budget_bytes = budget_blocks * self.engine.device.layout.block_bytes
            self.engine.cache.step(budget_bytes=budget_bytes)
            if self.started % 20 == 0:
                self.engine.cache.audit()
        for request in [*self.running]:
            self.end(request)

    def begin(self) -> None:
        self.started += 1
        tenant = self.random.choice(("", "", "red"))
        past = self.random.choice(self.past[tenant][-12:])
        cut = self.random.choice((len(past), self.random.randint(0, len(past))))
        tokens = [*past[:cut], *self.draw_tokens(12)][:TOKENS_MAX]
        store = self.random.random() < 0.9
        try:
            lease = self.engine.cache.acquire(
                tokens,
                tenant=tenant,
                store=store,
                reuse=self.random.random() < 0.95,
                load=self.random.random() < 0.9,
                priority=self.random.choice((0, 0, 0, 1, -1)),
            )
        except CapacityError:
            return
        found = tuple(tokens[: lease.cached_tokens])
        assert not found or found in self.stored[tenant]
        assert sum(lease.cached_by_tier) == lease.cached_tokens < len(tokens)
        self.cached_tokens += lease.cached_tokens
        self.running.append(Request(lease, tokens, tenant, store, self.epoch))

    def advance(self, request: Request) -> None:
        """A chunk of a request's life."""
        if request.lease.state is LeaseState.LOST or self.random.random() < 0.03:
            self.end(request)
        elif request.lease.state is LeaseState.READY:
            self.engine.check(request.lease, request.tokens, salt=request.tenant)
            if request.lease.token_count < len(request.tokens):
                self.compute(request)
            else:
                self.go_on(request)

    def compute(self, request: Request) -> None:
        lease = request.lease
        end = min(len(request.tokens), lease.token_count + self.random.randint(1, 14))
        if not self.grow(request, end) or lease.state is not LeaseState.READY:
            return
        chunk = request.tokens[:end]
        self.engine.compute(lease, chunk, salt=request.tenant)
        lease.commit(chunk[lease.token_count :])
        if request.store and request.epoch == self.epoch:
            self.stored[request.tenant] |= {
                tuple(chunk[:whole]) for whole in range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS)
            }

    def go_on(self, request: Request) -> None:
        """All is computed: there may be output, a second branch, or the end."""
        self.past[request.tenant].append(request.tokens)
        choice = self.random.random()
        if choice < 0.4 and len(request.tokens) < TOKENS_MAX:
            request.tokens = [*request.tokens, *self.draw_tokens(5)]
        elif choice < 0.5:
            lease = request.lease.fork(f"fork of {request.lease.id}")
            branch = [*request.tokens, *self.draw_tokens(5)]
            self.running.append(
                Request(lease, branch, request.tenant, request.store, request.epoch)
            )
            request.tokens = [*request.tokens, *self.draw_tokens(5)]
        elif choice < 0.6:
            request.lease.preempt()
            self.running.remove(request)
        else:
            self.end(request)

    def grow(self, request: Request, token_count: int) -> bool:
        try:
            request.lease.grow(token_count)
        except CapacityError:
            self.end(request)
            return False
        return True

    def end(self, request: Request) -> None:
        request.lease.release()
        self.running.remove(request)

    def suffer(self) -> None:
        """Now and then, bytes below the device are damaged, or all is void."""
        if self.random.random() < 0.05:
            slots = self.engine.slots_of(self.random.randint(1, len(self.engine.tiers)))
            slot, place = (self.random.randrange(size) for size in slots.shape)
            slots[slot, place] ^= 1 << self.random.randrange(8)
        if self.random.random() < 0.01:
            self.engine.cache.reset("at random")
            self.epoch += 1
            self.stored = {"": set(), "red": set()}

    def draw_tokens(self, count_max: int) -> list[int]:
        """A few tokens of few kinds, so that different requests write the same."""
        return [self.random.randrange(2) for _ in range(self.random.randint(1, count_max))]


LIVES: dict[str, tuple[int, dict[str, object]]] = {
    "two tiers below": (500, {"blocks": 24, "tiers": {"host": 16, "far": 100}}),
    "one tier below": (500, {"blocks": 30, "tiers": {"host": 60}}),
    "written back": (
        250,
        {
            "blocks": 40,
            "tiers": {"host": 80},
            "write": "write_back",
            "settings": 'eviction = "adaptive"\nlow_watermark = 0.2\nhigh_watermark = 0.4',
        },
    ),
}
"""How many requests, over which tiers."""


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("life", LIVES)
def test_a_long_random_life_reads_every_byte_right_and_loses_no_slot(life: str, times: int) -> None:
    requests, settings = LIVES[life]
    requests *= times
    engine = make_engine(**settings)
    workload = Workload(engine, seed=7, requests=requests)

    workload.live()

    engine.expect_at_rest()
    statistics = engine.cache.statistics()
    assert statistics.requests + statistics.requests_refused >= requests
    assert all(tier.tokens_cached > 0 for tier in statistics.tiers)
    assert statistics.blocks_corrupt > 0
    assert statistics.epoch == workload.epoch > 0
    engine.cache.reset("the end")
    engine.expect_at_rest()
    assert [tier.free for tier in engine.cache.statistics().tiers] == [
        tier.slots for tier in statistics.tiers
    ]
