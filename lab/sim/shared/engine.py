"""An engine of such a world: its ranks, its tier without threads, and what it waits for.

Its tier is the product's. Who of its threads gets on is the world's choice, also while another one
is in a call of the client: `SteppedTier.step` takes one step of one of them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lab.explore.world import Violation
from lab.fixtures.shards import Shard
from penstock.store.base import MappedArena, Space, part_name
from penstock.store.shared.io import FrontMemory
from penstock.store.shared.tier import SharedTier
from penstock.store.shared.workers import names_of
from penstock.store.stored_tier import RunOfBlocks
from penstock.tiers.host import HostTier
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KeyChain, Namespace
from penstock.vocabulary.layout import Layout
from penstock.vocabulary.planes import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from numpy.typing import NDArray

    from penstock.store.base import FindJob, LoadJob, SaveJob
    from penstock.store.clients.blobs import BlobStore
    from penstock.store.shared.workers import Question
    from penstock.vocabulary.checksums import Algorithm
    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Cell

SPACE = b"the one of these"
ARENA_SLOTS = 24
TOKENS = 32
"""Of a chain."""
HEADS = 2
UNUSED = 0xA5
"""What lies in slots that nobody uses."""


@lru_cache(maxsize=1000)
def chain(text: int, block_tokens: int) -> tuple[Key, ...]:
    """The keys of one of the texts."""
    tokens = [text, *range(1, TOKENS)]
    return tuple(KeyChain(Namespace(model="m"), block_tokens=block_tokens).extend(tokens))


class Geometry(NamedTuple):
    """How an engine cuts the blocks of the model."""

    ranks: int
    block_tokens: int
    latent: bool

    @cache  # noqa: B019 - there are eight
    def layouts(self) -> list[Layout]:
        """Of each rank."""
        if self.latent:
            return [
                Layout.mla(
                    layers=range(2),
                    channels=6,
                    dtype=DType.BF16,
                    block_tokens=self.block_tokens,
                    block_count=ARENA_SLOTS,
                )
            ] * self.ranks
        return [
            Layout.split(
                layers=range(2),
                heads=Shard(tensor_size=self.ranks, tensor_rank=rank).heads(HEADS),
                channels=4,
                dtype=DType.BF16,
                block_tokens=self.block_tokens,
                block_count=ARENA_SLOTS,
            )
            for rank in range(self.ranks)
        ]


class SteppedTier(SharedTier):
    """The tier of the product, whose threads are steps."""

    def __init__(
        self,
        blobs: BlobStore,
        rng: Random,
        *,
        ask_s: float,
        timeout_s: float,
        compress: bool,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            blobs,
            ask_s=ask_s,
            timeout_s=timeout_s,
            queue_bytes=rng.choice((1 << 20, 4 << 10)),
            compress=compress,
            clock=clock,
            stepped=True,
        )
        self._rng = rng
        self._keeper.draw = rng.randbytes
        self._keeper_busy = False
        self._threads_busy = 0

    @property
    def is_locked(self) -> bool:
        return self.lock.locked()

    @property
    def is_busy(self) -> bool:
        """Whether one of its threads is in a call."""
        return self._keeper_busy or bool(self._threads_busy)

    @property
    def bytes_in_hand(self) -> int:
        return self.in_hand_bytes

    def overdue(self, now: float) -> list[int]:
        """Questions that should have been answered, had the keeper had its turn."""
        return [each.job.ticket for each in self.asked if now > each.until]

    def keeper_wait_s(self) -> float:
        with self.lock:
            return max(0.0, self._keeper.due_at() - self.clock())

    def step(self) -> bool:
        """Lets one of its threads get on; whether one could."""
        choices: list[Callable[[], None]] = []
        if not self._keeper_busy and self.keeper_wait_s() <= 0:
            choices.append(self._keep)
        task = self._peek() if self._threads_busy < self.copiers else None
        if task is not None:
            choices.append(lambda: self._work(task))
        if not choices:
            return False
        self._rng.choice(choices)()
        return True

    def _keep(self) -> None:
        self._keeper_busy = True
        try:
            self._keeper.turn()
        finally:
            self._keeper_busy = False

    def _peek(self) -> Question | RunOfBlocks | None:
        """The next task, unless its thread would wait for one that writes the same."""
        if self.questions:
            return self.questions[0]
        may_read = bool(self.reads) and (not self.writes or self._rng.random() < 0.7)
        if may_read:
            return self.reads[0]
        run = self.writes[0] if self.writes else None
        if isinstance(run, RunOfBlocks) and self.being_written.isdisjoint(names_of(run)):
            return run
        return None

    def _work(self, task: Question | RunOfBlocks) -> None:
        if not isinstance(task, RunOfBlocks):
            self.questions.remove(task)
        elif task in self.reads:
            self.reads.remove(task)
        else:
            self.writes.remove(task)
        memory = FrontMemory(self._blobs)
        self._threads_busy += 1
        try:
            self._workers.do(task, memory)
        finally:
            self._threads_busy -= 1
            memory.close()


class SimulatedEngine:
    """One engine, with the slots of its ranks."""

    def __init__(self, name: str, geometry: Geometry, algorithm: Algorithm, salt: int) -> None:
        self.name = name
        self.geometry = geometry
        self.salt = salt
        layouts = geometry.layouts()
        self.arenas: list[MappedArena] = []
        self.free: list[set[int]] = []
        self._blocks: list[NDArray[np.uint8]] = []
        for rank, layout in enumerate(layouts):
            form = Form(layout=layout, checksum=algorithm)
            part = part_name(form, rank=rank, rank_count=len(layouts), equal=geometry.latent)
            if any(part == each.part for each in self.arenas):
                continue
            host = HostTier.create(layout, ARENA_SLOTS, huge_pages=False)
            self.arenas.append(MappedArena(host, form, part))
            self.free.append(set(range(ARENA_SLOTS)))
            memory = host.arena.bytes[host.blocks_offset :][: ARENA_SLOTS * host.slot_bytes]
            self._blocks.append(memory.reshape(ARENA_SLOTS, -1)[:, : layout.block_bytes])
            self._blocks[-1][:] = UNUSED
        self.tier: SteppedTier
        self.generation: int | None = None
        self.newest: int | None = None
        """The last generation that it went by: it tells it to every store process."""
        self.voiding = False
        """Whether it waits for a new generation."""
        self.unkept = False
        """Whether its reset counts, and the store may still lose it."""
        self.voided_before: int | None = None
        """Up to which one in the order of their writing its last reset has voided generations."""
        self.jobs: dict[int, tuple[SaveJob | LoadJob, int]] = {}
        """Those in hand, with their rank."""
        self.questions: dict[int, tuple[FindJob, float]] = {}
        """Those that were not answered, and when they were asked."""
        self._contents: dict[tuple[int, Key], NDArray[np.uint8]] = {}

    def keys(self, text: int) -> tuple[Key, ...]:
        return chain(text, self.geometry.block_tokens)

    @property
    def space(self) -> Space:
        assert self.generation is not None
        return Space(SPACE, self.generation)

    def take_slots(self, rank: int, count: int, rng: Random) -> list[int]:
        """Slots that nobody uses; whoever wrote to one meanwhile broke a promise."""
        slots = rng.sample(sorted(self.free[rank]), count)
        self.free[rank] -= set(slots)
        if (self._blocks[rank][slots] != UNUSED).any():
            raise Violation("reuse", f"{self.name}: a slot was written that nobody uses")
        return slots

    def give_back(self, rank: int, slots: Sequence[int]) -> None:
        self._blocks[rank][list(slots)] = UNUSED
        self.free[rank] |= set(slots)

    def check_unused(self) -> None:
        """Nobody has written to slots that nobody uses, and no slot is kept for nothing."""
        for rank, free in enumerate(self.free):
            if len(free) != ARENA_SLOTS:
                raise Violation("drain", f"{self.name}: slots of rank {rank} are still used")
            if (self._blocks[rank] != UNUSED).any():
                raise Violation("reuse", f"{self.name}: a slot was written that nobody uses")

    def fill(self, rank: int, space: Space, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Computes blocks."""
        arena, content = self.arenas[rank], self._expected(rank, space, keys)
        self._blocks[rank][list(slots)] = content
        sums = arena.span.sum_blocks(content, keys, arena.form.checksum, salt=self.salt)
        arena.host.keep_sums(np.array(slots, np.int32), sums)

    def check(self, rank: int, space: Space, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Slots have the right bytes, and the right sums."""
        if not keys:
            return
        arena, content = self.arenas[rank], self._expected(rank, space, keys)
        sums = arena.span.sum_blocks(content, keys, arena.form.checksum, salt=self.salt)
        found = arena.host.sums(np.array(slots, np.int32))
        if (self._blocks[rank][list(slots)] != content).any() or (found != sums).any():
            raise Violation("bytes", f"{self.name}: wrong bytes on rank {rank}")

    def close(self) -> None:
        self._blocks.clear()
        for arena in self.arenas:
            arena.host.close()

    def _expected(self, rank: int, space: Space, keys: Sequence[Key]) -> NDArray[np.uint8]:
        cells = self.arenas[rank].host.layout.cells
        rows = []
        for key in keys:
            found = self._contents.get((rank, key))
            if found is None:
                parts = [_bytes_of(key, cell, self.geometry.block_tokens) for cell in cells]
                found = self._contents[rank, key] = np.concatenate(parts)
            rows.append(found)
        # A block of another generation is another one, so that one from before a reset is seen.
        return np.stack(rows) ^ np.uint8(space.generation & 0x7F)


_TEXTS = range(200)


@lru_cache(maxsize=10_000)
def _end_of(key: Key, block_tokens: int) -> tuple[int, int]:
    """Of which text a key is, and how many tokens it names."""
    for text in _TEXTS:
        keys = chain(text, block_tokens)
        if key in keys:
            return text, (keys.index(key) + 1) * block_tokens
    raise AssertionError(key)


def _bytes_of(key: Key, cell: Cell, tokens: int) -> NDArray[np.uint8]:
    text, end = _end_of(key, tokens)
    parts = []
    for segment in cell.segments:
        size = segment.length // tokens
        whole = _bytes_of_text(text, cell.layer, cell.head, segment.plane.role, size)
        parts.append(whole[end - tokens : end].reshape(-1))
    return np.concatenate(parts)


@lru_cache(maxsize=5000)
def _bytes_of_text(text: int, layer: int, head: int, role: int, size: int) -> NDArray[np.uint8]:
    """Those of every token of a text, of shape [tokens, size]; half of them can be compressed."""
    chance = np.random.default_rng([text, layer, head + 1, role])
    drawn = chance.integers(0, 256, (TOKENS, size), dtype=np.uint8)
    if text % 2:
        drawn[:, 1::2] &= 1
    return drawn
