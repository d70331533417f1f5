"""Engines of several ranks that use a tier in a shared store, for tests.

The bytes of a block are drawn by what they are: token, layer, head and plane. So any two engines of
one model, however they cut its blocks, hold the same bytes wherever both hold them.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from lab.fixtures.store_tier_suite import WAIT_S, wait_for_news
from penstock.store.base import FindJob, LoadJob, MappedArena, SaveJob, Space, part_name
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KeyChain, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.store.base import EndedJob
    from penstock.store.shared.tier import SharedTier
    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Cell, Layout

T = TypeVar("T")
SLOT_COUNT = 32
TOKENS_MAX = 512
SPACE = b"a space of tests"
NOISE = 999
"""The chain that begins with this number has bytes that no codec makes smaller."""


_ENDS: dict[Key, tuple[int, int]] = {}
"""Of which chain a key is, and how many tokens it names."""


def draw_chain(seed: int, count: int, *, block_tokens: int = 16) -> list[Key]:
    """The keys of a prompt that begins with the number `seed`."""
    tokens = [seed, *range(1, count * block_tokens)]
    keys = KeyChain(Namespace(model="model"), block_tokens=block_tokens).extend(tokens)
    for number, key in enumerate(keys, start=1):
        _ENDS[key] = (seed, number * block_tokens)
    return keys


class Engine:
    """An engine with a rank for each layout."""

    def __init__(
        self,
        tier: SharedTier,
        layouts: Sequence[Layout],
        *,
        algorithm: Algorithm = Algorithm.XXH3,
        equal: bool = False,
        salt: int = 1,
    ) -> None:
        self.tier = tier
        self.salt = salt
        self.arenas = []
        for rank, layout in enumerate(layouts):
            form = Form(layout=layout, checksum=algorithm)
            part = part_name(form, rank=rank, rank_count=len(layouts), equal=equal)
            host = HostTier.create(layout, SLOT_COUNT, huge_pages=False)
            self.arenas.append(MappedArena(host, form, part))
        self.arenas = list({arena.part: arena for arena in self.arenas}.values())
        self._ticket = 0
        self.foreign = False
        """Whether the last question met a block in a form that cannot be read."""
        self._ended: dict[int, EndedJob] = {}
        tier.attach(SPACE, self.arenas)
        self.follow()

    def _wait(self, found: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + WAIT_S
        while True:
            result = found()
            if result is not None:
                return result
            left = deadline - time.monotonic()
            assert left > 0, f"nothing came: {self.tier.state()}"
            wait_for_news(self.tier, left)

    def follow(self) -> None:
        """Takes the generation that counts now."""
        self.space = Space(SPACE, self._wait(lambda: self.tier.generation(SPACE)))

    def save(self, keys: Sequence[Key]) -> list[EndedJob]:
        """Computes blocks on every rank, and saves them."""
        slots = list(range(len(keys)))
        tickets = []
        for arena in self.arenas:
            content = self.expected(arena, keys)
            _blocks(arena)[slots] = content
            sums = arena.span.sum_blocks(content, keys, arena.form.checksum, salt=self.salt)
            arena.host.keep_sums(np.array(slots, np.int32), sums)
            parents = [None, *keys[:-1]]
            self._ticket += 1
            tickets.append(self._ticket)
            self.tier.save(
                SaveJob(self._ticket, arena, self.space, keys, parents, slots, self.salt)
            )
        return self.wait(tickets)

    def load(self, keys: Sequence[Key]) -> list[EndedJob]:
        """Loads blocks on every rank, into other slots."""
        slots = [SLOT_COUNT - 1 - number for number in range(len(keys))]
        tickets = []
        for arena in self.arenas:
            _blocks(arena)[slots] = 0
            self._ticket += 1
            tickets.append(self._ticket)
            self.tier.load(LoadJob(self._ticket, arena, self.space, keys, slots, self.salt))
        return self.wait(tickets)

    def require_loaded(self, keys: Sequence[Key], ended: Sequence[EndedJob] | None = None) -> None:
        """Fails unless the last load brought every byte of these blocks, with its sums.

        With `ended`, of those only that it said to have brought.
        """
        whole = list(keys)
        for number, arena in enumerate(self.arenas):
            keys = whole
            if ended is not None:
                bad = {position for position, _ in ended[number].faults}
                if ended[number].failure:
                    continue
                keys = [key for position, key in enumerate(whole) if position not in bad]
            slots = [SLOT_COUNT - 1 - whole.index(key) for key in keys]
            if not keys:
                continue
            content = self.expected(arena, keys)
            np.testing.assert_array_equal(_blocks(arena)[slots], content)
            sums = arena.span.sum_blocks(content, keys, arena.form.checksum, salt=self.salt)
            np.testing.assert_array_equal(arena.host.sums(np.array(slots, np.int32)), sums)

    def find(self, keys: Sequence[Key]) -> int:
        """How many leading blocks are there."""
        self._ticket += 1
        ticket = self._ticket
        self.tier.find(FindJob(ticket, self.arenas, self.space, keys))
        found = self._wait(
            lambda: next((each for each in self.tier.take_found() if each.ticket == ticket), None)
        )
        present = list(found.present)
        self.foreign = found.foreign
        return present.index(False) if False in present else len(present)

    def wait(self, tickets: Sequence[int]) -> list[EndedJob]:
        def all_ended() -> list[EndedJob] | None:
            self._ended |= {each.ticket: each for each in self.tier.collect()}
            if not {*tickets} <= {*self._ended}:
                return None
            return [self._ended[ticket] for ticket in tickets]

        ended: list[EndedJob] = self._wait(all_ended)
        return ended

    def expected(self, arena: MappedArena, keys: Sequence[Key]) -> NDArray[np.uint8]:
        cells, tokens = arena.host.layout.cells, arena.form.block_tokens
        return np.stack(
            [np.concatenate([_bytes_of(key, cell, tokens) for cell in cells]) for key in keys]
        )


def _bytes_of(key: Key, cell: Cell, tokens: int) -> NDArray[np.uint8]:
    seed, end = _ENDS[key]
    parts = []
    for segment in cell.segments:
        size = segment.length // tokens
        whole = _bytes_of_chain(seed, cell.layer, cell.head, segment.plane.role, size)
        parts.append(whole[end - tokens : end].reshape(-1))
    return np.concatenate(parts)


@lru_cache(maxsize=1000)
def _bytes_of_chain(seed: int, layer: int, head: int, role: int, size: int) -> NDArray[np.uint8]:
    """Those of every token of a chain, of shape [tokens, size]."""
    chance = np.random.default_rng([seed, layer, head, role])
    drawn = chance.integers(0, 256, (TOKENS_MAX, size), dtype=np.uint8)
    if seed != NOISE:
        drawn[:, 1::2] &= 3  # As exponents of bfloat16, which are alike.
    return drawn


def _blocks(arena: MappedArena) -> NDArray[np.uint8]:
    host = arena.host
    memory = host.arena.bytes[host.blocks_offset :][: SLOT_COUNT * host.slot_bytes]
    return memory.reshape(SLOT_COUNT, -1)[:, : host.layout.block_bytes]
