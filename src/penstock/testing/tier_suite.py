"""Sentences that hold for every tier whose slots are addressable memory.

    class TestMyTier(TierSuite):                  # or SumKeepingTierSuite
        def make_tier(self, layout: Layout) -> MyTier:
            return MyTier(layout, slot_count=layout.block_count)

pytest then runs every sentence on your tier, for each of `LAYOUTS`. The one rule they add up
to: a slot holds what was last written to it, and nothing else does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.tiers.base import KeepsSums
from penstock.vocabulary.layout import Group, GroupKind, HeadRange, Layer, Layout
from penstock.vocabulary.planes import Axis, DType, PlaneRole, plane_from_strides
from penstock.vocabulary.reshard import Blocks, copy_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.tiers.base import SlotStore

SLOT_COUNT = 6
BLOCK_TOKENS = 4
ALL_SLOTS = range(SLOT_COUNT)


def _split(layers: Sequence[int], dtype: DType, scale_dtype: DType | None = None) -> Layout:
    return Layout.split(
        layers=layers,
        heads=HeadRange.all_of(2),
        channels=4,
        dtype=dtype,
        block_tokens=BLOCK_TOKENS,
        block_count=SLOT_COUNT,
        scale_dtype=scale_dtype,
    )


def _packed_kv(heads: HeadRange, order: Sequence[Axis]) -> Layout:
    return Layout.packed_kv(
        layers=range(2),
        heads=heads,
        channels=3,
        dtype=DType.FP32,
        block_tokens=BLOCK_TOKENS,
        block_count=SLOT_COUNT,
        order=order,
    )


def _mla(layers: Sequence[int]) -> Layout:
    return Layout.mla(
        layers=layers,
        channels=9,
        dtype=DType.FP16,
        block_tokens=BLOCK_TOKENS,
        block_count=SLOT_COUNT,
    )


def _opaque(block_stride: int) -> Layout:
    return Layout.opaque(
        layers=range(3),
        block_bytes=37,
        encoding="bytes of an engine",
        block_tokens=BLOCK_TOKENS,
        block_count=SLOT_COUNT,
        block_stride=block_stride,
    )


def _odd_strides() -> Layout:
    """K and V of two layers in one buffer, heads outermost, with gaps of odd length."""
    shape = (2, SLOT_COUNT, BLOCK_TOKENS, 5)
    strides = (1009, 167, 41, 4)
    axes = (Axis.HEAD, Axis.BLOCK, Axis.TOKEN, Axis.CHANNEL)
    layers = tuple(
        Layer(
            number=number,
            planes=tuple(
                plane_from_strides(
                    role,
                    DType.BF16,
                    shape=shape,
                    strides=strides,
                    axes=axes,
                    offset=13 + 2 * role + 2050 * number,
                )
                for role in (PlaneRole.K, PlaneRole.V)
            ),
        )
        for number in range(2)
    )
    group = Group(kind=GroupKind.ATTENTION, layers=layers, heads=HeadRange.all_of(2))
    return Layout(groups=(group,), block_tokens=BLOCK_TOKENS)


def _sliding(layout: Layout) -> Layout:
    return replace(layout, groups=(replace(layout.groups[0], kind=GroupKind.SLIDING),))


_BLOCKS_INSIDE = (Axis.PART, Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)
_BLOCKS_OUTSIDE = (Axis.BLOCK, Axis.PART, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)

LAYOUTS: dict[str, Layout] = {
    "K and V apart": _split(range(2), DType.BF16),
    "K and V apart, with scales": _split(range(2), DType.INT8, DType.FP32),
    "K and V in one array": _packed_kv(HeadRange.all_of(2), _BLOCKS_INSIDE),
    "a block in one run": _packed_kv(HeadRange.all_of(2), _BLOCKS_OUTSIDE),
    "heads of one rank": _packed_kv(HeadRange(first=2, count=2, total=4), _BLOCKS_INSIDE),
    "latent": _mla(range(2)),
    "opaque": _opaque(block_stride=37),
    "opaque, with gaps": _opaque(block_stride=53),
    "odd strides": _odd_strides(),
    "two groups": Layout.join(_split(range(2), DType.BF16), _sliding(_split([2, 3], DType.BF16))),
    "groups of different kinds": Layout.join(_split(range(2), DType.BF16), _mla([2, 3])),
}
"""One of every kind of layout, with `SLOT_COUNT` blocks each."""


def draw_blocks(layout: Layout, count: int, seed: int) -> NDArray[np.uint8]:
    """The packed bytes of some blocks, of shape [blocks, bytes]; none of them is zero."""
    generator = np.random.default_rng(seed)
    return generator.integers(1, 256, size=(count, layout.block_bytes), dtype=np.uint8)


def write_slots(tier: SlotStore, slots: Sequence[int], content: NDArray[np.uint8]) -> None:
    """Writes packed blocks into slots of a tier."""
    copy_blocks(_packed(tier.layout, content), tier.blocks(slots))


def read_slots(tier: SlotStore, slots: Sequence[int] = ALL_SLOTS) -> NDArray[np.uint8]:
    """The packed bytes of slots of a tier, of shape [slots, bytes]."""
    content = np.zeros((len(slots), tier.layout.block_bytes), dtype=np.uint8)
    copy_blocks(tier.blocks(slots), _packed(tier.layout, content))
    return content


def _packed(layout: Layout, content: NDArray[np.uint8]) -> Blocks:
    return Blocks(
        layout=_packed_layout(layout, len(content)),
        buffers={0: content.reshape(-1)},
        numbers=range(len(content)),
    )


@lru_cache(maxsize=256)
def _packed_layout(layout: Layout, count: int) -> Layout:
    # Remembered, because to work it out takes longer than to copy blocks as small as ours.
    return layout.packed(block_count=count)


class TierSuite(ABC):
    """Inherit, name the class `Test...`, and say how the tier is made."""

    @abstractmethod
    def make_tier(self, layout: Layout) -> SlotStore:
        """A fresh tier with a slot for each of the layout's blocks."""

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_a_tier_has_the_slots_and_cells_it_was_made_for(self, kind: str) -> None:
        tier = self.make_tier(LAYOUTS[kind])

        cells = [(cell.group, cell.layer, cell.head, cell.length) for cell in tier.layout.cells]

        assert tier.slot_count == SLOT_COUNT
        assert tier.layout.block_count >= SLOT_COUNT
        assert tier.medium
        assert cells == [(c.group, c.layer, c.head, c.length) for c in LAYOUTS[kind].cells]

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_every_slot_keeps_what_was_written_to_it(self, kind: str) -> None:
        tier = self.make_tier(LAYOUTS[kind])
        content = draw_blocks(tier.layout, SLOT_COUNT, seed=1)

        for slot in ALL_SLOTS:
            write_slots(tier, [slot], content[slot : slot + 1])

        np.testing.assert_array_equal(read_slots(tier), content)

    @pytest.mark.parametrize("slot", ALL_SLOTS)
    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_writing_a_slot_touches_no_other(self, kind: str, slot: int) -> None:
        tier = self.make_tier(LAYOUTS[kind])
        expected = draw_blocks(tier.layout, SLOT_COUNT, seed=1)
        write_slots(tier, ALL_SLOTS, expected)

        expected[slot] = draw_blocks(tier.layout, 1, seed=2)
        write_slots(tier, [slot], expected[slot : slot + 1])

        np.testing.assert_array_equal(read_slots(tier), expected)

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_slots_are_written_and_read_in_the_order_they_are_named(self, kind: str) -> None:
        tier = self.make_tier(LAYOUTS[kind])
        content = draw_blocks(tier.layout, 3, seed=1)

        write_slots(tier, [5, 0, 3], content)

        np.testing.assert_array_equal(read_slots(tier, [3, 5, 0]), content[[2, 0, 1]])

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_what_one_view_writes_another_reads(self, kind: str) -> None:
        tier = self.make_tier(LAYOUTS[kind])
        content = draw_blocks(tier.layout, 1, seed=1)
        seen = np.zeros_like(content)
        earlier = tier.blocks([4])

        write_slots(tier, [4], content)
        copy_blocks(earlier, _packed(tier.layout, seen))

        np.testing.assert_array_equal(seen, content)


