"""An engine whose host arena somebody damages: what is cached is checked, the rest is computed.

A prompt is a few blocks and a token; which of its blocks are damaged is left to chance.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

import penstock
from penstock.machine.kv_events import BlocksRemoved
from penstock.testing.tier_suite import read_slots, write_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.runtime.cache import Cache, Lease
    from penstock.tiers.host import HostTier

DAMAGED = 1000
PROMPTS, BLOCKS = 250, 8
COUNT = PROMPTS * BLOCKS
AT_ONCE = 25
"""Requests that run at the same time; the device has room for no more."""
DEVICE_BLOCKS = AT_ONCE * (BLOCKS + 1)
HOST_BLOCKS = COUNT + 2 * DEVICE_BLOCKS
LAYERS, TOKENS = 4, 4
DEADLINE_S = 30.0

CONFIG = f"""
version = 1
model.name = "none"
cache = {{ block_tokens = {TOKENS}, blocks = {DEVICE_BLOCKS} }}
tiers = [{{ name = "host", kind = "host", blocks = {HOST_BLOCKS}, huge_pages = "never" }}]
"""


class DamagedEngine:
    """A cache, and its arena for whoever does the damage; a subclass has the device's blocks."""

    def __init__(self, cache: Cache, host: HostTier) -> None:
        self.cache, self.host = cache, host
        self.random = np.random.default_rng(3)
        self.layer_count = LAYERS
        self.contents = self._draw()
        self.older = self.host_bytes(), self.host_sums()

    def read(self, slots: list[int]) -> NDArray[np.uint8]:
        """The bytes of these device blocks."""
        raise NotImplementedError

    def write(self, slots: list[int], blocks: NDArray[np.uint8]) -> None:
        """Computes these device blocks."""
        raise NotImplementedError

    def fill(self) -> None:
        """Computes every prompt; in the end all of them lie in the host tier and nowhere else."""
        self.serve(range(PROMPTS))
        fillers = self.contents[:AT_ONCE] ^ 255
        self.contents = np.concatenate((self.contents, fillers))
        self.serve(range(PROMPTS, PROMPTS + AT_ONCE))
        self.slot_of = self._find_slots()
        self.damaged = self.random.permutation(COUNT)[:DAMAGED]

    def fill_and_age(self) -> None:
        """The same, after an earlier life of which every slot has kept bytes and sums."""
        self.fill()
        self.older = self.host_bytes(), self.host_sums()
        self.older_slot_of = self.slot_of
        self.cache.reset("new weights")
        self.contents = self._draw()
        self.fill()

    def serve(self, prompts: range) -> list[tuple[int, Lease]]:
        """Requests for these prompts, some at a time; what is not cached is computed."""
        served: list[tuple[int, Lease]] = []
        for first in range(prompts.start, prompts.stop, AT_ONCE):
            batch = range(first, min(first + AT_ONCE, prompts.stop))
            leases = [(number, self.cache.acquire(_prompt(number))) for number in batch]
            self._step_until(lambda: all(_ready(lease) for _, lease in leases))  # noqa: B023
            for number, lease in leases:
                self._compute(number, lease)
                lease.release()
            self._step_until(lambda: not self.cache.busy)
            served += leases
        return served

    def host_bytes(self) -> NDArray[np.uint8]:
        return read_slots(self.host, range(HOST_BLOCKS))

    def host_sums(self) -> NDArray[np.uint64]:
        return self.host.sums(np.arange(HOST_BLOCKS, dtype=np.int32)).copy()

    def damage(self, slots: NDArray[np.intp], blocks: NDArray[np.uint8]) -> None:
        """Overwrites the bytes of some slots."""
        write_slots(self.host, slots.tolist(), blocks)

    def damage_sums(self, slots: NDArray[np.intp], sums: NDArray[np.uint64]) -> None:
        """Overwrites the sums of some slots."""
        self.host.keep_sums(slots.astype(np.int32), sums)

    @property
    def bad_slots(self) -> NDArray[np.intp]:
        return self.slot_of[self.damaged]

    def _draw(self) -> NDArray[np.uint8]:
        """The KV of every prompt's blocks; no two are alike, and none has a zero in it."""
        size = (PROMPTS, BLOCKS, self.host.layout.block_bytes)
        return self.random.integers(1, 255, size=size, dtype=np.uint8)

    def _compute(self, number: int, lease: Lease) -> None:
        """What is cached is right; the rest is computed, and said to be."""
        slots, content = lease.block_table[:BLOCKS].tolist(), self.contents[number]
        cached = lease.cached_tokens // TOKENS
        assert np.array_equal(self.read(slots)[:cached], content[:cached])
        if cached < BLOCKS:
            self.write(slots[cached:], content[cached:])
        lease.commit_prompt(BLOCKS * TOKENS + 1)

    def _find_slots(self) -> NDArray[np.intp]:
        """Where the blocks of each prompt lie in the arena."""
        lying = {block.tobytes(): slot for slot, block in enumerate(self.host_bytes())}
        blocks = self.contents[:PROMPTS].reshape(COUNT, -1)
        return np.array([lying[block.tobytes()] for block in blocks])

    def good_blocks(self, number: int) -> int:
        """How many blocks of a prompt come before the first that is damaged."""
        own = range(number * BLOCKS, (number + 1) * BLOCKS)
        damaged = set(self.damaged.tolist())
        return next((at for at, block in enumerate(own) if block in damaged), BLOCKS)

    def _step_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        self.cache.step()
        while not done():
            assert self.cache.wait(deadline)
            self.cache.step()

    def check_all_found(self) -> None:
        """All damage is found, none of it is served; dropped and computed anew, it is cached."""
        self.cache.take_kv_events()
        served = self.serve(range(PROMPTS))
        told = self.cache.take_kv_events()
        again = self.serve(range(PROMPTS))

        found = [lease.cached_tokens // TOKENS for _, lease in served]
        good = [self.good_blocks(number) for number in range(PROMPTS)]
        short = [lease for _, lease in served if lease.cached_tokens < BLOCKS * TOKENS]
        removed = [each for each in told if isinstance(each, BlocksRemoved) and each.tier == "host"]
        statistics = self.cache.statistics()
        assert found == good
        assert {lease.miss.reason for lease in short} == {penstock.MissReason.CORRUPT}
        assert statistics.blocks_corrupt == DAMAGED
        assert statistics.tokens_not_delivered == (COUNT - sum(good)) * TOKENS
        assert len({key for each in removed for key in each.keys}) == DAMAGED
        assert {lease.cached_tokens for _, lease in again} == {BLOCKS * TOKENS}
        self.cache.audit()


def _prompt(number: int) -> list[int]:
    return [number, *range(BLOCKS * TOKENS)]


def _ready(lease: Lease) -> bool:
    return lease.state is penstock.LeaseState.READY
