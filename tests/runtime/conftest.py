"""Engines without a model, over real memory: every byte they read can be told right or wrong.

`Engine` has its blocks managed, `World` is one that offloads. In an engine, the KV of a token is
a number that follows from all tokens up to it and from the *salt*: whatever else it depends on,
such as the tenant. So it can be computed anywhere, and a block that holds the KV of other tokens,
or of none, cannot pass for the right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

import penstock
from penstock.cache.states import LeaseState
from penstock.config import parse_config
from penstock.machine import effects as ef
from penstock.runtime.base import Driven
from penstock.runtime.cache import Cache
from penstock.runtime.copy_executor import CopyExecutor
from penstock.runtime.driver import Driver
from penstock.runtime.messages import Agreement
from penstock.runtime.offload import Offload
from penstock.runtime.rank_links import LocalLink
from penstock.store.process import link
from penstock.supervisor import client
from penstock.testing.tier_suite import LAYOUTS, draw_blocks, read_slots, write_slots
from penstock.tiers.arrays import ArrayTier, opaque_layout
from penstock.tiers.host import MemoryTier
from penstock.vocabulary.checksums import Algorithm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from penstock.cache.explain import Miss
    from penstock.config import Config
    from penstock.runtime.cache import Lease


BLOCK_TOKENS = 4
LAYERS = 2
CHANNELS = 3
STEPS_MAX = 1000
"""More than any copy here can need: an engine that still waits then would wait for ever."""


def kv_of(tokens: Sequence[int], salt: str = "") -> NDArray[np.uint64]:
    """The KV of a sequence: [layers, tokens, channels]."""
    words = np.array([sum(salt.encode()), *tokens], dtype=np.uint64)
    places = np.arange(len(words), dtype=np.uint64)
    # Every token at every place adds a number of its own, so no two pasts have the same sum.
    mixed = (words << np.uint64(32) | places) * np.uint64(0x9E37_79B9_7F4A_7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    past = np.cumsum(mixed ^ (mixed >> np.uint64(32)))[1:]
    lanes = np.arange(1, LAYERS * CHANNELS + 1, dtype=np.uint64).reshape(LAYERS, 1, CHANNELS)
    return past[np.newaxis, :, np.newaxis] * (lanes * np.uint64(2) + np.uint64(1))


def configure(
    *,
    blocks: int = 8,
    tiers: Mapping[str, int] | None = None,
    write: str = "write_through",
    settings: str = "",
) -> Config:
    """A configuration with so many device blocks over memory tiers of so many."""
    tables = [
        f'[[tiers]]\nname = "{name}"\nkind = "memory"\nblocks = {count}\nwrite = "{write}"\n'
        for name, count in ({"host": 64} if tiers is None else tiers).items()
    ]
    return parse_config(
        f'version = 1\n[model]\nname = "none"\n'
        f"[cache]\nblocks = {blocks}\nblock_tokens = {BLOCK_TOKENS}\n{settings}\n" + "".join(tables)
    )


def drive(config: Config, driver: Driver, device_slots: tuple[int, ...]) -> Driven:
    """What a cache is opened on, with its one rank in this process."""
    agreement = Agreement(settings=config.cache, device_slots=device_slots, off=())
    return Driven(config, agreement, driver)


class Turn(NamedTuple):
    """What a request found."""

    cached_tokens: int
    cached_by_tier: tuple[int, ...]
    miss: Miss


@dataclass
class Engine:
    """Arrays, a cache over them, and the arithmetic of what must be in them."""

    config: Config
    now: float = 0.0
    kv: list[NDArray[np.uint64]] = field(init=False)

    def __post_init__(self) -> None:
        assert self.config.cache.device is not None
        shape = (self.config.cache.device.slot_count, BLOCK_TOKENS, CHANNELS)
        self.kv = [np.zeros(shape, dtype=np.uint64) for _ in range(LAYERS)]
        self.device = ArrayTier(opaque_layout(self.kv, block_tokens=BLOCK_TOKENS), self.kv)
        self.tiers = [
            MemoryTier(self.device.layout, tier.slot_count) for tier in self.config.cache.tiers
        ]
        self.driver = Driver(
            self.config.cache,
            LocalLink(CopyExecutor([self.device, *self.tiers], Algorithm.XXH3)),
            clock=lambda: self.now,
        )
        slots = (self.config.cache.device.slot_count,)
        self.cache = Cache(drive(self.config, self.driver, slots))

    def turn(
        self, prompt: Sequence[int], output: Sequence[int] = (), *, salt: str = "", **wishes: Any
    ) -> Turn:
        """A whole request: what is cached is checked, the rest is computed."""
        with self.cache.acquire(prompt, **wishes) as lease:
            self.wait(lease)
            found = Turn(lease.cached_tokens, lease.cached_by_tier, lease.miss)
            self.run(lease, prompt, salt=salt)
            if output:
                lease.grow(len(prompt) + len(output))
                self.run(lease, [*prompt, *output], salt=salt)
        self.settle()
        self.cache.audit()
        return found

    def run(self, lease: Lease, tokens: Sequence[int], *, salt: str = "") -> None:
        """Checks the KV of a lease, computes what is missing of `tokens`, and commits it."""
        self.check(lease, tokens, salt=salt)
        self.compute(lease, tokens, salt=salt)
        lease.commit(tokens[lease.token_count :])

    def compute(self, lease: Lease, tokens: Sequence[int], *, salt: str = "") -> None:
        """Writes the KV of the tokens that have none yet; does not commit it."""
        kv = kv_of(tokens, salt)
        for position in range(lease.token_count, len(tokens)):
            block, row = divmod(position, BLOCK_TOKENS)
            for layer in range(LAYERS):
                self.kv[layer][lease.block_table[block], row] = kv[layer, position]

    def check(self, lease: Lease, tokens: Sequence[int], *, salt: str = "") -> None:
        """Every token that a lease says has KV has the right one."""
        count = lease.token_count
        assert lease.state is LeaseState.READY
        for layer in range(LAYERS):
            held = self.kv[layer][lease.block_table].reshape(-1, CHANNELS)[:count]
            assert np.array_equal(held, kv_of(tokens[:count], salt)[layer])

    def wait(self, lease: Lease) -> None:
        """Steps until a lease may run, or never will."""
        for _ in range(STEPS_MAX):
            if lease.state is not LeaseState.LOADING:
                return
            self.cache.step()
        raise AssertionError(f"lease {lease.id} still waits after {STEPS_MAX} steps")

    def settle(self) -> None:
        """Steps until nothing is under way."""
        for _ in range(STEPS_MAX):
            self.cache.step()
            if not self.cache.busy:
                return
        raise AssertionError(f"copies are still under way after {STEPS_MAX} steps")

    def step_a_block(self) -> None:
        """A step whose budget is too small for anything: each mover copies one block."""
        self.cache.step(budget_bytes=0)

    def spoil(self, tier: int) -> None:
        """Flips a bit of every block in a lower tier."""
        self.slots_of(tier)[:, 0] ^= 0x10

    def spoil_block(self, tier: int, tokens: Sequence[int], block: int) -> None:
        """Flips a bit of one block of a sequence in a lower tier."""
        rows = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        packed = np.frombuffer(kv_of(tokens)[:, rows].tobytes(), dtype=np.uint8)
        slots = self.slots_of(tier)
        (slot,) = np.flatnonzero((slots == packed).all(axis=1))
        slots[slot, -1] ^= 0x01

    def slots_of(self, tier: int) -> NDArray[np.uint8]:
        """The bytes of a lower tier, as they lie: [slots, bytes]."""
        store = self.tiers[tier - 1]
        return store.blocks([0]).buffers[0].reshape(store.slot_count, -1)

    def forget_device(self) -> None:
        """Fills the device with something else, so that what was there lies below alone."""
        count = len(self.kv[0]) * BLOCK_TOKENS
        self.turn([999_999 - self.cache.statistics().requests] * count, store=False)

    def expect_at_rest(self) -> None:
        """Nothing is held or under way, and every slot is free or holds a block."""
        self.settle()
        self.cache.audit()
        statistics = self.cache.statistics()
        assert statistics.leases == 0
        assert statistics.operations_running == statistics.operations_ending == 0
        for tier in statistics.tiers:
            assert tier.free + tier.ready == tier.slots
            assert tier.held == 0


@dataclass
class World:
    """An engine's memory of six slots, and tiers below it."""

    tiers: Mapping[str, int] = field(default_factory=lambda: {"host": 32})
    layout: str = "K and V apart"
    settings: str = ""
    tier_settings: str = ""
    now: float = 0.0

    def __post_init__(self) -> None:
        layout = LAYOUTS[self.layout]
        text = f'version = 1\n[model]\nname = "none"\n[cache]\nblock_tokens = 4\n{self.settings}\n'
        text += f"groups = {len(layout.groups)}\n"
        for name, blocks in self.tiers.items():
            text += f'[[tiers]]\nname = "{name}"\nkind = "memory"\nblocks = {blocks}\n'
            text += f"{self.tier_settings}\n"
        config = parse_config(text)
        sizes = layout.buffer_bytes.values()
        self.device = ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])
        self.lower = [MemoryTier(layout, tier.slot_count) for tier in config.cache.tiers]
        link = LocalLink(CopyExecutor([self.device, *self.lower], Algorithm.XXH3))
        driver = Driver(config.cache, link, clock=lambda: self.now)
        slots = tuple(group.block_count for group in layout.groups)
        self.offload = Offload(drive(config, driver, slots))
        self.content = draw_blocks(layout, 6, seed=1)
        write_slots(self.device, range(6), self.content)

    def settle(self) -> list[ef.Ended | ef.Settled]:
        """Steps until nothing is under way; returns what ended."""
        for _ in range(STEPS_MAX):
            self.offload.step()
            if not self.offload.busy:
                self.offload.audit()
                return self.offload.poll()
        raise AssertionError(f"copies are still under way after {STEPS_MAX} steps")

    def saved(self, keys: Sequence[bytes], slots: ArrayLike, **wishes: object) -> ef.Started:
        """Saves blocks, and waits until they are."""
        started = self.offload.save(keys, slots, cause="save", **wishes)  # type: ignore[arg-type]
        self.settle()
        return started

    def loaded(self, keys: Sequence[bytes], slots: ArrayLike) -> ef.Ended:
        """Loads blocks, and waits until they are there."""
        self.offload.load(keys, slots, cause="load")
        (ended,) = (each for each in self.settle() if isinstance(each, ef.Ended))
        return ended

    def device_bytes(self, slots: Sequence[int]) -> NDArray[np.uint8]:
        return read_slots(self.device, slots)

    def wipe_device(self) -> None:
        write_slots(self.device, range(6), np.zeros_like(self.content))


