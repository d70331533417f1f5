"""The index of a disk tier: rows checked by compiled code, digests, the newer copy wins."""

from __future__ import annotations

import tracemalloc

import numpy as np

from penstock.store.base import Space
from penstock.store.disk.format import ROW, Geometry, seal_rows, sound_rows
from penstock.store.disk.index import (
    BlockIndex,
    DiskSegment,
    check_rows,
    digests_of,
    make_rows,
)

GEOMETRY = Geometry(segment_bytes=64 << 20, block_bytes=8192, cell_count=4)
PART = bytes(range(16))
SPACES = [Space(b"one space of all", 3), Space(b"another one here", 1 << 60)]
LIFE = 0xFEED_0000_1234_5679


def segment(number: int, age: int = 1) -> DiskSegment:
    made = DiskSegment(number, f"{number:08d}.segment", GEOMETRY.segment_bytes)
    made.begin_life(GEOMETRY, life=LIFE, age=age, part=PART)
    return made


def table(count: int) -> np.ndarray:
    keys = [np.random.default_rng(n).bytes(16) for n in range(count)]
    rows = [
        make_rows(
            segment(0),
            [slot],
            SPACES[slot % 2],
            [key],
            [None],
            np.array([slot], dtype=np.uint64),
            now=1e9,
        )
        for slot, key in enumerate(keys)
    ]
    return seal_rows(np.concatenate(rows))


def test_rows_have_the_digests_that_blocks_are_looked_up_by() -> None:
    rows = table(40)

    sound, digests = check_rows(rows, LIFE, PART)

    keys = [row["key"].tobytes()[:16] for row in rows]
    expected = [digests_of(SPACES[n % 2], PART, [key])[0] for n, key in enumerate(keys)]
    assert sound.all()
    assert digests.tolist() == expected


def test_a_flipped_bit_makes_its_row_unsound_and_no_other() -> None:
    rows = table(32)
    _, digests = check_rows(rows, LIFE, PART)
    generator = np.random.default_rng(5)

    for _ in range(300):
        damaged = rows.copy()
        raw = damaged.view(np.uint8).reshape(32, ROW.itemsize)
        slot = int(generator.integers(32))
        raw[slot, int(generator.integers(ROW.itemsize))] ^= 1 << int(generator.integers(8))

        sound, found = check_rows(damaged, LIFE, PART)

        assert (
            sound.tolist() == sound_rows(damaged, LIFE).tolist() == [n != slot for n in range(32)]
        )
        assert found.tolist() == [0 if n == slot else digests[n] for n in range(32)]


def test_rows_of_another_life_or_slot_are_not_sound() -> None:
    rows = table(8)

    other_life, _ = check_rows(rows, LIFE + 2, PART)
    moved, _ = check_rows(rows[1:], LIFE, PART)

    assert not other_life.any()
    assert not moved.any()


def test_the_index_is_a_dictionary_of_places() -> None:
    random = np.random.default_rng(11)
    index = BlockIndex()
    segments = {number: segment(number) for number in range(8)}
    expected: dict[int, tuple[int, int]] = {}
    # Few low bits, so that many collide.
    digests = (random.integers(1, 1 << 40, 6000, dtype=np.uint64) << np.uint64(5)) | np.uint64(3)

    for step in range(400):
        each = segments[int(random.integers(8))]
        slots = random.choice(each.slot_count, 40, replace=False)
        slots = np.sort(slots[each.digests[slots] == 0])
        drawn = random.choice(digests, len(slots))
        kind = step % 4
        if kind == 0:
            fresh = {
                d: (each.number, s) for d, s in zip(drawn.tolist(), slots.tolist(), strict=True)
            }
            index.add_recovered(each, slots, drawn)
            expected = fresh | expected
        elif kind == 1:
            unique = np.unique(drawn)
            index.add(each, slots[: len(unique)].tolist(), unique.tolist(), segments)
            places = slots[: len(unique)].tolist()
            expected |= {d: (each.number, s) for d, s in zip(unique.tolist(), places, strict=True)}
        elif kind == 2:
            for digest in list(expected)[:20]:
                number, slot = expected.pop(digest)
                assert index.forget(digest, segments[number], slot)
        elif step % 32 == 3:
            index.drop(each)
            expected = {d: place for d, place in expected.items() if place[0] != each.number}

    assert len(index) == len(expected) == sum(each.live for each in segments.values())
    assert {digest: index.find(digest) for digest in expected} == expected
    absent = [digest for digest in digests.tolist() if digest not in expected]
    assert not any(digest in index for digest in absent)


def test_what_was_written_now_replaces_and_what_was_recovered_does_not() -> None:
    index, old, new = BlockIndex(), segment(0, age=1), segment(1, age=2)
    segments = {0: old, 1: new}
    digests = np.array([11, 12, 13], dtype=np.uint64)

    index.add_recovered(old, np.arange(3), digests)
    index.add(new, [5], [12], segments)
    index.add_recovered(old, np.array([7]), np.array([12], dtype=np.uint64))

    assert index.find(12) == (1, 5)
    assert (old.live, new.live, len(index)) == (2, 1, 3)
    assert index.drop(old).tolist() == [0, 2]
    assert (len(index), index.find(11), index.find(12)) == (1, None, (1, 5))


def test_a_block_that_moved_is_not_forgotten_with_its_old_slot() -> None:
    index, old, new = BlockIndex(), segment(0), segment(1)
    index.add(old, [3], [99], {0: old})
    index.add(new, [4], [99], {0: old, 1: new})

    assert not index.forget(99, old, 3)
    assert index.find(99) == (1, 4)
    assert index.forget(99, new, 4)
    assert 99 not in index


def test_a_block_takes_at_most_three_hundred_bytes_of_memory() -> None:
    count = 100_000
    geometry = Geometry(segment_bytes=count * 8192, block_bytes=1, cell_count=1)
    digests = np.random.default_rng(1).integers(1, 1 << 63, count, dtype=np.uint64)
    tracemalloc.start()
    index, filled = BlockIndex(), DiskSegment(1234, "path", 1 << 30)
    filled.begin_life(geometry, life=1, age=1, part=PART)

    index.add_recovered(filled, np.arange(geometry.slot_count), digests[: geometry.slot_count])

    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / geometry.slot_count < 300
