"""Packed blocks and their sums in shared memory, and the configuration that asks for them."""

from __future__ import annotations

import logging
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import penstock
from lab.fixtures.cell_sums import CellSums, faults_of
from lab.fixtures.extents import block_extents
from penstock.cache.states import LeaseState
from penstock.config import parse_config
from penstock.errors import ConfigError
from penstock.runtime.tiers import build_lower_tiers
from penstock.testing.tier_suite import LAYOUTS, draw_blocks, read_slots, write_slots
from penstock.tiers.arena import Arena, MemoryCalls
from penstock.tiers.host import HostTier, slot_bytes, slots_in, tier_bytes
from penstock.vocabulary.checksums import Algorithm, CellSpan
from penstock.vocabulary.layout import Layout
from tests.descriptors import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import Config

LAYOUT = LAYOUTS["latent"]
KEYS = [bytes([number]) * 16 for number in range(3)]
ALL = np.arange(3, dtype=np.int32)


def opaque(block_bytes: int, layers: int = 1) -> Layout:
    return Layout.opaque(
        layers=range(layers),
        block_bytes=block_bytes,
        encoding="bytes",
        block_tokens=4,
        block_count=2,
    )


def configured(tier: str, *, more: str = "") -> Config:
    return parse_config(
        'version = 1\n[model]\nname = "none"\n[cache]\nblocks = 8\nblock_tokens = 4\n'
        f'[[tiers]]\nname = "host"\nkind = "host"\n{tier}\n{more}'
    )


# How blocks lie.


@pytest.mark.parametrize(
    ("block_bytes", "distance"),
    [(1, 512), (512, 512), (513, 1024), (4095, 4096), (4096, 4096), (4097, 8192), (9000, 12288)],
)
def test_blocks_start_where_direct_io_can_reach_them(block_bytes: int, distance: int) -> None:
    tier = HostTier.create(opaque(block_bytes), slot_count=3)

    offsets = [block_extents(tier.layout, slot)[0].offset for slot in range(3)]

    assert slot_bytes(opaque(block_bytes)) == tier.slot_bytes == distance
    assert offsets == [0, distance, 2 * distance]
    assert (tier.arena.address + tier.blocks_offset) % mmap.PAGESIZE == 0


def test_the_sums_of_all_slots_lie_in_front_of_the_blocks() -> None:
    tier = HostTier.create(LAYOUT, slot_count=3)
    sums = np.arange(3 * len(LAYOUT.cells), dtype=np.uint64).reshape(3, -1)

    tier.keep_sums(ALL, sums)
    write_slots(tier, [0, 1, 2], draw_blocks(LAYOUT, 3, seed=1))

    table = tier.arena.bytes[: sums.nbytes].view(np.uint64)
    np.testing.assert_array_equal(table, sums.reshape(-1))
    assert tier.blocks_offset == mmap.PAGESIZE


def test_a_fresh_tier_holds_zeros() -> None:
    tier = HostTier.create(LAYOUT, slot_count=3)

    assert not read_slots(tier, range(3)).any()
    assert not tier.sums(ALL).any()


@pytest.mark.parametrize("block_bytes", [700, 4096, 5000])
def test_a_piece_to_register_holds_whole_slots_and_whole_pages(block_bytes: int) -> None:
    tier = HostTier.create(opaque(block_bytes), slot_count=100)
    first = tier.arena.address + tier.blocks_offset

    pieces = tier.extents(5 * 8192)

    assert len(pieces) > 1
    address = first
    for start, length in pieces:
        assert start == address
        assert start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
        assert (start - first) % tier.slot_bytes == 0
        assert length <= 5 * 8192
        address += length
    assert address >= first + 100 * tier.slot_bytes
    assert address <= tier.arena.address + tier.arena.size


def test_a_piece_smaller_than_a_slot_is_refused() -> None:
    tier = HostTier.create(opaque(5000), slot_count=4)

    with pytest.raises(ValueError, match="max_bytes is 4096, must be at least 8192"):
        tier.extents(4096)