class Fleet:
    """An owner and its ranks, with memory of their own; the test hands their messages over."""

    def __init__(
        self, *, ranks: int = 2, blocks: int = 16, settings: str = "", tier: str = "", seed: int = 1
    ) -> None:
        kind = tier or 'kind = "memory"'
        self.config = parse_config(
            f'version = 1\n[model]\nname = "none"\n[cache]\nblock_tokens = {BLOCK_TOKENS}\n'
            f'ranks = {ranks}\n{settings}\n[[tiers]]\nname = "host"\nblocks = {blocks}\n{kind}\n'
        )
        drawn = np.random.default_rng(seed)
        self.kv = [drawn.random((8, BLOCK_TOKENS, CHANNELS)) for _ in range(ranks)]
        self.ranks = [self.open_rank(rank) for rank in range(ranks)]
        self.owner = penstock.open_offload(self.config, ranks=[rank.facts for rank in self.ranks])

    def open_rank(self, rank: int, **wishes: Any) -> penstock.Rank:
        return penstock.open_rank(self.config, rank=rank, kv=self.kv[rank], **wishes)

    def keys(self, count: int, first: int = 0) -> list[bytes]:
        chain = self.config.key_chain()
        return chain.extend(range(first, first + count * BLOCK_TOKENS))

    def plan(self, *ranks: int) -> bytes | None:
        """A step of the owner: its plan goes to these ranks, or to all of them."""
        self.owner.step()
        plan = self.owner.ranks.take_plan()
        if plan is not None:
            for rank in ranks or range(len(self.ranks)):
                self.ranks[rank].take(plan)
        return plan

    def pump(self) -> None:
        """A step of everybody."""
        self.plan()
        for rank in self.ranks:
            report = rank.step()
            if report is not None:
                self.owner.ranks.receive(report)

    def settle(self) -> list[ef.Ended | ef.Settled]:
        """Steps until nothing is under way; returns what ended."""
        for _ in range(STEPS_MAX):
            self.pump()
            if not self.owner.busy:
                self.owner.audit()
                return self.owner.poll()
        raise AssertionError(f"copies are still under way after {STEPS_MAX} steps")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a busy machine keeps from answering is not taken for one that hangs."""
    monkeypatch.setattr(link, "SILENT_S", 600.0)
    monkeypatch.setattr(client, "ANSWER_S", 60.0)


def make_engine(**settings: Any) -> Engine:
    """An engine from what `configure` takes."""
    return Engine(configure(**settings))


@pytest.fixture
def engine() -> Engine:
    """An engine with 8 device blocks over a host tier of 64."""
    return Engine(configure())
