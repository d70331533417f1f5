"""Compiled packing does what NumPy does, to the byte, and refuses what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.handoff.driver.parts import PartGather, PartScatter, RouteParts
from penstock.movers.packing import (
    PackedSums,
    Packing,
    seeds_of,
)
from penstock.tiers.arrays import ArrayTier
from penstock.vocabulary.checksums import Algorithm, CellSpan
from penstock.vocabulary.form import Form
from penstock.vocabulary.layout import HeadRange, Layout
from penstock.vocabulary.planes import Axis, DType
from penstock.vocabulary.reshard import plan_reshard

if TYPE_CHECKING:
    from penstock.handoff.driver.parts import PartForm

HEAD_MAJOR = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CHANNEL)
TOKEN_MAJOR = (Axis.BLOCK, Axis.TOKEN, Axis.HEAD, Axis.CHANNEL)
SLOTS, TARGETS = [5, 0, 7, 2], [1, 6, 3, 4]
KEYS = [b"key %d" % n for n in range(4)]


def split(
    *,
    channels: int,
    dtype: DType,
    order: tuple[Axis, ...],
    heads: HeadRange,
    block_tokens: int = 16,
) -> Layout:
    return Layout.split(
        layers=range(3),
        heads=heads,
        channels=channels,
        dtype=dtype,
        block_tokens=block_tokens,
        block_count=8,
        order=order,
    )


ALL, SOME = HeadRange.all_of(4), HeadRange(first=1, count=2, total=4)
CASES = {
    "head major": (
        split(channels=64, dtype=DType.BF16, order=HEAD_MAJOR, heads=ALL),
        split(channels=64, dtype=DType.BF16, order=HEAD_MAJOR, heads=ALL),
    ),
    "token major to some heads": (
        split(channels=64, dtype=DType.BF16, order=TOKEN_MAJOR, heads=ALL),
        split(channels=64, dtype=DType.BF16, order=HEAD_MAJOR, heads=SOME),
    ),
    "rows of odd length": (
        split(channels=21, dtype=DType.FP8_E4M3, order=TOKEN_MAJOR, heads=ALL),
        split(channels=21, dtype=DType.FP8_E4M3, order=TOKEN_MAJOR, heads=ALL),
    ),
    "long rows": (
        split(channels=512, dtype=DType.FP32, order=HEAD_MAJOR, heads=ALL),
        split(channels=512, dtype=DType.FP32, order=TOKEN_MAJOR, heads=ALL),
    ),
    "short rows": (
        split(channels=3, dtype=DType.FP8_E4M3, order=HEAD_MAJOR, heads=ALL),
        split(channels=3, dtype=DType.FP8_E4M3, order=TOKEN_MAJOR, heads=SOME),
    ),
    "few rows": tuple(
        split(channels=64, dtype=DType.FP8_E4M3, order=TOKEN_MAJOR, heads=ALL, block_tokens=3)
        for _ in range(2)
    ),
    "latent": tuple(
        Layout.mla(layers=range(3), channels=80, dtype=DType.BF16, block_tokens=16, block_count=8)
        for _ in range(2)
    ),
    "opaque": tuple(
        Layout.opaque(
            layers=range(3),
            block_bytes=1000,
            block_stride=1024,
            encoding="some",
            block_tokens=16,
            block_count=8,
        )
        for _ in range(2)
    ),
}


def filled(layout: Layout, seed: int, *, shift: int = 0) -> ArrayTier:
    """A tier of random bytes, in memory that begins so many bytes behind a page."""
    chance = np.random.default_rng(seed)
    arrays = []
    for _, size in sorted(layout.buffer_bytes.items()):
        memory = np.empty(size + 8192, dtype=np.uint8)
        first = -memory.ctypes.data % 4096 + shift
        arrays.append(memory[first : first + size])
        arrays[-1][:] = chance.integers(0, 256, size, dtype=np.uint8)
    return ArrayTier(layout, arrays)


def bytes_of(tier: ArrayTier) -> list[bytes]:
    return [bytes(buffer) for buffer in tier.blocks(()).buffers.values()]


def route_of(source: Layout, target: Layout) -> tuple[RouteParts, PartForm]:
    forms = Form(layout=source), Form(layout=target)
    plan = plan_reshard([forms[0]], [forms[1]])
    parts = RouteParts(plan, plan.routes[0], *forms)
    return parts, parts.form_of(1, 3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shift", [0, 16, 3])
def test_compiled_code_packs_and_puts_away_the_same_bytes(
    case: str, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = CASES[case]
    parts, form = route_of(source, target)
    held = filled(source, 1, shift=shift)
    found, wanted = (filled(target, 2, shift=shift) for _ in range(2))
    fast, plain = (np.zeros(4 * form.block_bytes, dtype=np.uint8) for _ in range(2))
    gather = PartGather(form, held, Algorithm.XXH3)
    scatter = PartScatter(parts, form, found, Algorithm.XXH3)
    monkeypatch.setattr(Packing, "of", classmethod(lambda *_, **__: None))
    slow_gather = PartGather(form, held, Algorithm.XXH3)
    slow_scatter = PartScatter(parts, form, wanted, Algorithm.XXH3)

    sums = gather.gather(SLOTS, KEYS, fast)
    intact = scatter.scatter(fast, KEYS, sums, TARGETS)

    assert gather._packing is not None
    assert scatter._packing is not None
    assert sums == slow_gather.gather(SLOTS, KEYS, plain)
    assert bytes(fast) == bytes(plain)
    assert intact
    assert slow_scatter.scatter(plain, KEYS, sums, TARGETS)
    assert bytes_of(found) == bytes_of(wanted)


@pytest.mark.parametrize("wrong", ["byte", "key", "sum"])
def test_a_block_that_is_not_intact_is_not_put_away(wrong: str) -> None:
    source, target = CASES["head major"]
    parts, form = route_of(source, target)
    held, found, before = filled(source, 1), filled(target, 2), filled(target, 2)
    berth = np.zeros(4 * form.block_bytes, dtype=np.uint8)
    sums = bytearray(PartGather(form, held, Algorithm.XXH3).gather(SLOTS, KEYS, berth))
    keys = list(KEYS)
    if wrong == "byte":
        berth[form.block_bytes + 777] ^= 1
    elif wrong == "key":
        keys[1] = b"another"
    else:
        sums[8 * form.cell_count + 3] ^= 1

    intact = PartScatter(parts, form, found, Algorithm.XXH3).scatter(
        berth, keys, bytes(sums), TARGETS
    )

    assert not intact
    old, new = before.blocks(()).buffers, found.blocks(()).buffers
    for plane in (plane for layer in target.groups[0].layers for plane in layer.planes):
        views = plane.view(old[plane.buffer]), plane.view(new[plane.buffer])
        np.testing.assert_array_equal(*(view[TARGETS[1:]] for view in views))


def test_what_does_not_fit_is_refused_before_a_byte_is_touched() -> None:
    source, _ = CASES["head major"]
    tier = filled(source, 1)
    packing = Packing.of(source, tier.blocks(()).buffers, Algorithm.XXH3)
    assert packing is not None
    room = np.zeros(4 * packing.block_bytes, dtype=np.uint8)

    seeds = seeds_of(tuple(KEYS))
    places = np.arange(4) * packing.block_bytes
    reported = np.zeros((4, packing.cell_count), dtype=np.uint64)

    with pytest.raises(ValueError, match="4 slots, 3 seeds"):
        packing.pack(SLOTS, seeds[:3], room)
    with pytest.raises(ValueError, match=f"each need {4 * packing.block_bytes}"):
        packing.pack(SLOTS, seeds, room[:-1])
    with pytest.raises(ValueError, match="not all within"):
        packing.pack(SLOTS, seeds, room, places + 1)
    with pytest.raises(ValueError, match="not all within"):
        packing.put_away(room, seeds, reported, SLOTS, places - 1)
    with pytest.raises(ValueError, match="expected has shape"):
        packing.put_away(room, seeds, reported[:3], SLOTS)

    assert not room.any()


def test_other_sums_are_left_to_numpy() -> None:
    layout, _ = CASES["head major"]

    assert Packing.of(layout, filled(layout, 1).blocks(()).buffers, Algorithm.MIX64) is None


PACKED_CASES = {
    "whole stripes": split(channels=64, dtype=DType.BF16, order=HEAD_MAJOR, heads=ALL),
    "odd lengths": split(channels=21, dtype=DType.FP8_E4M3, order=HEAD_MAJOR, heads=ALL),
    "long": split(channels=512, dtype=DType.FP32, order=HEAD_MAJOR, heads=SOME),
    "short": split(channels=3, dtype=DType.FP8_E4M3, order=HEAD_MAJOR, heads=ALL),
}


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)
@pytest.mark.parametrize("case", PACKED_CASES)
def test_sums_in_place_under_two_salts_are_those_of_the_definition(
    case: str, algorithm: Algorithm
) -> None:
    layout = PACKED_CASES[case]
    size, salts = layout.block_bytes, (0, 0x8000_0000_1234_5678)
    memory = np.random.default_rng(1).integers(0, 256, 5 * size + 100, dtype=np.uint8)
    places = np.array([3, size + 9, 4 * size + 100, 2 * size + 64], dtype=np.int64)

    sums = PackedSums(layout, algorithm).sum_pairs(memory, places, KEYS, salts)

    span = CellSpan.of(layout)
    for number, salt in enumerate(salts):
        for position, place in enumerate(places):
            block = memory[np.newaxis, place : place + size]
            expected = span.sum_blocks(block, [KEYS[position]], algorithm, salt=salt)
            np.testing.assert_array_equal(sums[number, position], expected[0])


def test_sums_of_every_length_are_those_of_the_definition() -> None:
    memory = np.random.default_rng(2).integers(0, 256, 600, dtype=np.uint8)
    places, salts = np.array([1, 290], dtype=np.int64), (7, 0x8000_0000_1234_5678)

    for length in range(1, 300):
        layout = Layout.opaque(
            layers=range(1), block_bytes=length, encoding="some", block_tokens=16, block_count=8
        )
        sums = PackedSums(layout, Algorithm.XXH3).sum_pairs(memory, places, KEYS[:2], salts)
        blocks = np.stack([memory[at : at + length] for at in places])
        for found, salt in zip(sums, salts, strict=True):
            expected = CellSpan.of(layout).sum_blocks(blocks, KEYS[:2], Algorithm.XXH3, salt=salt)
            np.testing.assert_array_equal(found, expected)


def test_sums_in_place_refuse_what_is_not_in_memory() -> None:
    layout = PACKED_CASES["whole stripes"]
    sums = PackedSums(layout, Algorithm.XXH3)
    memory = np.zeros(layout.block_bytes + 5, dtype=np.uint8)

    with pytest.raises(ValueError, match="are not all within"):
        sums.sum_pairs(memory, np.array([6], dtype=np.int64), KEYS[:1], (0, 0))
    with pytest.raises(ValueError, match="1 places and 2 keys, must be as many"):
        sums.sum_pairs(memory, np.array([0], dtype=np.int64), KEYS[:2], (0, 0))


@pytest.mark.parametrize("algorithm", Algorithm, ids=lambda each: each.value)
@pytest.mark.parametrize("case", PACKED_CASES)
def test_blocks_of_another_are_taken_with_their_sums_and_those_that_lack_them_told(
    case: str, algorithm: Algorithm
) -> None:
    layout = PACKED_CASES[case]
    size, taker = layout.block_bytes, PackedSums(layout, algorithm)
    row, salts = len(layout.cells) * 8, (5, 0x8000_0000_1234_5678)
    theirs = np.random.default_rng(2).integers(0, 256, 4 * (size + row), dtype=np.uint8)
    here = np.zeros_like(theirs)
    at = np.arange(4, dtype=np.int64)
    blocks, sums = at * size, 4 * size + at * row
    stored = taker.sum_pairs(theirs, blocks, KEYS, salts)
    theirs[4 * size :] = stored[0].view(np.uint8).reshape(-1)
    theirs[size] ^= 1  # The second block,
    theirs[4 * size + 2 * row] ^= 1  # and a sum of the third.
    places = np.stack((blocks, sums, blocks[::-1], sums[::-1]), axis=1)

    right = taker.take(theirs, here, places, KEYS, salts)

    assert right.tolist() == [True, False, False, True]
    for block in np.flatnonzero(right).tolist():
        to, sums_to = places[block, 2:].tolist()
        np.testing.assert_array_equal(here[to : to + size], theirs[block * size :][:size])
        kept = here[sums_to : sums_to + row].view(np.uint64)
        np.testing.assert_array_equal(kept, stored[1, block].reshape(-1))
    assert not here[places[1, 3] :][:row].any()
    with pytest.raises(ValueError, match="are not all within"):
        taker.take(theirs, here, places + 1, KEYS, salts)
    theirs.flags.writeable = False
    assert taker.take(theirs, here, places, KEYS, salts).tolist() == right.tolist()
    with pytest.raises(ValueError, match="cannot be written"):
        taker.take(here, theirs, places, KEYS, salts)
