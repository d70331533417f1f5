"""What the disk tier does with its folder: slots, segments, room, recovery, generations."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lab.fixtures.store_tier_suite import (
    LAYOUTS,
    SAVE_SALT,
    SPACE,
    WAIT_S,
    StoreRig,
    wait_until_recovered,
)
from penstock.cache.operations import BlockFault
from penstock.errors import ConfigError, UnavailableError
from penstock.store.base import FindJob, LoadJob, Space
from penstock.store.disk.format import (
    HEAD,
    PAGE_BYTES,
    ROW,
    Geometry,
    read_form,
    read_head,
    read_trailer,
    seal_head,
    sound_rows,
)
from penstock.store.disk.index import digests_of
from penstock.store.disk.tier import DiskTier
from tests.descriptors import open_descriptors
from tests.store.segments import seal_trailer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.store.base import GoneBlocks
    from penstock.vocabulary.keys import Key

LAYOUT = LAYOUTS["whole pages"]
BLOCK = Geometry(segment_bytes=1 << 30, block_bytes=LAYOUT.block_bytes, cell_count=4).slot_bytes
SIZE_BYTES = 8 << 20


def segments_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.segment"))


def small_size(slots: int, segments: int = 8) -> int:
    """A size whose segments have so many slots each."""
    return segments * (2 * PAGE_BYTES + slots * BLOCK)


def gone_keys(gone: list[GoneBlocks]) -> set[Key]:
    return {key for each in gone for key in each.keys}


def test_the_folder_and_its_files_are_for_their_owner_alone(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rig = StoreRig(make(), LAYOUT)
    rig.save_and_wait(rig.fill(2))

    modes = {stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "tier").iterdir()}

    assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700
    assert modes == {0o600}


def test_a_second_process_is_told_who_has_the_folder(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    make()
    program = """
