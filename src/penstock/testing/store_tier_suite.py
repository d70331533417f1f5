"""What every tier of the store process must do, as sentences to inherit.

    class TestMyTier(StoreTierSuite):
        def make_tier(self, folder: Path) -> StoreTier:
            return MyTier(folder)

A tier that was closed is made again with the same folder, and must have what was saved. The suite
needs room for `BLOCK_COUNT` blocks of each kind in `LAYOUTS`, some of them in two spaces.

The one rule they add up to: a block that is delivered is the one that was asked for.
"""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest

from penstock.cache.operations import BlockFault
from penstock.store.base import (
    AskedTier,
    FindJob,
    LoadJob,
    MappedArena,
    SaveJob,
    Space,
    part_name,
)
from penstock.testing.tier_suite import draw_blocks
from penstock.tiers.host import HostTier
from penstock.vocabulary.checksums import Algorithm
from penstock.vocabulary.form import Form
from penstock.vocabulary.keys import KEY_BYTES
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.store.base import EndedJob, Page, StoreTier
    from penstock.vocabulary.keys import Key

SLOT_COUNT = 48
BLOCK_COUNT = 24
WAIT_S = 60.0
"""Far more than any job takes; a test that waits for so long has failed."""
SPACE = Space(b"a space of tests", 0)
SAVE_SALT, LOAD_SALT = 0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321


def _split(channels: int, block_tokens: int) -> Layout:
    return Layout.split(
        layers=range(2),
        heads=HeadRange.all_of(2),
        channels=channels,
        dtype=DType.BF16,
        block_tokens=block_tokens,
        block_count=SLOT_COUNT,
    )


LAYOUTS: dict[str, Layout] = {
    "whole pages": _split(channels=32, block_tokens=16),
    "less than a page": _split(channels=4, block_tokens=4),
    "not a multiple of a page": _split(channels=21, block_tokens=19),
    "opaque": Layout.opaque(
        layers=range(3),
        block_bytes=1700,
        block_stride=1700,
        encoding="bytes of an engine",
        block_tokens=4,
        block_count=SLOT_COUNT,
    ),
}
"""Blocks of less than a page, of whole pages, and of a page and a bit."""


class Saved(NamedTuple):
    """Blocks that lie in slots of an arena."""

    keys: list[Key]
    content: NDArray[np.uint8]
    slots: list[int]


