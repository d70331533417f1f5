"""Copies from memory to memory, where the conformance suite does not look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.cache.operations import BlockFault, Purpose
from penstock.movers.memcpy import MemcpyMover
from penstock.testing.mover_suite import LIFE, keys_of, make_copy, poll_until_idle
from penstock.testing.tier_suite import LAYOUTS, draw_blocks, read_slots, write_slots
from penstock.tiers.arrays import ArrayTier
from penstock.tiers.host import HostTier, MemoryTier
from penstock.vocabulary.checksums import Algorithm, CellSpan, life_salt
from penstock.vocabulary.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUT = LAYOUTS["K and V apart"]


def device_of(layout: Layout) -> ArrayTier:
    sizes = layout.buffer_bytes.values()
    return ArrayTier(layout, [np.zeros(size, dtype=np.uint8) for size in sizes])


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_blocks_come_back_as_they_were_saved_through_two_tiers(
    kind: str, algorithm: Algorithm
) -> None:
    device = device_of(LAYOUTS[kind])
    host, far = MemoryTier(device.layout, 9), MemoryTier(device.layout, 12)
    content = draw_blocks(device.layout, 6, seed=1)
    write_slots(device, range(6), content)
    keys = keys_of(6)

    hops = [(device, host, Purpose.SAVE), (host, far, Purpose.SAVE)]
    hops += [(far, host, Purpose.STAGE), (host, device, Purpose.LOAD)]
    slots = list(range(6))
    for source, target, purpose in hops:
        mover = MemcpyMover(source, target, algorithm)
        targets = [(5 * slot + 2) % target.slot_count for slot in range(6)]
        mover.submit(make_copy(1, slots, targets, purpose=purpose, keys=keys))
        (moved,) = poll_until_idle(mover)
        assert not moved.faults
        slots = targets

    np.testing.assert_array_equal(read_slots(device, slots), content)


@pytest.mark.parametrize(("block_bytes", "count"), [(24, 200), (20_000, 7), (3_000_000, 3)])
def test_a_copy_of_any_size_arrives_whole_but_for_its_faults(block_bytes: int, count: int) -> None:
    layout = Layout.opaque(
        layers=range(2),
        block_bytes=block_bytes,
        encoding="bytes",
        block_tokens=4,
        block_count=count,
    )
    device, host = device_of(layout), MemoryTier(layout, count)
    content = draw_blocks(layout, count, seed=1)
    write_slots(device, range(count), content)
    slots = list(range(count))
    save, load = (MemcpyMover(*ends, Algorithm.XXH3) for ends in ((device, host), (host, device)))
    save.submit(make_copy(1, slots, slots[::-1], purpose=Purpose.SAVE, keys=keys_of(count)))
    poll_until_idle(save)
    host.blocks([0]).buffers[0][layout.block_bytes + 5] ^= 1
    write_slots(device, range(count), np.zeros_like(content))

    load.submit(make_copy(2, slots[::-1], slots, purpose=Purpose.LOAD, keys=keys_of(count)))
    (moved,) = poll_until_idle(load)

    # The second slot of the host holds the last block but one.
    content[count - 2] = 0
    assert moved.faults == ((count - 2, BlockFault.CORRUPT),)
    np.testing.assert_array_equal(read_slots(device, slots), content)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("targets", [range(2, 8), (7, 3, 4, 0, 6, 1)], ids=["a run", "apart"])
def test_blocks_are_packed_and_summed_in_slots_that_are_longer_than_they(
    targets: Sequence[int], algorithm: Algorithm
) -> None:
    layout = Layout.opaque(
        layers=range(3), block_bytes=1_700, encoding="bytes", block_tokens=4, block_count=6
    )
    device = device_of(layout)
    content = draw_blocks(layout, 6, seed=1)
    write_slots(device, range(6), content)
    keys = keys_of(6)

    with HostTier.create(layout, 9, huge_pages=False) as host:
        mover = MemcpyMover(device, host, algorithm)
        mover.submit(make_copy(1, range(6), targets, purpose=Purpose.SAVE, keys=keys))
        (moved,) = poll_until_idle(mover, budget_bytes=4 * layout.block_bytes)

        assert host.slot_bytes > layout.block_bytes
        assert not moved.faults
        np.testing.assert_array_equal(read_slots(host, targets), content)
        salt = life_salt(*LIFE)
        sums = CellSpan.of(layout).sum_blocks(content, keys, algorithm, salt=salt)
        np.testing.assert_array_equal(host.sums(np.array(targets, dtype=np.int32)), sums)


def test_sums_of_one_algorithm_mean_nothing_to_the_other() -> None:
    device, host = device_of(LAYOUT), MemoryTier(LAYOUT, 6)
    write_slots(device, [0], draw_blocks(LAYOUT, 1, seed=1))
    save = MemcpyMover(device, host, Algorithm.XXH3)
    save.submit(make_copy(1, [0], [0], purpose=Purpose.SAVE, keys=keys_of(1)))
    poll_until_idle(save)

    load = MemcpyMover(host, device, Algorithm.MIX64)
    load.submit(make_copy(2, [0], [1], purpose=Purpose.LOAD, keys=keys_of(1)))
    (moved,) = poll_until_idle(load)

    assert moved.faults == ((0, BlockFault.CORRUPT),)


def test_a_duplicate_needs_neither_a_key_nor_sums() -> None:
    device = device_of(LAYOUT)
    content = draw_blocks(LAYOUT, 1, seed=1)
    write_slots(device, [3], content)
    mover = MemcpyMover(device, device, Algorithm.XXH3)

    mover.submit(make_copy(1, [3], [1], purpose=Purpose.DUPLICATE, keys=[b""]))
    poll_until_idle(mover)

    np.testing.assert_array_equal(read_slots(device, [1]), content)


def test_faults_found_before_a_copy_was_abandoned_are_reported() -> None:
    device, host = device_of(LAYOUT), MemoryTier(LAYOUT, 6)
    mover = MemcpyMover(host, device, Algorithm.XXH3)
    copy = make_copy(1, [0, 1], [0, 1], purpose=Purpose.LOAD, keys=keys_of(2))
    mover.submit(copy)
    mover.poll(budget_bytes=1)

    # The slots were never written, so the sums of the first block were wrong.
    mover.abandon(copy.operation)
    (moved,) = poll_until_idle(mover)

    assert moved.faults == ((0, BlockFault.CORRUPT),)


def test_blocks_that_fail_their_sums_count_against_the_budget() -> None:
    device, host = device_of(LAYOUT), MemoryTier(LAYOUT, 6)
    mover = MemcpyMover(host, device, Algorithm.XXH3)
    mover.submit(make_copy(1, [0, 1], [0, 1], purpose=Purpose.LOAD, keys=keys_of(2)))

    moved, spent = mover.poll(budget_bytes=LAYOUT.block_bytes)

    assert moved == []
    assert spent == LAYOUT.block_bytes


def test_tiers_whose_blocks_have_different_cells_exchange_nothing() -> None:
    device, host = device_of(LAYOUT), MemoryTier(LAYOUTS["latent"], 6)

    with pytest.raises(ValueError, match="different cells: their forms differ"):
        MemcpyMover(device, host, Algorithm.XXH3)