def test_a_closed_tier_gives_its_arena_back() -> None:
    with HostTier.create(LAYOUT, slot_count=3) as tier:
        fd = tier.arena.fd
    tier.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# Sharing.


def test_what_one_rank_writes_another_reads_and_verifies() -> None:
    writer = HostTier.create(LAYOUT, slot_count=3)
    reader = HostTier.attach(writer.arena.fd, LAYOUT, 3, writable=False)
    content = draw_blocks(LAYOUT, 3, seed=1)
    span = CellSpan.of(LAYOUT)

    write_slots(writer, range(3), content)
    writer.keep_sums(ALL, span.sum_blocks(content, KEYS, Algorithm.XXH3))

    seen = read_slots(reader, range(3))
    tables = [CellSums.of(row) for row in reader.sums(ALL)]
    np.testing.assert_array_equal(seen, content)
    assert faults_of(span, seen, KEYS, tables, Algorithm.XXH3) == []
    assert faults_of(span, seen, KEYS[::-1], tables, Algorithm.XXH3) != []


def test_a_rank_that_reads_cannot_write() -> None:
    writer = HostTier.create(LAYOUT, slot_count=3)
    reader = HostTier.attach(writer.arena.fd, LAYOUT, 3, writable=False)

    with pytest.raises(ValueError, match="read-only"):
        write_slots(reader, [1], draw_blocks(LAYOUT, 1, seed=1))
    with pytest.raises(ValueError, match="read-only"):
        reader.keep_sums(ALL, np.ones((3, len(LAYOUT.cells)), dtype=np.uint64))
    assert not writer.arena.bytes.any()


def test_an_arena_that_was_made_for_other_blocks_is_refused() -> None:
    tier = HostTier.create(LAYOUT, slot_count=3)
    before = open_descriptors()

    for layout, slots in ((LAYOUT, 30), (opaque(9000), 3)):
        with pytest.raises(ValueError, match=rf"fd {tier.arena.fd} is an arena of \d+ bytes, "):
            HostTier.attach(tier.arena.fd, layout, slots)

    assert open_descriptors() <= before


def test_an_arena_that_is_too_small_is_refused() -> None:
    with Arena.create(4096) as arena, pytest.raises(ValueError, match="30 slots of this layout"):
        HostTier(LAYOUT, 30, arena)


# Sizes.


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("slots", [1, 2, 77, 4097])
def test_a_size_is_turned_into_as_many_slots_as_fit(kind: str, slots: int) -> None:
    layout = LAYOUTS[kind]
    size = tier_bytes(layout, slots)

    assert slots_in(size, layout.block_bytes, len(layout.cells)) == slots
    assert slots_in(size - 1, layout.block_bytes, len(layout.cells)) == slots - 1


def test_a_tier_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="slot_count is 0, must be at least 1"):
        HostTier.create(LAYOUT, slot_count=0)


# From the configuration to a tier.


def kv_of(tokens: Sequence[int]) -> np.ndarray:
    """The KV of a token follows from all tokens up to it: [tokens, channels]."""
    past = np.cumsum(np.array(tokens, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15))
    return past[:, np.newaxis] * np.arange(1, 4, dtype=np.uint64)


def chat(cache: penstock.Cache, kv: np.ndarray, tokens: Sequence[int]) -> int:
    """One request: what is cached is checked, the rest is computed. Returns what was cached."""
    with cache.acquire(tokens) as lease:
        for _ in range(100):
            if lease.state is not LeaseState.LOADING:
                break
            cache.step()
        cached = lease.cached_tokens
        held = kv[lease.block_table].reshape(-1, 3)
        np.testing.assert_array_equal(held[:cached], kv_of(tokens)[:cached])
        for position in range(cached, len(tokens)):
            block, row = divmod(position, 4)
            kv[lease.block_table[block], row] = kv_of(tokens)[position]
        lease.commit(tokens[cached:])
    while cache.busy:
        cache.step()
    return cached


