"""A cache machine, and somebody who answers for its ranks.

A prompt is a word, and each of its letters stands for one block: the blocks of `"abd"` follow
those of `"ab"`. The key of a block is the word up to its letter, so a failing test can be
read. After every event the whole state is audited.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.cache.settings import CacheSettings, TierSettings, WriteKind, WritePolicy
from penstock.cache.states import LeaseState
from penstock.errors import PenstockError
from penstock.machine import effects as ef
from penstock.machine import events as ev
from penstock.machine.audit import audit
from penstock.machine.machine import CacheMachine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from penstock.cache.operations import BlockFault, Purpose
    from penstock.machine.books import Books
    from penstock.vocabulary.keys import Key, LeaseId, OperationId


EffectT = TypeVar("EffectT", bound=ef.Effect)

BLOCK_TOKENS = 2
INCARNATION = 7


class Driver:
    """Sends events to a machine, keeps its copies, and answers them when told to."""

    def __init__(self, settings: CacheSettings) -> None:
        self.machine = CacheMachine(settings, incarnation=INCARNATION)
        self.rank_count = settings.rank_count
        self.now = 0.0
        self.effects: list[ef.Effect] = []
        """What the last event brought."""
        self.copies: dict[OperationId, ef.Copy] = {}
        """Copies that some rank has not reported on, oldest first."""
        self._unreported: dict[OperationId, set[int]] = {}
        self.past: list[tuple[ev.Event, float]] = []
        self._requests = 0

    @property
    def books(self) -> Books:
        return self.machine._books

    # ---------------------------------------------------------------- words for blocks

    @staticmethod
    def key(prefix: str) -> Key:
        """The key of the block that ends `prefix`."""
        return prefix.encode().rjust(16, b".")

    @classmethod
    def keys(cls, prompt: str) -> list[Key]:
        return [cls.key(prompt[: end + 1]) for end in range(len(prompt))]

    @staticmethod
    def words(keys: Sequence[Key]) -> list[str]:
        return [key.decode().lstrip(".") for key in keys]

    # ---------------------------------------------------------------- events

    def handle(self, event: ev.Event) -> list[ef.Effect]:
        self.past.append((event, self.now))
        self.effects = self.machine.handle(event, self.now)
        audit(self.books)
        for copy in self.told(ef.Copy):
            self.copies[copy.operation] = copy
            self._unreported[copy.operation] = set(range(self.rank_count))
        return self.effects

    def told(self, kind: type[EffectT]) -> list[EffectT]:
        """The effects of one kind that the last event brought."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def answer(self, event: ev.Event, kind: type[EffectT]) -> EffectT:
        """Sends an event, and returns the one effect of a kind that answers it."""
        self.handle(event)
        (effect,) = self.told(kind)
        return effect

    def acquire(self, prompt: str, *, more_tokens: int = 1, **wishes: Any) -> ef.Granted:
        """A request for a prompt that has some tokens more than its full blocks."""
        self._requests += 1
        wishes.setdefault("request", f"request {self._requests}")
        token_count = len(prompt) * BLOCK_TOKENS + more_tokens
        event = ev.Acquire(keys=self.keys(prompt), token_count=token_count, **wishes)
        return self.answer(event, ef.Granted)

    def commit(self, lease: LeaseId, prompt: str, *, more_tokens: int = 0) -> None:
        """The KV of a prompt's full blocks, and of some tokens more, is computed."""
        self.handle(
            ev.Commit(
                lease=lease,
                token_count=len(prompt) * BLOCK_TOKENS + more_tokens,
                keys=self.keys(prompt)[self.books.leases[lease].published_blocks :],
            )
        )

    def grow(self, lease: LeaseId, token_count: int) -> ef.Grown:
        return self.answer(ev.Grow(lease=lease, token_count=token_count), ef.Grown)

    def fork(self, lease: LeaseId, request: str = "fork") -> ef.Granted:
        return self.answer(ev.Fork(lease=lease, request=request), ef.Granted)

    def release(self, lease: LeaseId) -> None:
        self.handle(ev.ReleaseLease(lease=lease))

    def preempt(self, lease: LeaseId) -> None:
        self.handle(ev.Preempt(lease=lease))

    def pin(self, prompt: str) -> ef.Pinned:
        return self.answer(ev.PinBlocks(keys=self.keys(prompt)), ef.Pinned)

    def tick(self, *, after_s: float = 0.0) -> None:
        self.now += after_s
        self.handle(ev.Tick())

    def reset(self) -> None:
        self.handle(ev.Reset(why="test"))

    def discover(self, tier: int, prompt: str, *, foreign: bool = False) -> None:
        """All blocks of a prompt are found in the first slots of a tier."""
        keys = self.keys(prompt)
        slots = np.arange(len(keys), dtype=np.int32)
        self.handle(
            ev.Discovered(
                tier=tier, keys=keys, parents=[None, *keys[:-1]], slots=slots, foreign=foreign
            )
        )

    # ---------------------------------------------------------------- whole lives

    def compute(self, prompt: str, **wishes: Any) -> ef.Granted:
        """A request from its start to its end, without answering copies."""
        granted = self.acquire(prompt, **wishes)
        self.commit(granted.lease, prompt)
        self.release(granted.lease)
        return granted

    def store(self, *prompts: str, **wishes: Any) -> None:
        """Requests from start to end, one after the other, with all their copies."""
        for prompt in prompts:
            granted = self.acquire(prompt, **wishes)
            self.finish()
            assert self.books.leases[granted.lease].state is LeaseState.READY
            self.commit(granted.lease, prompt)
            self.release(granted.lease)
            self.finish()

    # ---------------------------------------------------------------- the ranks' side

    def copy(self, purpose: Purpose) -> ef.Copy:
        """The one open copy of a purpose."""
        (copy,) = [copy for copy in self.copies.values() if copy.purpose is purpose]
        return copy

    def report(
        self,
        copy: ef.Copy,
        *,
        rank: int = 0,
        faults: Sequence[tuple[int, BlockFault]] = (),
        failure: str = "",
    ) -> None:
        """One rank reports on a copy."""
        self._unreported[copy.operation].discard(rank)
        if not self._unreported[copy.operation]:
            self.copies.pop(copy.operation, None)
        self.handle(
            ev.CopyReport(operation=copy.operation, rank=rank, faults=faults, failure=failure)
        )

    def complete(self, copy: ef.Copy) -> None:
        """Every rank that has not reported on a copy reports success."""
        for rank in sorted(self._unreported[copy.operation]):
            self.report(copy, rank=rank)

    def finish(self) -> None:
        """All copies succeed, and those that follow from them, until none is left."""
        while self.copies:
            self.complete(next(iter(self.copies.values())))

    # ---------------------------------------------------------------- looking

    def tiers_with(self, prefix: str) -> set[str]:
        """The tiers in which the block that ends `prefix` can be matched."""
        blocks = self.machine.kv_snapshot().blocks
        return {name for name, rows in blocks.items() if self.key(prefix) in dict(rows)}

    def cached_in(self, tier: str) -> set[str]:
        """The blocks that can be matched in a tier."""
        return set(self.words([key for key, _ in self.machine.kv_snapshot().blocks[tier]]))

    def free_in(self, tier: str) -> int:
        """How many slots of a tier are free."""
        (found,) = [t for t in self.machine.statistics().tiers if t.name == tier]
        return found.free

    def leaving_order(self, tier: int = 0) -> list[str]:
        """The blocks of a tier in the order in which they would leave, asked of a replay."""
        replay = CacheMachine(self.books.settings, incarnation=INCARNATION)
        for event, now in self.past:
            with suppress(PenstockError, ValueError):
                replay.handle(event, now)
        victims: list[int] = []
        while (victim := replay._books.tier(tier).pop_victim()) is not None:
            victims.append(victim)
        return self.words(replay._books.nodes.keys_of(victims))


def _tier(name: str, size: int | TierSettings | None, write: WritePolicy, eviction: str) -> Any:
    if isinstance(size, int):
        return TierSettings(name=name, slot_count=size, write=write, eviction=eviction)
    return size


def make_driver(
    *,
    device: int | TierSettings | None = 8,
    host: int | TierSettings | None = None,
    disk: int | TierSettings | None = None,
    shared: int | TierSettings | None = None,
    write: str = "write_through",
    eviction: str = "lru",
    ranks: int = 1,
    **settings: Any,
) -> Driver:
    """A driver of a small machine; a tier is its number of slots, or its settings."""
    policy = WritePolicy(kind=WriteKind(write))
    lower = (
        _tier(name, size, policy, eviction)
        for name, size in (("host", host), ("disk", disk), ("shared", shared))
    )
    return Driver(
        CacheSettings(
            device=_tier("device", device, policy, eviction),
            tiers=tuple(tier for tier in lower if tier is not None),
            block_tokens=BLOCK_TOKENS,
            rank_count=ranks,
            **settings,
        )
    )