class StoreRig:
    """A rank's arena, and a tier that serves it."""

    def __init__(
        self, tier: StoreTier, layout: Layout, algorithm: Algorithm = Algorithm.XXH3, rank: int = 0
    ) -> None:
        self.tier = tier
        self.host = HostTier.create(layout, SLOT_COUNT, huge_pages=False)
        form = Form(layout=layout, checksum=algorithm)
        part = part_name(form, rank=rank, rank_count=2, equal=False)
        self.arena = MappedArena(self.host, form, part)
        self.ended: list[EndedJob] = []
        self._ticket = 0

    def blocks(self) -> NDArray[np.uint8]:
        """The slots of the arena, of shape [slots, bytes of a block]."""
        host = self.host
        memory = host.arena.bytes[host.blocks_offset :][: SLOT_COUNT * host.slot_bytes]
        return memory.reshape(SLOT_COUNT, -1)[:, : host.layout.block_bytes]

    def fill(self, count: int = BLOCK_COUNT, *, seed: int = 1, first: int = 0) -> Saved:
        """New blocks in the arena, with their sums."""
        content = draw_blocks(self.host.layout, count, seed)
        keys = [draw_key(seed, number) for number in range(count)]
        slots = list(range(first, first + count))
        self.blocks()[slots] = content
        self.host.keep_sums(np.array(slots, np.int32), self.sums(content, keys, SAVE_SALT))
        return Saved(keys, content, slots)

    def sums(
        self, content: NDArray[np.uint8], keys: Sequence[Key], salt: int
    ) -> NDArray[np.uint64]:
        span = self.arena.span
        return span.sum_blocks(
            np.ascontiguousarray(content), keys, self.arena.form.checksum, salt=salt
        )

    def generation(self, name: bytes) -> int:
        """The generation of a space, as soon as it is known."""
        deadline = time.monotonic() + WAIT_S
        if isinstance(self.tier, AskedTier):
            self.tier.attach(name, [self.arena])
        while (found := self.tier.generation(name)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"the generation is not known: {self.tier.state()}"
            wait_for_news(self.tier, left)
        return found

    def void(self, name: bytes) -> int:
        """Begins a new generation, and waits until it is kept."""
        deadline = time.monotonic() + WAIT_S
        while (begun := self.tier.void(name)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"the new generation is not kept: {self.tier.state()}"
            wait_for_news(self.tier, left)
        return begun

    def _meant(self, space: Space) -> Space:
        """A space of the tests: 0 is the generation that counts, and 1 another one."""
        if space.generation > 1:
            return space
        return Space(space.name, self.generation(space.name) + space.generation)

    def save(self, saved: Saved, *, space: Space = SPACE) -> int:
        self._ticket += 1
        parents = [None, *saved.keys[:-1]]
        space = self._meant(space)
        self.tier.save(
            SaveJob(self._ticket, self.arena, space, saved.keys, parents, saved.slots, SAVE_SALT)
        )
        return self._ticket

    def load(self, keys: Sequence[Key], slots: Sequence[int], *, space: Space = SPACE) -> int:
        self._ticket += 1
        space = self._meant(space)
        self.tier.load(LoadJob(self._ticket, self.arena, space, keys, slots, LOAD_SALT))
        return self._ticket

    def wait(self, *tickets: int) -> list[EndedJob]:
        """The reports of these jobs, in this order; fails if they do not come."""
        deadline = time.monotonic() + WAIT_S
        while not {*tickets} <= {each.ticket for each in self.ended}:
            left = deadline - time.monotonic()
            assert left > 0, f"jobs {tickets} were not reported: {self.tier.state()}"
            wait_for_news(self.tier, left)
            self.ended += self.tier.collect()
        found = {each.ticket: each for each in self.ended}
        return [found[ticket] for ticket in tickets]

    def save_and_wait(self, saved: Saved, *, space: Space = SPACE) -> EndedJob:
        return self.wait(self.save(saved, space=space))[0]

    def load_and_wait(
        self, keys: Sequence[Key], slots: Sequence[int], *, space: Space = SPACE
    ) -> EndedJob:
        self.blocks()[list(slots)] = 0
        return self.wait(self.load(keys, slots, space=space))[0]

    def find(self, keys: Sequence[Key], *, space: Space = SPACE) -> list[bool]:
        tier = self.tier
        space = self._meant(space)
        if not isinstance(tier, AskedTier):
            return tier.find(space, self.arena.part, keys)
        # Such a tier says how much of a chain is there, so each block is asked for by itself.
        asked = {}
        for key in keys:
            self._ticket += 1
            asked[self._ticket] = key
            tier.seek(FindJob(self._ticket, [self.arena], space, [key]))
        found: dict[Key, bool] = {}
        deadline = time.monotonic() + WAIT_S
        while len(found) < len(keys):
            left = deadline - time.monotonic()
            assert left > 0, f"questions were not answered: {tier.state()}"
            wait_for_news(tier, left)
            found |= {asked[each.ticket]: each.present[0] for each in tier.take_found()}
        return [found[key] for key in keys]

    def require(self, saved: Saved, slots: Sequence[int]) -> None:
        """Fails unless the slots hold these blocks, with their sums under the salt of loads."""
        np.testing.assert_array_equal(self.blocks()[list(slots)], saved.content)
        found = self.host.sums(np.array(slots, np.int32))
        np.testing.assert_array_equal(found, self.sums(saved.content, saved.keys, LOAD_SALT))

    def pages(self, limit: int, *, space: Space = SPACE) -> Iterator[Page]:
        cursor: int | None = None
        space = self._meant(space)
        for _ in range(1000):
            page = self.tier.page(space, self.arena.part, cursor, limit)
            yield page
            cursor = page.cursor
            if cursor is None:
                return
        pytest.fail("the pages do not end")


def draw_key(seed: int, number: int) -> Key:
    return np.random.default_rng([seed, number]).bytes(KEY_BYTES)


def wait_for_news(tier: StoreTier, timeout_s: float) -> None:
    """Until the descriptor is readable."""
    select.select([tier.descriptor], [], [], timeout_s)
    tier.state()
    tier.take_gone()
    tier.take_generations()


def wait_until_recovered(tier: StoreTier) -> None:
    deadline = time.monotonic() + WAIT_S
    while tier.state().recovered < 1:
        left = deadline - time.monotonic()
        assert left > 0, f"the tier does not recover: {tier.state()}"
        select.select([tier.descriptor], [], [], left)


class StoreTierSuite(ABC):
    """Inherit, name the class `Test...`, and say how the tier is made."""

    @abstractmethod
    def make_tier(self, folder: Path) -> StoreTier:
        """A tier that keeps its blocks in a folder, or finds those that it kept there."""

    @pytest.fixture(autouse=True)
    def _close_what_was_made(self, tmp_path: Path) -> Iterator[None]:
        self._folder = tmp_path / "tier"
        self._made: list[StoreTier] = []
        yield
        for tier in self._made:
            tier.close(deadline=time.monotonic() + WAIT_S)

    def open_tier(self) -> StoreTier:
        tier = self.make_tier(self._folder)
        self._made.append(tier)
        return tier

    def open_listed_tier(self) -> StoreTier:
        """One that knows what it has and how large it is; other tiers are spared the sentence."""
        tier = self.open_tier()
        if isinstance(tier, AskedTier):
            pytest.skip("the tier neither lists its blocks nor has a size")
        return tier

    def open_again(self) -> StoreTier:
        self._made[-1].close(deadline=time.monotonic() + WAIT_S)
        tier = self.open_tier()
        wait_until_recovered(tier)
        return tier

    @pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)
    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_a_saved_block_comes_back_into_any_slot_with_its_sums(
        self, kind: str, algorithm: Algorithm
    ) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS[kind], algorithm)
        saved = rig.fill()
        slots = list(np.random.default_rng(7).permutation(SLOT_COUNT)[:BLOCK_COUNT])

        written = rig.save_and_wait(saved)
        read = rig.load_and_wait(saved.keys, slots)

        assert (written.faults, written.failure) == ((), "")
        assert (read.faults, read.failure) == ((), "")
        rig.require(saved, slots)

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_saved_blocks_are_found_after_the_tier_was_opened_again(self, kind: str) -> None:
        first = StoreRig(self.open_tier(), LAYOUTS[kind])
        saved = first.fill()
        first.save_and_wait(saved)

        again = StoreRig(self.open_again(), LAYOUTS[kind])
        read = again.load_and_wait(saved.keys, saved.slots)

        assert again.find(saved.keys) == [True] * BLOCK_COUNT
        assert read.faults == ()
        again.require(saved, saved.slots)

    def test_a_block_that_is_not_there_is_missing_and_the_others_arrive(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(4)
        rig.save_and_wait(saved)
        keys = [saved.keys[0], b"?" * KEY_BYTES, *saved.keys[1:]]

        read = rig.load_and_wait(keys, [10, 11, 12, 13, 14])

        assert read.faults == ((1, BlockFault.MISSING),)
        rig.require(saved, [10, 12, 13, 14])

    def test_blocks_of_another_space_generation_or_part_are_not_found(self) -> None:
        tier = self.open_tier()
        rig = StoreRig(tier, LAYOUTS["opaque"])
        other_rank = StoreRig(tier, LAYOUTS["opaque"], rank=1)
        saved = rig.fill(4)
        rig.save_and_wait(saved)

        spaces = [Space(b"another one here", 0), Space(SPACE.name, 1)]

        assert rig.find(saved.keys) == [True] * 4
        assert [rig.find(saved.keys, space=each) for each in spaces] == [[False] * 4] * 2
        assert other_rank.find(saved.keys) == [False] * 4

    def test_blocks_of_two_spaces_under_one_key_are_two_blocks(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        one, other = rig.fill(4, seed=1), rig.fill(4, seed=2, first=4)
        other_space = Space(b"another one here", 0)
        rig.save_and_wait(one)
        other = other._replace(keys=one.keys)
        sums = rig.sums(other.content, other.keys, SAVE_SALT)
        rig.host.keep_sums(np.array(other.slots, np.int32), sums)
        rig.save_and_wait(other, space=other_space)

        rig.load_and_wait(one.keys, [20, 21, 22, 23])
        rig.load_and_wait(one.keys, [24, 25, 26, 27], space=other_space)

        rig.require(one, [20, 21, 22, 23])
        rig.require(other, [24, 25, 26, 27])

    def test_a_new_generation_voids_what_was_saved_for_good(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        before = Space(SPACE.name, rig.generation(SPACE.name))
        saved = rig.fill(4)
        rig.save_and_wait(saved, space=before)

        after = Space(SPACE.name, rig.void(SPACE.name))
        again = StoreRig(self.open_again(), LAYOUTS["whole pages"])

        assert after.generation != before.generation
        assert again.generation(SPACE.name) == after.generation
        assert again.find(saved.keys, space=after) == [False] * 4

    def test_a_block_that_is_there_is_not_written_again(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(4)
        rig.save_and_wait(saved)
        before = rig.tier.state()

        again = rig.save_and_wait(saved)

        assert again.faults == ()
        assert rig.tier.state().blocks == before.blocks == 4

    def test_two_saves_of_one_block_at_a_time_both_end_well(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(8)

        ended = rig.wait(rig.save(saved), rig.save(saved), rig.save(saved))

        assert [each.faults for each in ended] == [()] * 3
        assert rig.tier.state().blocks == 8

    def test_a_block_whose_bytes_do_not_fit_its_sums_is_never_delivered(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(4)
        rig.blocks()[2, 5] ^= 1
        rig.save_and_wait(saved)

        first = rig.load_and_wait(saved.keys, [10, 11, 12, 13])
        second = rig.load_and_wait(saved.keys, [10, 11, 12, 13])

        assert first.faults == ((2, BlockFault.CORRUPT),)
        assert second.faults == ((2, BlockFault.MISSING),)
        assert rig.tier.state().blocks_corrupt == 1

    @pytest.mark.parametrize("after", range(0, 40, 4))
    def test_every_job_is_reported_once_cancelled_or_not(self, after: int) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(8)
        rig.save_and_wait(saved)
        rig.ended.clear()
        parts = [rig.fill(4, seed=seed, first=4 * seed) for seed in range(2, 6)]

        tickets = [rig.save(part) for part in parts]
        tickets += [rig.load(saved.keys, range(30, 38))]
        for _ in range(after):
            rig.ended += rig.tier.collect()
        for ticket in tickets:
            rig.tier.cancel(ticket)
        rig.wait(*tickets)
        rig.ended += rig.tier.collect()

        assert sorted(each.ticket for each in rig.ended) == sorted(tickets)
        for each, part in zip(rig.wait(*tickets), parts, strict=False):
            failed = {position for position, _ in each.faults}
            kept = [n for n in range(4) if n not in failed]
            assert all(rig.find([part.keys[n] for n in kept]))

    def test_a_cancelled_load_leaves_its_slots_alone_after_its_report(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        saved = rig.fill()
        rig.save_and_wait(saved)

        for _ in range(20):
            ticket = rig.load(saved.keys, saved.slots)
            rig.tier.cancel(ticket)
            rig.wait(ticket)
            rig.blocks()[:] = 0
            last = rig.load_and_wait(saved.keys[:1], [SLOT_COUNT - 1])

            assert last.faults == ()
            assert not rig.blocks()[: SLOT_COUNT - 1].any()

    def test_pages_have_every_block_once_with_its_parent(self) -> None:
        rig = StoreRig(self.open_listed_tier(), LAYOUTS["whole pages"])
        saved = rig.fill(21)
        rig.save_and_wait(saved)
        rig.save_and_wait(rig.fill(5, seed=2, first=30), space=Space(b"another one here", 0))

        again = StoreRig(self.open_again(), LAYOUTS["whole pages"])
        pages = list(again.pages(limit=4))
        found = {
            key: parent
            for page in pages
            for key, parent in zip(page.keys, page.parents, strict=True)
        }

        assert all(len(page.keys) <= 4 for page in pages)
        assert sum(len(page.keys) for page in pages) == 21
        assert found == dict(zip(saved.keys, [None, *saved.keys[:-1]], strict=True))

    def test_the_descriptor_is_readable_while_there_is_something_to_collect(self) -> None:
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        rig.save_and_wait(rig.fill(4))

        def is_readable(wait_s: float = 0) -> bool:
            return bool(select.select([rig.tier.descriptor], [], [], wait_s)[0])

        wait_for_news(rig.tier, 0)
        rig.tier.collect()
        before = is_readable()
        rig.load([b"?" * KEY_BYTES], [0])
        during = is_readable(WAIT_S)
        rig.tier.collect()

        assert (before, during, is_readable()) == (False, True, False)

    def test_close_ends_what_is_in_hand_and_leaves_no_thread(self) -> None:
        threads = {*threading.enumerate()}
        rig = StoreRig(self.open_tier(), LAYOUTS["whole pages"])
        tickets = [rig.save(rig.fill(8)), rig.load([b"?" * KEY_BYTES], [40])]

        rig.tier.close(deadline=time.monotonic() + WAIT_S)
        ended = rig.tier.collect()

        assert sorted(each.ticket for each in ended) == tickets
        assert {*threading.enumerate()} <= threads
