"""The engine's own arrays as a tier: read by their strides, refused when they do not fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.extents import block_extents
from penstock.testing.tier_suite import LAYOUTS, draw_blocks, read_slots, write_slots
from penstock.tiers.arrays import ArrayTier, opaque_layout

if TYPE_CHECKING:
    from penstock.vocabulary.layout import Layout

GAP = 0xEE


def test_the_bytes_stay_in_the_arrays_of_the_engine() -> None:
    kv = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
    tier = ArrayTier(opaque_layout([kv], block_tokens=3), [kv])

    before = read_slots(tier, [2])
    kv[2] = 1.5
    after = read_slots(tier, [2])

    assert before.tobytes() == np.arange(30, 45, dtype=np.float32).tobytes()
    assert after.tobytes() == np.full(15, 1.5, dtype=np.float32).tobytes()


@pytest.mark.parametrize("kind", ["opaque, with gaps", "odd strides"])
def test_bytes_between_the_strides_are_never_written(kind: str) -> None:
    layout = LAYOUTS[kind]
    arrays = [np.full(size, GAP, dtype=np.uint8) for size in layout.buffer_bytes.values()]
    tier = ArrayTier(layout, arrays)
    named = [np.zeros(array.shape, dtype=bool) for array in arrays]
    for slot in range(tier.slot_count):
        for extent in block_extents(layout, slot):
            named[extent.place][extent.offset : extent.offset + extent.length] = True

    write_slots(tier, range(tier.slot_count), draw_blocks(layout, tier.slot_count, seed=1))

    for array, is_named in zip(arrays, named, strict=True):
        assert (array[~is_named] == GAP).all()
        assert not is_named.all()


def test_arrays_may_be_larger_than_the_layout_needs() -> None:
    layout = LAYOUTS["latent"]
    arrays = [np.zeros(size + 100, dtype=np.uint8) for size in layout.buffer_bytes.values()]

    tier = ArrayTier(layout, arrays)

    assert tier.slot_count == layout.block_count


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_arrays_as_the_layout_has_buffers_are_needed(count: int) -> None:
    layout = LAYOUTS["latent"]
    size = layout.buffer_bytes[0]

    # One too many would be a layer that is never cached, and comes back as it was left.
    with pytest.raises(ValueError, match=f"kv has {count} arrays, .* each of its buffers 0, 1"):
        ArrayTier(layout, [np.zeros(size, dtype=np.uint8)] * count)


def test_an_array_that_is_too_small_is_refused() -> None:
    layout = LAYOUTS["latent"]
    sizes = list(layout.buffer_bytes.values())
    arrays = [np.zeros(sizes[0], dtype=np.uint8), np.zeros(sizes[1] - 1, dtype=np.uint8)]

    with pytest.raises(
        ValueError, match=re.escape(f"kv[1] has {sizes[1] - 1} bytes, the layout needs {sizes[1]}")
    ):
        ArrayTier(layout, arrays)


def test_a_view_with_gaps_is_refused_with_a_word_on_what_to_pass() -> None:
    kv = np.zeros((4, 3, 10), dtype=np.float32)[..., ::2]

    with pytest.raises(ValueError, match=r"shape \(4, 3, 5\) is not contiguous; pass the whole"):
        ArrayTier(opaque_layout([kv], block_tokens=3), [kv])


def test_a_read_only_array_is_refused() -> None:
    kv = np.zeros((4, 3), dtype=np.float32)
    kv.flags.writeable = False

    with pytest.raises(ValueError, match=r"shape \(4, 3\) is read-only, must be writable"):
        ArrayTier(opaque_layout([kv], block_tokens=3), [kv])


@pytest.mark.parametrize("shape", [(), (0, 4), (4, 0)])
def test_arrays_without_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"shape {shape} has no blocks")):
        opaque_layout([np.zeros(shape, dtype=np.float32)], block_tokens=4)


def test_arrays_that_disagree_on_their_blocks_need_a_layout() -> None:
    arrays = [np.zeros((4, 2), dtype=np.float32), np.zeros((5, 2), dtype=np.float32)]

    with pytest.raises(ValueError, match="2 arrays with blocks of different number or size"):
        opaque_layout(arrays, block_tokens=4)


def test_without_a_layout_every_array_is_an_opaque_layer() -> None:
    arrays = [np.zeros((4, 2, 3), dtype=np.float32) for _ in range(3)]

    layout = opaque_layout(arrays, block_tokens=2)

    assert layout.block_count == 4
    assert layout.block_bytes == 3 * 2 * 3 * 4
    assert [layer.number for layer in layout.layers] == [0, 1, 2]


def test_dtype_and_shape_are_part_of_an_opaque_form() -> None:
    def encodings(dtype: str, shape: tuple[int, ...]) -> set[str]:
        layout = opaque_layout([np.zeros((4, *shape), dtype=dtype)], block_tokens=2)
        return _encodings(layout)

    assert encodings("<f4", (2, 3)) == encodings("<f4", (2, 3))
    assert encodings("<f4", (2, 3)) != encodings("<i4", (2, 3))
    assert encodings("<f4", (2, 3)) != encodings("<f4", (3, 2))


def _encodings(layout: Layout) -> set[str]:
    return {plane.encoding for layer in layout.layers for plane in layer.planes}