@pytest.mark.parametrize("size", ["blocks = 64", "gib = 0.001"])
def test_a_chat_is_found_in_the_host_tier_when_the_device_has_forgotten_it(size: str) -> None:
    kv = np.zeros((8, 4, 3), dtype=np.uint64)
    cache = penstock.open(configured(size), kv=kv)
    question = list(range(100, 121))
    chat(cache, kv, question)
    for other in range(4):
        chat(cache, kv, list(range(1000 * other, 1000 * other + 30)))
    kv_before = cache.statistics().tiers[1].tokens_cached

    cached = chat(cache, kv, [*question, *range(121, 127)])

    assert cached == 20
    assert cache.statistics().tiers[1].tokens_cached - kv_before == 20
    cache.audit()


def test_a_size_in_gib_becomes_slots_when_the_blocks_are_known() -> None:
    layout = opaque(10_000, layers=2)

    lower = build_lower_tiers(configured("gib = 0.01"), layout)

    slots = int(0.01 * 2**30) // (20_480 + 2 * 8)
    (tier,) = lower.stores
    assert lower.settings.tiers[0].slot_count == slots
    assert tier is not None
    assert tier.slot_count == slots


def test_a_tier_is_made_as_the_configuration_says(caplog: pytest.LogCaptureFixture) -> None:
    config = configured('blocks = 16\nhuge_pages = "never"\nnuma_node = -1')

    with caplog.at_level(logging.INFO, logger="penstock"):
        (tier,) = build_lower_tiers(config, LAYOUT).stores

    assert isinstance(tier, HostTier)
    assert tier.arena.fallbacks == ()
    (line,) = caplog.messages
    assert line.startswith("host tier ready: name=host blocks=16 gib=0.00 pages=plain ")
    assert f"numa_node=any ready_s={tier.arena.ready_s:.2f} fallbacks=none" in line


def small_machine(path: str) -> str:
    files = {
        "/proc/meminfo": "MemAvailable: 2048 kB\n",
        "/sys/devices/system/node/online": "0-1\n",
    }
    return files.get(path, "")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            "gib = 0.5",
            "tiers[0].gib: is 0.5, needs 512.0 MiB, must be at most the 2.0 MiB that are "
            "available: MemAvailable in /proc/meminfo",
        ),
        (
            "blocks = 1000",
            "tiers[0].blocks: is 1000, needs 7.8 MiB, must be at most the 2.0 MiB that are "
            "available: MemAvailable in /proc/meminfo",
        ),
        (
            "gib = 1e-6",
            "tiers[0].gib: is 1e-06, must have room for one block, which takes 12288 bytes with "
            "its sums",
        ),
        (
            "gib = 65536",
            "tiers[0].gib: is 65536.0, must have room for at most 2147483647 blocks; it has for "
            "8581554168",
        ),
        ("blocks = 4\nnuma_node = 5", "tiers[0].numa_node: is 5, must be one of 0, 1"),
    ],
)
def test_a_tier_that_does_not_fit_is_refused_in_the_words_of_the_file(
    size: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_lower_tiers(configured(size), opaque(5000), kernel=MemoryCalls(read=small_machine))

    assert str(refusal.value) == message


def test_opening_a_cache_that_this_machine_cannot_hold_is_refused() -> None:
    kv = np.zeros((8, 4, 3000), dtype=np.uint64)

    with pytest.raises(ConfigError, match=r"tiers\[0\]\.gib: is 65536\.0, needs 65536\.00 GiB"):
        penstock.open(configured("gib = 65536"), kv=kv)


def test_a_tier_below_is_checked_again_when_the_slots_above_are_known() -> None:
    below = '[[tiers]]\nname = "low"\nkind = "memory"\nblocks = 64\nwrite = "write_back"'
    above = "gib = 0.001\nlow_watermark = 0.01\nhigh_watermark = 0.02"
    config = configured(above, more=below)

    with pytest.raises(ConfigError, match="tier 'low': write: is 'write_back', but low_watermark"):
        build_lower_tiers(config, opaque(20_000))
