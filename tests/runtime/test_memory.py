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
from penstock.errors import ConfigError
from penstock.tiers.linux_memory import MEMINFO

if TYPE_CHECKING:
    from penstock.runtime.lease import Lease

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


def test_a_smaller_host_tier_gives_its_memory_back_and_keeps_what_fits() -> None:
    with opened() as cache:
        for prompt in range(4):
            store(cache, prompt * 1000, 16)
        before = resident("RssShmem")

        blocks = cache.resize_tier("host", blocks=16)

        assert blocks == cache.statistics().tiers[1].slots == 16
        assert before - resident("RssShmem") > 40 * MIB
        cache.audit()
        host = cache.statistics().tiers[1]
        assert (host.ready, host.closing, host.blocks_evicted) == (16, 0, 48)


def test_what_stays_is_the_newest_and_is_intact() -> None:
    with opened() as cache:
        for prompt in range(4):
            store(cache, prompt * 1000, 16)

        cache.resize_tier("host", blocks=16)
        cache.sleep()
        cache.wake()

        assert cached_by_tier(cache, 0, 16) == (0, 0)
        assert cached_by_tier(cache, 3000, 16)[1] == 64
        assert cache.statistics().blocks_corrupt == 0


def test_a_tier_can_have_its_size_again() -> None:
    with opened() as cache:
        cache.resize_tier("host", gib=16 * 1.01 / 1024)
        assert cache.statistics().tiers[1].slots == 16
        assert cache.resize_tier("host", blocks=64) == 64

        for prompt in range(4):
            store(cache, prompt * 1000, 16)

        assert cache.statistics().tiers[1].ready == 64
        cache.audit()


def test_a_tier_does_not_grow_into_memory_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened() as cache:
        cache.resize_tier("host", blocks=16)
        monkeypatch.setattr(
            "penstock.runtime.memory.read_text",
            lambda path: "MemAvailable: 1024 kB\n" if path == MEMINFO else "",
        )

        with pytest.raises(ConfigError, match=r"host.gib: needs 48.* MiB, must be at most the 1.0"):
            cache.resize_tier("host", blocks=64)

        assert cache.statistics().tiers[1].slots == 16
        cache.audit()


def test_blocks_in_use_leave_when_they_are_released() -> None:
    with opened() as cache:
        store(cache, 0, 16)
        cache.sleep()
        cache.wake()
        lease = cache.acquire(range(64))
        cache.resize_tier("host", blocks=1)
        assert cache.statistics().tiers[1].closing > 0
        while lease.state.name == "LOADING":
            cache.step()
        assert lease.cached_tokens == 63 // BLOCK * BLOCK or lease.cached_tokens == 64
        lease.release()
        settle(cache)

        assert cache.statistics().tiers[1].closing == 0
        cache.audit()


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("disk", {"blocks": 4}, r"tier: is 'disk', must be one of: 'host'"),
        ("host", {"blocks": 0}, r"host.blocks: is 0, must be from 1 to 64"),
        ("host", {"blocks": 65}, r"host.blocks: is 65, must be from 1 to 64"),
        ("host", {"gib": 1.0}, r"host.gib: is 1.0, must be from 0.00\d+ to 0.06\d+, with which"),
        ("host", {"gib": float("nan")}, r"host.gib: is nan, must be from"),
        ("host", {"gib": "1"}, r"host.gib: is '1', must be from"),
        ("host", {}, r"host: has gib and blocks or none of them, must have one of the two"),
        ("host", {"gib": 0.01, "blocks": 1}, r"host: has gib and blocks or none"),
    ],
)
def test_a_wrong_size_is_refused_and_changes_nothing(
    name: str, size: dict[str, object], message: str
) -> None:
    with opened() as cache:
        with pytest.raises(ConfigError, match=message):
            cache.resize_tier(name, **size)  # type: ignore[arg-type]

        assert cache.statistics().tiers[1].slots == 64


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
    """Prompts, resizes, sleeps and resets in any order: the books stay right, and the bytes."""

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

    @rule(blocks=st.integers(1, 12))
    def resize(self, blocks: int) -> None:
        self.cache.resize_tier("host", blocks=blocks)

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
