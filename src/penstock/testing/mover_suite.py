"""Sentences that hold for every mover between two tiers of addressable memory.

    class TestMyLoads(LoadingMoverSuite):
        def make_ends(self, layout: Layout) -> Ends:
            host, device = ...
            return Ends(source=host, target=device, mover=MyMover(host, device))

| suite               | for movers                                                  |
|---------------------|-------------------------------------------------------------|
| `MoverSuite`        | of any kind                                                 |
| `SavingMoverSuite`  | out of the engine's memory, where groups lie apart           |
| `CheckingMoverSuite`| out of a tier that keeps sums, where bytes are checked       |
| `LoadingMoverSuite` | out of such a tier into the engine's memory                  |

The one rule they add up to: what arrives is what its key names, or it does not arrive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import pytest

from penstock.cache.nodes import NOWHERE
from penstock.cache.operations import BlockFault, Purpose
from penstock.machine.effects import Copy
from penstock.movers.base import Moved, Mover
from penstock.testing.seeds import failing_seed
from penstock.testing.tier_suite import LAYOUTS, draw_blocks, read_slots, write_slots
from penstock.tiers.base import KeepsSums, SlotStore
from penstock.vocabulary.checksums import Algorithm, CellSpan, life_salt
from penstock.vocabulary.keys import OperationId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.vocabulary.keys import Key
    from penstock.vocabulary.layout import Cell, Layout

LIFE = (7, 0)  # The incarnation and epoch in whose name copies are made.
SOURCES = (0, 2, 1)
TARGETS = (5, 3, 4)
"""Apart from `SOURCES`, for a mover whose two ends are the same tier."""
POLLS_MAX = 100  # More than any copy here can need.
UNLIMITED = 1 << 40
SEEDS = range(80)
"""How often each kind of damage is done, to blocks of every layout in turn."""
GROUPED = ("two groups", "groups of different kinds")


class Ends(NamedTuple):
    """Two tiers with as many slots as the layout has blocks, and the mover between them."""

    source: SlotStore
    target: SlotStore
    mover: Mover


_span_of = lru_cache(maxsize=64)(CellSpan.of)


def keys_of(count: int) -> list[Key]:
    return [bytes([number]).ljust(16, b"k") for number in range(count)]


def make_copy(
    number: int, sources: ArrayLike, targets: ArrayLike, *, purpose: Purpose, keys: Sequence[Key]
) -> Copy:
    """A copy as the machine would ask for it."""
    return Copy(
        operation=OperationId(*LIFE, number),
        purpose=purpose,
        source=0,
        target=1,
        keys=keys,
        source_slots=np.array(sources, dtype=np.int32),
        target_slots=np.array(targets, dtype=np.int32),
        deadline=float("inf"),
        cause="suite",
    )


def poll_until_idle(mover: Mover, *, budget_bytes: int = UNLIMITED) -> list[Moved]:
    """All that a mover reports until nothing is under way."""
    moved: list[Moved] = []
    for _ in range(POLLS_MAX):
        if not mover.busy:
            return moved
        moved += mover.poll(budget_bytes=budget_bytes)[0]
    raise AssertionError(f"the mover is still busy after {POLLS_MAX} polls")


class MoverSuite(ABC):
    """Inherit, name the class `Test...`, and say how the two ends are made."""

    purpose: ClassVar[Purpose] = Purpose.SAVE
    """What the copies are for."""
    algorithm: ClassVar[Algorithm] = Algorithm.XXH3
    """How the tiers' bytes are summed."""

    @abstractmethod
    def make_ends(self, layout: Layout) -> Ends:
        """Two fresh tiers and a mover; the ends may be one tier."""

    def copy(self, number: int, sources: ArrayLike = SOURCES, targets: ArrayLike = TARGETS) -> Copy:
        """A copy of blocks from source slots to target slots."""
        count = np.shape(sources)[-1]
        return make_copy(number, sources, targets, purpose=self.purpose, keys=keys_of(count))

    def fill(self, store: SlotStore, slots: Sequence[int], *, seed: int) -> NDArray[np.uint8]:
        """Writes blocks into slots, with their sums where the tier keeps them."""
        content = draw_blocks(store.layout, len(slots), seed)
        write_slots(store, slots, content)
        if isinstance(store, KeepsSums):
            sums = self.sums_of(store, content, keys_of(len(slots)))
            store.keep_sums(np.array(slots, dtype=np.int32), sums)
        return content

    def sums_of(
        self, store: SlotStore, content: NDArray[np.uint8], keys: Sequence[Key]
    ) -> NDArray[np.uint64]:
        """The sums that these packed blocks have."""
        span = _span_of(store.layout)
        return span.sum_blocks(content, keys, self.algorithm, salt=life_salt(*LIFE))

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_every_block_arrives_and_nothing_else_changes(self, kind: str) -> None:
        ends = self.make_ends(LAYOUTS[kind])
        self.fill(ends.target, TARGETS, seed=1)
        content = self.fill(ends.source, SOURCES, seed=2)
        expected = read_slots(ends.target)
        expected[list(TARGETS)] = content

        ends.mover.submit(self.copy(1))
        moved = poll_until_idle(ends.mover)

        assert moved == [Moved(self.copy(1).operation)]
        np.testing.assert_array_equal(read_slots(ends.target), expected)
        np.testing.assert_array_equal(read_slots(ends.source, SOURCES), content)

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_bytes_below_the_device_get_the_sums_of_their_key(self, kind: str) -> None:
        ends = self.make_ends(LAYOUTS[kind])
        content = self.fill(ends.source, SOURCES, seed=1)

        ends.mover.submit(self.copy(1))
        poll_until_idle(ends.mover)

        if isinstance(ends.target, KeepsSums):
            kept = ends.target.sums(np.array(TARGETS, dtype=np.int32))
            np.testing.assert_array_equal(kept, self.sums_of(ends.source, content, keys_of(3)))

    def test_every_copy_is_reported_once_in_the_order_they_came(self) -> None:
        ends = self.make_ends(LAYOUTS["K and V apart"])
        self.fill(ends.source, SOURCES, seed=1)
        copies = [self.copy(number) for number in range(5)]
        for copy in copies:
            ends.mover.submit(copy)

        moved = poll_until_idle(ends.mover, budget_bytes=1)
        moved += ends.mover.poll(budget_bytes=UNLIMITED)[0]

        assert moved == [Moved(copy.operation) for copy in copies]

    @pytest.mark.parametrize("polls", range(5))
    def test_an_abandoned_copy_is_reported_once_too(self, polls: int) -> None:
        ends = self.make_ends(LAYOUTS["K and V apart"])
        self.fill(ends.source, SOURCES, seed=1)
        ends.mover.submit(self.copy(1))
        ends.mover.submit(self.copy(2))

        moved: list[Moved] = []
        for _ in range(polls):
            moved += ends.mover.poll(budget_bytes=1)[0]
        ends.mover.abandon(self.copy(1).operation)
        moved += poll_until_idle(ends.mover)

        assert moved == [Moved(self.copy(1).operation), Moved(self.copy(2).operation)]

    def test_a_copy_is_abandoned_without_waiting_for_its_turn(self) -> None:
        ends = self.make_ends(LAYOUTS["K and V apart"])
        self.fill(ends.source, SOURCES, seed=1)
        ends.mover.submit(self.copy(1))
        ends.mover.submit(self.copy(2))

        ends.mover.abandon(self.copy(2).operation)
        moved, _ = ends.mover.poll(budget_bytes=1)

        assert moved == [Moved(self.copy(2).operation)]
        assert poll_until_idle(ends.mover) == [Moved(self.copy(1).operation)]

    def test_an_unknown_copy_can_be_abandoned_without_harm(self) -> None:
        ends = self.make_ends(LAYOUTS["K and V apart"])
        self.fill(ends.source, SOURCES, seed=1)
        ends.mover.submit(self.copy(1))

        ends.mover.abandon(self.copy(9).operation)

        assert poll_until_idle(ends.mover) == [Moved(self.copy(1).operation)]

    @pytest.mark.parametrize("abandoned", [False, True])
    def test_slots_are_left_alone_after_the_report(self, *, abandoned: bool) -> None:
        ends = self.make_ends(LAYOUTS["two groups"])
        self.fill(ends.source, SOURCES, seed=1)
        ends.mover.submit(self.copy(1, SOURCES[:2], TARGETS[:2]))
        ends.mover.submit(self.copy(2, SOURCES[2:], TARGETS[2:]))
        ends.mover.poll(budget_bytes=1)
        if abandoned:
            ends.mover.abandon(self.copy(1).operation)
        ends.mover.poll(budget_bytes=1)

        theirs = self.fill(ends.target, TARGETS[:2], seed=2)
        poll_until_idle(ends.mover)

        np.testing.assert_array_equal(read_slots(ends.target, TARGETS[:2]), theirs)

    @pytest.mark.parametrize("budget_blocks", [0.0, 0.5, 1.0, 1.5, 2.0, 2.99, 3.0, 100.0])
    def test_a_poll_moves_what_its_budget_allows_and_one_block_at_least(
        self, budget_blocks: float
    ) -> None:
        ends = self.make_ends(LAYOUTS["K and V in one array"])
        self.fill(ends.source, SOURCES, seed=1)
        for number in range(3):
            ends.mover.submit(self.copy(number))
        block_bytes = ends.source.layout.block_bytes
        allowed = max(1, int(budget_blocks)) * block_bytes

        spent: list[int] = []
        while ends.mover.busy and len(spent) < POLLS_MAX:
            spent.append(ends.mover.poll(budget_bytes=int(budget_blocks * block_bytes))[1])

        assert max(spent) <= allowed
        assert sum(spent) == 9 * block_bytes
        assert all(part >= block_bytes for part in spent)

    def test_a_mover_is_busy_until_its_last_report(self) -> None:
        ends = self.make_ends(LAYOUTS["latent"])
        self.fill(ends.source, SOURCES, seed=1)
        idle_before = not ends.mover.busy

        ends.mover.submit(self.copy(1))
        busy = ends.mover.busy
        ends.mover.abandon(self.copy(1).operation)
        busy_still = ends.mover.busy
        moved, spent = ends.mover.poll(budget_bytes=UNLIMITED)

        assert idle_before
        assert busy
        assert busy_still
        assert len(moved) == 1
        assert spent == 0
        assert not ends.mover.busy
        assert ends.mover.poll(budget_bytes=UNLIMITED) == ([], 0)


