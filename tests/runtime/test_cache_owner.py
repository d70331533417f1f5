"""A cache that manages the device blocks of ranks elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import penstock
from penstock.cache.states import LeaseState
from penstock.errors import UnavailableError

CONFIG = penstock.parse_config(
    'version = 1\nmodel.name = "none"\ncache = { block_tokens = 4, blocks = 8, ranks = 2 }\n'
    'tiers = [{ name = "host", kind = "memory", blocks = 64 }]\n'
)
PROMPT = list(range(14))


class Engine:
    """Two ranks whose KV of a token is the token and the rank."""

    def __init__(self) -> None:
        self.kv = [np.zeros((8, 4, 2)) for _ in range(2)]
        self.ranks = [self.open_rank(rank) for rank in range(2)]
        self.cache = penstock.open(CONFIG, ranks=[rank.facts for rank in self.ranks])

    def open_rank(self, rank: int) -> penstock.Rank:
        return penstock.open_rank(CONFIG, rank=rank, kv=self.kv[rank])

    def step(self) -> None:
        self.cache.step()
        plan = self.cache.ranks.take_plan()
        for rank in self.ranks:
            if plan is not None:
                rank.take(plan)
            report = rank.step()
            if report is not None:
                self.cache.ranks.receive(report)

    def settle(self) -> None:
        for _ in range(1000):
            self.step()
            if not self.cache.busy:
                return
        raise AssertionError("copies are still under way after 1000 steps")

    def compute(self, lease: penstock.Lease, tokens: list[int]) -> None:
        for position in range(lease.token_count, len(tokens)):
            slot = lease.block_table[position // 4]
            for rank, kv in enumerate(self.kv):
                kv[slot, position % 4] = (tokens[position], rank)
        lease.commit(tokens[lease.token_count :])

    def check(self, lease: penstock.Lease, tokens: list[int]) -> None:
        for rank, kv in enumerate(self.kv):
            held = kv[lease.block_table].reshape(-1, 2)[: lease.token_count]
            assert held.tolist() == [[token, rank] for token in tokens[: lease.token_count]]

    def turn(self, tokens: list[int]) -> int:
        """A whole request; returns how many tokens it found."""
        with self.cache.acquire(tokens) as lease:
            while lease.state is LeaseState.LOADING:
                self.step()
            found = lease.cached_tokens
            self.check(lease, tokens)
            self.compute(lease, tokens)
        self.settle()
        self.cache.audit()
        return found


def test_a_prefix_comes_back_from_below_on_every_rank() -> None:
    engine = Engine()
    engine.turn(PROMPT)
    engine.turn(list(range(500, 532)))

    found = engine.turn(PROMPT)

    assert found == 12
    assert engine.cache.statistics().tiers[1].tokens_cached == 12


def test_a_lost_rank_takes_leases_with_it_and_requests_wait_for_its_return() -> None:
    engine = Engine()
    engine.turn(PROMPT)
    lease = engine.cache.acquire(PROMPT)

    engine.cache.ranks.lose(1, "killed")
    lost = lease.state
    lease.release()
    with pytest.raises(UnavailableError, match="rank 1"):
        engine.cache.acquire(PROMPT)
    engine.kv[1][:] = 0
    engine.ranks[1] = engine.open_rank(1)
    engine.cache.ranks.rejoin(engine.ranks[1].facts)

    assert lost is LeaseState.LOST
    assert engine.turn(PROMPT) == 0
    assert engine.turn(PROMPT) == 12
    assert engine.cache.health().ok


def test_a_copy_between_forks_is_made_on_every_rank() -> None:
    engine = Engine()
    first = engine.cache.acquire(PROMPT)
    engine.compute(first, PROMPT)
    second = first.fork("second")

    second.grow(15)
    while second.state is LeaseState.LOADING:
        engine.step()
    engine.compute(second, [*PROMPT, 7])
    first.grow(15)
    engine.compute(first, [*PROMPT, 8])

    engine.check(first, [*PROMPT, 8])
    engine.check(second, [*PROMPT, 7])
    first.release()
    second.release()
    engine.settle()
    engine.cache.audit()