import sys
from pathlib import Path
from penstock.store.disk.tier import DiskTier
DiskTier(Path(sys.argv[1]), 1 << 20)
"""

    second = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "tier")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert "UnavailableError" in second.stderr
    assert f"tier is in use by another store process, pid {os.getpid()}" in second.stderr


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    threads, descriptors = {*threading.enumerate()}, open_descriptors()
    tier = DiskTier(tmp_path / "tier", SIZE_BYTES)
    rig = StoreRig(tier, LAYOUT)
    rig.save_and_wait(rig.fill(8))
    rig.host.close()

    tier.close(deadline=time.monotonic() + WAIT_S)

    assert {*threading.enumerate()} <= threads
    assert open_descriptors() <= descriptors
    with pytest.raises(ValueError, match="closed"):
        tier.load(LoadJob(99, rig.arena, SPACE, [b"k" * 16], [0], 0))


@pytest.mark.parametrize("threads", [3, 9])
def test_a_number_of_threads_out_of_range_is_refused(tmp_path: Path, threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}, must be from 4 to 8"):
        DiskTier(tmp_path / "tier", SIZE_BYTES, threads=threads)


def test_blocks_of_a_job_lie_side_by_side_as_the_format_says(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    tier = make()
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(6)
    rig.save_and_wait(saved)
    tier.close(deadline=time.monotonic() + WAIT_S)

    (path,) = segments_of(tmp_path / "tier")
    raw = path.read_bytes()
    head = read_head(raw[:PAGE_BYTES])
    assert head is not None
    geometry = Geometry(segment_bytes=len(raw), block_bytes=int(head["block_bytes"]), cell_count=4)
    rows = np.frombuffer(raw, dtype=ROW, count=geometry.slot_count, offset=PAGE_BYTES)

    assert sound_rows(rows, int(head["life"])).tolist() == [True] * 6 + [False] * (len(rows) - 6)
    form = read_form(tmp_path / "tier", head["form"].tobytes())
    assert form is not None
    assert form.fingerprint == rig.arena.form.fingerprint
    for slot, key in enumerate(saved.keys):
        at = geometry.offset(slot)
        trailer_raw = raw[at + geometry.trailer_offset : at + geometry.slot_bytes]
        trailer = read_trailer(trailer_raw)
        assert trailer is not None
        sealed = seal_trailer(*trailer)
        assert raw[at : at + geometry.block_bytes] == saved.content[slot].tobytes()
        assert trailer[0]["key"].tobytes()[:16] == rows[slot]["key"].tobytes()[:16] == key
        assert int(trailer[0]["sum"]) == rows[slot]["trailer_sum"]
        assert int(trailer[0]["salt"]) == SAVE_SALT
        assert trailer_raw == sealed.ljust(geometry.trailer_bytes, b"\0")


def test_files_stay_within_the_size_and_the_coldest_blocks_go_first(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    size = small_size(slots=4)
    rig = StoreRig(make(size), LAYOUT)
    groups = [rig.fill(4, seed=seed) for seed in range(20, 32)]
    gone: set[Key] = set()

    for number, _ in enumerate(groups):
        group = rig.fill(4, seed=20 + number)
        rig.save_and_wait(group)
        gone |= gone_keys(rig.tier.take_gone())
        if number >= 2:  # The first group is used all the time.
            assert rig.load_and_wait(groups[0].keys, [40, 41, 42, 43]).faults == ()

    used = sum(each.stat().st_size for each in segments_of(tmp_path / "tier"))
    kept = [all(rig.find(group.keys)) for group in groups]
    assert used <= size
    assert kept[0]
    assert kept[-1]
    assert not any(kept[1:4])
    lost = {key for group in groups for key in group.keys if not rig.find([key])[0]}
    assert gone <= lost
    assert rig.tier.state().blocks_reclaimed >= len(lost)


def test_blocks_that_were_given_up_are_reported_with_their_keys(
    make: Callable[..., DiskTier],
) -> None:
    rig = StoreRig(make(small_size(slots=4)), LAYOUT)
    reported: list[GoneBlocks] = []
    saved = []
    for seed in range(20, 30):
        saved.append(rig.fill(4, seed=seed))
        ticket = rig.save(saved[-1])
        while ticket not in {each.ticket for each in rig.ended}:
            rig.ended += rig.tier.collect()
        reported += rig.tier.take_gone()

    lost = {key for each in saved for key in each.keys if not rig.find([key])[0]}

    assert len(lost) >= 8
    assert gone_keys(reported) == lost
    space = Space(SPACE.name, rig.generation(SPACE.name))
    assert {(each.space, each.part) for each in reported} == {(space, rig.arena.part)}


def test_a_folder_too_small_for_two_blocks_fails_the_job_with_the_number(
    make: Callable[..., DiskTier],
) -> None:
    rig = StoreRig(make(2 * BLOCK), LAYOUT)

    ended = rig.save_and_wait(rig.fill(2))

    assert [fault for _, fault in ended.faults] == [BlockFault.UNREADABLE] * 2
    assert f"gives the folder {2 * BLOCK} bytes, must be at least" in ended.failure
    assert rig.tier.state().on


def test_a_folder_that_is_opened_smaller_gives_its_coldest_files_back_when_it_is_written(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    size = small_size(slots=4)
    rig = StoreRig(make(size), LAYOUT)
    groups = [rig.fill(4, seed=seed) for seed in range(20, 26)]
    for number, _ in enumerate(groups):
        rig.save_and_wait(rig.fill(4, seed=20 + number))
    rig.load_and_wait(groups[0].keys, [40, 41, 42, 43])

    rig = StoreRig(make(size // 4), LAYOUT)
    wait_until_recovered(rig.tier)
    newest = rig.fill(4, seed=30)
    ticket = rig.save(newest)
    while ticket not in {each.ticket for each in rig.ended}:
        rig.ended += rig.tier.collect()
    reported = gone_keys(rig.tier.take_gone())

    used = sum(each.stat().st_size for each in segments_of(tmp_path / "tier"))
    assert 0 < used <= size // 4
    assert all(rig.find(newest.keys))
    assert rig.tier.state().capacity_bytes == size // 4
    lost = {key for group in groups for key in group.keys if not rig.find([key])[0]}
    assert reported == lost
    assert lost


def test_more_kinds_of_blocks_than_segments_share_the_folder(
    make: Callable[..., DiskTier],
) -> None:
    tier = make(small_size(slots=2))
    rigs = [StoreRig(tier, LAYOUTS[kind], rank=rank) for rank in range(3) for kind in LAYOUTS]
    random = Random(3)

    for number in range(60):
        rig = random.choice(rigs)
        saved = rig.fill(1, seed=number + 1)
        assert rig.save_and_wait(saved).faults == ()
        assert rig.load_and_wait(saved.keys, [5]).faults == ()
        rig.require(saved, [5])
        last = (rigs.index(rig), saved)

    tier = make(small_size(slots=2))
    again = [StoreRig(tier, LAYOUTS[kind], rank=rank) for rank in range(3) for kind in LAYOUTS]
    assert again[last[0]].find(last[1].keys) == [True]


def test_a_block_is_found_where_every_rank_has_its_part(make: Callable[..., DiskTier]) -> None:
    tier = make()
    first, second = (StoreRig(tier, LAYOUT, rank=rank) for rank in range(2))
    saved = first.fill(4)
    first.save_and_wait(saved)
    second.save_and_wait(second.fill(2))
    space = Space(SPACE.name, tier.generation(SPACE.name))

    found = tier.find(FindJob(7, [first.arena, second.arena], space, saved.keys))
    alone = tier.find(FindJob(8, [first.arena], space, saved.keys))

    assert found == (7, [True, True, False, False], False)
    assert alone == (8, [True] * 4, False)


def test_saves_beyond_the_bound_are_dropped_and_counted(make: Callable[..., DiskTier]) -> None:
    rig = StoreRig(make(queue_bytes=1), LAYOUT)
    groups = [rig.fill(4, seed=seed, first=4 * seed) for seed in range(10)]

    tickets = [rig.save(group) for group in groups]
    ended = rig.wait(*tickets)

    dropped = [each for each in ended if each.faults]
    assert ended[0].faults == ()
    assert all(len(each.faults) == 4 and not each.failure for each in dropped)
    assert rig.tier.state().saves_dropped == 4 * len(dropped)


def test_a_segment_that_was_not_filled_is_filled_on_after_a_restart(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    saved = []
    for seed in range(1, 6):
        rig = StoreRig(make(), LAYOUT)
        saved.append(rig.fill(3, seed=seed))
        rig.save_and_wait(saved[-1])

    again = StoreRig(make(), LAYOUT)

    assert len(segments_of(tmp_path / "tier")) == 1
    assert all(all(again.find(each.keys)) for each in saved)


def test_the_newer_of_two_copies_counts_after_a_restart(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(3)
    rig.save_and_wait(saved)
    make().close(deadline=time.monotonic() + WAIT_S)
    (first,) = segments_of(tmp_path / "tier")
    raw = bytearray(first.read_bytes())
    copy = np.frombuffer(bytes(raw[: HEAD.itemsize]), dtype=HEAD).copy()
    copy["age"] -= 1
    raw[:PAGE_BYTES] = seal_head(copy)
    (tmp_path / "tier" / "00000001.segment").write_bytes(raw)
    whole = Geometry(segment_bytes=len(raw), block_bytes=LAYOUT.block_bytes, cell_count=4)
    with open(first, "r+b") as file:  # The newer one has a damaged block.
        file.seek(whole.offset(1))
        file.write(b"?")

    again = StoreRig(make(), LAYOUT)
    found = again.tier.state().blocks
    ended = again.load_and_wait(saved.keys, [10, 11, 12])

    assert found == 3
    assert ended.faults == ((1, BlockFault.CORRUPT),)


def test_a_block_that_failed_its_sums_is_not_found_after_a_restart(
    make: Callable[..., DiskTier],
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(3)
    rig.blocks()[1, 0] ^= 1
    rig.save_and_wait(saved)
    rig.load_and_wait(saved.keys, [10, 11, 12])

    again = StoreRig(make(), LAYOUT)

    assert again.find(saved.keys) == [True, False, True]


def test_a_segment_of_another_version_is_refused_by_name_or_reclaimed(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(3)
    rig.save_and_wait(saved)
    rig.tier.close(deadline=time.monotonic() + WAIT_S)
    (path,) = segments_of(tmp_path / "tier")
    raw = bytearray(path.read_bytes())
    head = np.frombuffer(bytes(raw[: HEAD.itemsize]), dtype=HEAD).copy()
    head["version"] = 77
    path.write_bytes(seal_head(head) + bytes(raw[PAGE_BYTES:]))

    with pytest.raises(ConfigError, match=r"00000000\.segment: format version is 77, must be 1"):
        DiskTier(tmp_path / "tier", SIZE_BYTES)
    again = StoreRig(make(ignore_other_versions=True), LAYOUT)

    assert again.find(saved.keys) == [False] * 3
    assert again.save_and_wait(again.fill(3, seed=5)).failure == ""


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_after_damage_to_the_generations_nothing_old_is_found(
    make: Callable[..., DiskTier], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(3)
    rig.save_and_wait(saved)
    before = rig.generation(SPACE.name)
    rig.tier.close(deadline=time.monotonic() + WAIT_S)
    path = tmp_path / "tier" / "generations"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "cut" else b'{"version": 1, "generations": {}}')

    again = StoreRig(make(), LAYOUT)
    generation = again.tier.generation(SPACE.name)
    once_more = StoreRig(make(), LAYOUT)

    assert generation > before
    assert once_more.tier.generation(SPACE.name) == generation
    assert once_more.find(saved.keys, space=Space(SPACE.name, generation)) == [False] * 3
    assert once_more.tier.state().blocks == 0
    assert "no block that was saved before is used again" in caplog.text


def test_a_file_without_a_head_is_filled_anew(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    tier = make()
    tier.close(deadline=time.monotonic() + WAIT_S)
    (tmp_path / "tier" / "00000000.segment").write_bytes(b"x" * SIZE_BYTES)

    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(3)

    assert rig.save_and_wait(saved).failure == ""
    assert rig.find(saved.keys) == [True] * 3
    assert sum(each.stat().st_size for each in segments_of(tmp_path / "tier")) <= SIZE_BYTES


def test_a_file_that_was_cut_serves_what_is_left_of_it(
    make: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rig = StoreRig(make(), LAYOUT)
    saved = rig.fill(6)
    rig.save_and_wait(saved)
    rig.tier.close(deadline=time.monotonic() + WAIT_S)
    (path,) = segments_of(tmp_path / "tier")
    whole = Geometry(
        segment_bytes=path.stat().st_size, block_bytes=LAYOUT.block_bytes, cell_count=4
    )
    os.truncate(path, whole.offset(4) + 100)

    again = StoreRig(make(), LAYOUT)
    ended = again.load_and_wait(saved.keys, range(10, 16))

    assert ended.faults == ((4, BlockFault.CORRUPT), (5, BlockFault.CORRUPT))
    np.testing.assert_array_equal(again.blocks()[10:14], saved.content[:4])


def test_a_key_with_the_digest_of_another_is_missing_and_the_other_stays(
    make: Callable[..., DiskTier],
) -> None:
    tier = make()
    rig = StoreRig(tier, LAYOUT)
    saved = rig.fill(2)
    rig.save_and_wait(saved)
    pool = tier.pool
    space = Space(SPACE.name, rig.generation(SPACE.name))
    (theirs,) = digests_of(space, rig.arena.part, [b"another key here"])
    pool.index.add(pool.segments[0], [1], [theirs], pool.segments)

    ended = rig.load_and_wait([b"another key here", saved.keys[1]], [10, 11])

    assert ended.faults == ((0, BlockFault.MISSING),)
    assert tier.state().blocks_corrupt == 0
    np.testing.assert_array_equal(rig.blocks()[11], saved.content[1])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(UnavailableError, match="file/tier cannot be used"):
        DiskTier(tmp_path / "file" / "tier", SIZE_BYTES)
