"""Memory that a cache gives back while it is open: resized tiers, and sleep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import penstock
from penstock.tiers.linux_memory import MEMINFO

if TYPE_CHECKING:
    from penstock.runtime.cache import Lease

MIB = 1 << 20
BLOCK = 4
SHAPE = (MIB // 8 // BLOCK, 8)
"""Of a token: a block of four has 1 MiB."""


def config_of(blocks: int = 64, host: int = 64, more: str = "") -> penstock.Config:
    return penstock.parse_config(
        f"""
        version = 1
        model.name = "m"
        cache = {{ block_tokens = {BLOCK}, blocks = {blocks}, load_gate = "off" }}
        [[tiers]]
        name = "host"
        kind = "host"
        blocks = {host}
        huge_pages = "never"
        {more}
        """
    )


def opened(blocks: int = 64, host: int = 64) -> penstock.Cache:
    kv = np.zeros((blocks, BLOCK, *SHAPE), dtype=np.uint8)
    kv[:] = 1
    return penstock.open(config_of(blocks, host), kv=kv)


def store(cache: penstock.Cache, first: int, blocks: int) -> None:
    """Computes a prompt and waits until it is saved."""
    tokens = range(first, first + blocks * BLOCK)
    with cache.acquire(tokens) as lease:
        lease.commit(tokens)
    settle(cache)


def settle(cache: penstock.Cache) -> None:
    cache.step()
    while cache.busy:
        cache.step()


def cached_by_tier(cache: penstock.Cache, first: int, blocks: int) -> tuple[int, ...]:
    """How many tokens of a prompt are found in each tier."""
    with cache.acquire(range(first, first + blocks * BLOCK + 1)) as lease:
        found = lease.cached_by_tier
        while lease.state.name == "LOADING":
            cache.step()
        return tuple(found)


def resident(kind: str = "RssAnon|RssShmem") -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return sum(int(each) << 10 for each in re.findall(rf"(?:{kind}):\s+(\d+)", status))


def test_a_cache_does_not_wake_into_memory_that_is_not_there() -> None:
    with opened() as cache:
        cache.sleep(host=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "penstock.runtime.memory.read_text",
                lambda path: "MemAvailable: 1024 kB\n" if path == MEMINFO else "",
            )
            refusal = r"cannot wake: tier host: needs 64.* MiB, must be at most the 1.0"
            with pytest.raises(penstock.UnavailableError, match=refusal):
                cache.wake()
            assert cache.asleep

        cache.wake()

        assert not cache.asleep
        cache.audit()


def test_sleep_gives_device_memory_back_and_host_memory_if_asked() -> None:
    with opened() as cache:
        store(cache, 0, 48)
        before = resident()

        cache.sleep()

        assert 60 * MIB < before - resident() < 80 * MIB
        assert cache.asleep
        cache.sleep(host=True)
        assert before - resident() > 120 * MIB
        with pytest.raises(penstock.UnavailableError, match="the cache is asleep: call wake first"):
            cache.acquire([1, 2, 3])
        cache.audit()


def test_what_lies_in_host_memory_is_found_after_a_sleep_and_is_intact() -> None:
    with opened() as cache:
        store(cache, 0, 16)
        cache.sleep()
        cache.sleep()
        cache.wake()
        cache.wake()

        assert cached_by_tier(cache, 0, 16) == (0, 64)
        assert cache.statistics().blocks_corrupt == 0
        cache.audit()


def test_a_host_tier_that_slept_is_empty_and_usable() -> None:
    with opened() as cache:
        store(cache, 0, 16)
        cache.sleep(host=True)
        cache.wake()
        assert cached_by_tier(cache, 0, 16) == (0, 0)

        store(cache, 0, 16)
        cache.sleep()
        cache.wake()

        assert cached_by_tier(cache, 0, 16) == (0, 64)
        assert cache.health().ok
        cache.audit()


def test_a_cache_with_open_leases_does_not_sleep() -> None:
    with opened() as cache, cache.acquire([1, 2, 3]):
        with pytest.raises(ValueError, match="1 lease open and 0 copies under way"):
            cache.sleep()
        assert not cache.asleep


class AnyOrder(RuleBasedStateMachine):
    """Prompts, sleeps and resets in any order: the books stay right, and the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = np.zeros((8, BLOCK, 64), dtype=np.uint8)
        self.cache = penstock.open(config_of(8, 12), kv=self.kv)
        self.leases: list[tuple[Lease, int]] = []

    @rule(prompt=st.integers(0, 5), blocks=st.integers(1, 3))
    def ask(self, prompt: int, blocks: int) -> None:
        tokens = range(prompt * 1000, prompt * 1000 + blocks * BLOCK)
        if self.cache.asleep:
            with pytest.raises(penstock.UnavailableError, match="asleep"):
                self.cache.acquire(tokens)
            return
        try:
            lease = self.cache.acquire(tokens)
        except penstock.CapacityError:
            return
        while lease.state.name == "LOADING":
            self.cache.step()
        cached = lease.cached_tokens // BLOCK
        table = lease.block_table.tolist()
        for position, slot in enumerate(table):
            if position < cached:
                assert (self.kv[slot] == prompt * 10 + position + 1).all()
            else:
                self.kv[slot] = prompt * 10 + position + 1
        lease.commit(tokens[lease.token_count :])
        self.leases.append((lease, prompt))

    @precondition(lambda self: self.leases)
    @rule()
    def release(self) -> None:
        self.leases.pop(0)[0].release()

    @rule(host=st.booleans())
    def sleep(self, host: bool) -> None:  # noqa: FBT001 - a strategy
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        settle(self.cache)
        self.cache.sleep(host=host)

    @rule()
    def wake(self) -> None:
        self.cache.wake()

    @rule()
    def reset(self) -> None:
        self.cache.reset("a test")

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.cache.step()

    @invariant()
    def is_sound(self) -> None:
        self.cache.audit()

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        assert self.cache.statistics().blocks_corrupt == 0
        self.cache.close(5.0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