class SumKeepingTierSuite(TierSuite):
    """For tiers whose bytes left the device, and that keep their sums."""

    def make_sum_tier(self, layout: Layout) -> tuple[SlotStore, KeepsSums]:
        """The same tier twice: as slots, and as the keeper of their sums."""
        tier = self.make_tier(layout)
        assert isinstance(tier, KeepsSums), f"{type(tier).__name__} does not keep sums"
        return tier, tier

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_every_slot_keeps_its_sums(self, kind: str) -> None:
        _, keeper = self.make_sum_tier(LAYOUTS[kind])
        sums = draw_sums(LAYOUTS[kind], SLOT_COUNT, seed=1)

        for slot in ALL_SLOTS:
            keeper.keep_sums(_slots([slot]), sums[slot : slot + 1])

        np.testing.assert_array_equal(keeper.sums(_slots(ALL_SLOTS)), sums)

    @pytest.mark.parametrize("slot", ALL_SLOTS)
    def test_the_sums_of_a_slot_touch_no_others(self, slot: int) -> None:
        layout = LAYOUTS["K and V apart"]
        _, keeper = self.make_sum_tier(layout)
        expected = draw_sums(layout, SLOT_COUNT, seed=1)
        keeper.keep_sums(_slots(ALL_SLOTS), expected)

        expected[slot] = draw_sums(layout, 1, seed=2)
        keeper.keep_sums(_slots([slot]), expected[slot : slot + 1])

        np.testing.assert_array_equal(keeper.sums(_slots(ALL_SLOTS)), expected)

    def test_sums_are_kept_and_given_in_the_order_slots_are_named(self) -> None:
        layout = LAYOUTS["two groups"]
        _, keeper = self.make_sum_tier(layout)
        sums = draw_sums(layout, 3, seed=1)

        keeper.keep_sums(_slots([5, 0, 3]), sums)

        np.testing.assert_array_equal(keeper.sums(_slots([3, 5, 0])), sums[[2, 0, 1]])

    def test_sums_that_were_read_do_not_change_with_their_slot(self) -> None:
        layout = LAYOUTS["latent"]
        _, keeper = self.make_sum_tier(layout)
        first = draw_sums(layout, 1, seed=1)
        keeper.keep_sums(_slots([2]), first)

        read = keeper.sums(_slots([2]))
        keeper.keep_sums(_slots([2]), draw_sums(layout, 1, seed=2))

        np.testing.assert_array_equal(read, first)

    @pytest.mark.parametrize("kind", LAYOUTS)
    def test_bytes_and_sums_leave_each_other_alone(self, kind: str) -> None:
        tier, keeper = self.make_sum_tier(LAYOUTS[kind])
        content = draw_blocks(tier.layout, SLOT_COUNT, seed=1)
        sums = draw_sums(LAYOUTS[kind], SLOT_COUNT, seed=2)

        keeper.keep_sums(_slots(ALL_SLOTS), sums)
        write_slots(tier, ALL_SLOTS, content)
        keeper.keep_sums(_slots([0]), sums[:1])

        np.testing.assert_array_equal(read_slots(tier), content)
        np.testing.assert_array_equal(keeper.sums(_slots(ALL_SLOTS)), sums)


def draw_sums(layout: Layout, count: int, seed: int) -> NDArray[np.uint64]:
    """Tables of sums, of shape [blocks, cells], that use all 64 bits."""
    generator = np.random.default_rng(seed)
    shape = (count, len(layout.cells))
    return generator.integers(0, 2**64, size=shape, dtype=np.uint64)


def _slots(slots: Sequence[int]) -> NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)