class SavingMoverSuite(MoverSuite):
    """Movers out of the engine's memory into a tier that keeps sums."""

    @pytest.mark.parametrize("kind", GROUPED)
    def test_groups_of_one_block_are_gathered_from_their_slots(self, kind: str) -> None:
        layout = LAYOUTS[kind]
        ends = self.make_ends(layout)
        content = self.fill(ends.source, range(6), seed=1)
        first, second = _bytes_of_groups(layout)
        expected = np.empty((2, layout.block_bytes), dtype=np.uint8)
        expected[:, first] = content[[4, 0]][:, first]
        expected[:, second] = content[[3, 5]][:, second]

        ends.mover.submit(self.copy(1, [[4, 0], [3, 5]], [2, 1]))
        moved = poll_until_idle(ends.mover)

        assert moved == [Moved(self.copy(1).operation)]
        np.testing.assert_array_equal(read_slots(ends.target, [2, 1]), expected)


class CheckingMoverSuite(MoverSuite):
    """Movers out of a tier that keeps sums: every kind of damage is found, none delivered."""

    purpose = Purpose.STAGE

    def damaged(self, seed: int, kinds: Sequence[str] = tuple(LAYOUTS)) -> _Damage:
        """Three good blocks of some layout in the source, to be damaged by the test."""
        kind = kinds[seed % len(kinds)]
        if kind not in self._made:
            self._made[kind] = self.make_ends(LAYOUTS[kind])
        ends = self._made[kind]
        self.fill(ends.target, range(6), seed=seed + 1)
        self.fill(ends.source, SOURCES, seed=seed)
        return _Damage(ends, np.random.default_rng(seed))

    @cached_property
    def _made(self) -> dict[str, Ends]:
        """The ends of each layout. Every seed fills them anew: making them takes longer."""
        return {}

    def expect_found(self, damage: _Damage, positions: Sequence[int]) -> None:
        """The blocks at these positions are faults, and the others arrive."""
        ends = damage.ends
        expected = read_slots(ends.target)
        content = read_slots(ends.source, SOURCES)
        for position in set(range(3)) - set(positions):
            expected[TARGETS[position]] = content[position]

        # Block by block or all at once: a fault is reported by its position in the copy.
        budget_bytes = (0, UNLIMITED)[damage.random.integers(2)]
        ends.mover.submit(self.copy(1))
        (moved,) = poll_until_idle(ends.mover, budget_bytes=budget_bytes)

        assert moved.faults == tuple((at, BlockFault.CORRUPT) for at in sorted(positions))
        assert moved.failure == ""
        np.testing.assert_array_equal(read_slots(ends.target), expected)

    def test_a_flipped_bit_is_found(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                damage = self.damaged(seed)
                position, content = damage.draw_block()

                content[damage.random.integers(len(content))] ^= 1 << damage.random.integers(8)
                damage.put(position, content)

                self.expect_found(damage, [position])

    def test_exchanged_slots_are_found_although_their_sums_went_with_them(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                damage = self.damaged(seed)
                one, other = damage.random.permutation(3)[:2].tolist()
                content, sums = damage.read()

                damage.put(one, content[other], sums[other])
                damage.put(other, content[one], sums[one])

                self.expect_found(damage, [one, other])

    def test_an_older_generation_of_a_slot_is_found(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                damage = self.damaged(seed)
                position, _ = damage.draw_block()
                older = draw_blocks(damage.ends.source.layout, 1, seed + 2)
                sums = self.sums_of(damage.ends.source, older, [b"an earlier key.."])

                damage.put(position, older[0], sums[0])

                self.expect_found(damage, [position])

    def test_exchanged_layers_are_found(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                damage = self.damaged(seed)

                position = damage.exchange_cells(seed, "layer")

                self.expect_found(damage, [position])

    def test_exchanged_heads_are_found(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                headed = [
                    kind for kind, layout in LAYOUTS.items() if layout.groups[0].heads is not None
                ]
                damage = self.damaged(seed, headed)

                position = damage.exchange_cells(seed, "head")

                self.expect_found(damage, [position])

    def test_a_zeroed_tail_is_found(self) -> None:
        for seed in SEEDS:
            with failing_seed(seed):
                damage = self.damaged(seed)
                position, content = damage.draw_block()

                content[damage.random.integers(len(content)) :] = 0
                damage.put(position, content)

                self.expect_found(damage, [position])

    def test_sums_of_a_block_that_was_not_delivered_are_not_either(self) -> None:
        damage = self.damaged(0)
        target = damage.ends.target
        kept = target.sums(np.arange(6, dtype=np.int32)) if isinstance(target, KeepsSums) else None

        for position in range(3):
            damage.put(position, damage.read()[0][position] ^ 0xFF)

        self.expect_found(damage, range(3))
        if isinstance(target, KeepsSums):
            np.testing.assert_array_equal(target.sums(np.arange(6, dtype=np.int32)), kept)


class LoadingMoverSuite(CheckingMoverSuite):
    """Movers out of a tier that keeps sums into the engine's memory."""

    purpose = Purpose.LOAD

    @pytest.mark.parametrize("kind", GROUPED)
    def test_groups_of_one_block_go_to_slots_of_their_own(self, kind: str) -> None:
        self.expect_scattered(kind, [[5, 3, 4], [4, 5, 0]])

    @pytest.mark.parametrize("kind", GROUPED)
    @pytest.mark.parametrize("group", [0, 1])
    def test_a_group_that_does_not_need_a_block_gets_nothing(self, kind: str, group: int) -> None:
        targets = [[5, 3, 4], [4, 5, 0]]
        targets[group][1] = NOWHERE

        self.expect_scattered(kind, targets)

    def test_a_block_that_no_group_needs_goes_nowhere(self) -> None:
        self.expect_scattered("two groups", [[5, NOWHERE, 4], [4, NOWHERE, 0]])
        self.expect_scattered("latent", [[5, NOWHERE, 4]])

    def expect_scattered(self, kind: str, targets: list[list[int]]) -> None:
        """Every group's bytes are in the slot that its row names, and nowhere else."""
        layout = LAYOUTS[kind]
        ends = self.make_ends(layout)
        content = self.fill(ends.source, SOURCES, seed=1)
        self.fill(ends.target, range(6), seed=2)
        expected = read_slots(ends.target)
        for row, span in zip(targets, _bytes_of_groups(layout), strict=True):
            for position, slot in enumerate(row):
                if slot != NOWHERE:
                    expected[slot, span] = content[position, span]

        ends.mover.submit(self.copy(1, SOURCES, targets))
        moved = poll_until_idle(ends.mover)

        assert moved == [Moved(self.copy(1).operation)]
        np.testing.assert_array_equal(read_slots(ends.target), expected)


class _Damage:
    """Two ends, and ways to spoil what lies in the source."""

    def __init__(self, ends: Ends, random: np.random.Generator) -> None:
        self.ends = ends
        self.random = random

    def draw_block(self) -> tuple[int, NDArray[np.uint8]]:
        position = int(self.random.integers(3))
        return position, self.read()[0][position]

    def read(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """The blocks of the copy, and their sums."""
        assert isinstance(self.ends.source, KeepsSums)
        sums = self.ends.source.sums(np.array(SOURCES, dtype=np.int32))
        return read_slots(self.ends.source, SOURCES), sums

    def put(
        self, position: int, content: NDArray[np.uint8], sums: NDArray[np.uint64] | None = None
    ) -> None:
        slot = SOURCES[position]
        write_slots(self.ends.source, [slot], content[np.newaxis])
        if sums is not None:
            assert isinstance(self.ends.source, KeepsSums)
            self.ends.source.keep_sums(np.array([slot], dtype=np.int32), sums[np.newaxis])

    def exchange_cells(self, seed: int, differing: str) -> int:
        """Exchanges two cells of a block that differ in layer or head; returns its position."""
        position = int(self.random.integers(3))
        content, sums = (table[position] for table in self.read())
        one, other = _draw_cells(self.ends.source.layout.cells, differing, self.random)
        here, there = (
            slice(cell.start, cell.start + cell.length)
            for cell in (self.ends.source.layout.cells[at] for at in (one, other))
        )
        content[here], content[there] = content[there].copy(), content[here].copy()
        if seed % 2:
            sums[[one, other]] = sums[[other, one]]
        self.put(position, content, sums)
        return position


def _draw_cells(
    cells: Sequence[Cell], differing: str, random: np.random.Generator
) -> tuple[int, int]:
    pairs = [
        (one, other)
        for one, a in enumerate(cells)
        for other, b in enumerate(cells[:one])
        if (a.layer != b.layer) == (differing == "layer") and a.length == b.length
    ]
    return pairs[int(random.integers(len(pairs)))]


def _bytes_of_groups(layout: Layout) -> list[slice]:
    """Where the bytes of each group lie in a packed block."""
    spans: list[slice] = []
    start = 0
    for group in layout.groups:
        spans.append(slice(start, start + group.block_bytes))
        start += group.block_bytes
    return spans
