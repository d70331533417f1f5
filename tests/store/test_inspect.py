"""What lies in the folder of a disk tier: live, dead, damaged, also while a store writes there."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lab.fixtures.store_tier_suite import LAYOUTS, WAIT_S, StoreRig
from lab.fixtures.store_tier_suite import SPACE as SUITE_SPACE
from penstock.errors import ConfigError
from penstock.store.disk import format as disk_format
from penstock.store.disk.format import DiskCipher
from penstock.store.disk.inspect import inspect_folder
from penstock.store.disk.tier import DiskTier
from tests.store.segments import BLOCK_BYTES, FORM, LIFE, SPACE, Segment, key_of

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.store.disk.inspect import SegmentReport

OLD = SPACE._replace(generation=2)
FIRST = Segment(numbers=[1, 2], age=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a store that has not written a block yet."""
    (tmp_path / "lock").touch()
    disk_format.write_generations(tmp_path, {SPACE.name: SPACE.generation})
    disk_format.write_form(tmp_path, FORM)
    return tmp_path


def change(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def segment_of(folder: Path, file: str = "00000000.segment") -> SegmentReport:
    report = inspect_folder(folder).report
    return next(each for each in report.segments if each.file == file)


def test_a_segment_is_described(folder: Path) -> None:
    path = FIRST.write(folder)

    found = segment_of(folder)

    assert (found.file, found.file_bytes) == (path.name, path.stat().st_size)
    assert (found.age, found.life) == (1, f"{LIFE:016x}")
    assert (found.form, found.form_known) == (FORM.fingerprint.hex(), True)
    assert (found.slots, found.live, found.dead, found.free) == (4, 2, 0, 2)
    assert found.block_bytes == BLOCK_BYTES
    assert not found.problem
    assert not found.encrypted


def test_the_copy_in_the_newest_segment_is_live_whatever_the_name_of_the_file(folder: Path) -> None:
    Segment(numbers=[1, 2], age=8).write(folder, 0)
    Segment(numbers=[2, 3], age=7, life=7).write(folder, 1)

    report = inspect_folder(folder).report

    assert [(each.file[7], each.live, each.superseded) for each in report.segments] == [
        ("0", 2, 0),
        ("1", 1, 1),
    ]
    assert report.live == 3
    assert report.live_bytes == 3 * BLOCK_BYTES
    assert report.dead_bytes == BLOCK_BYTES


def test_blocks_of_another_generation_and_slots_without_a_row_are_dead(folder: Path) -> None:
    Segment(numbers=[1, 2, 3], blanked=[1]).write(folder, 0)
    Segment(numbers=[4, 5], age=2, life=2, space=OLD).write(folder, 1)

    report = inspect_folder(folder).report

    newer, older = report.segments
    assert (newer.live, newer.outdated, newer.skipped, newer.free) == (0, 2, 0, 2)
    assert (older.live, older.outdated, older.skipped, older.free) == (2, 0, 1, 1)
    (space,) = report.spaces
    assert (space.name, space.generation, space.live) == (SPACE.name.hex(), 3, 2)
    assert space.dead_by_generation == {2: 2}
    assert report.damages == []


def test_an_old_generation_does_not_supersede_a_live_block(folder: Path) -> None:
    Segment(numbers=[1]).write(folder, 0)
    Segment(numbers=[1], age=2, life=2, space=OLD).write(folder, 1)

    assert inspect_folder(folder).report.live == 1


def test_without_generations_nothing_is_live(folder: Path) -> None:
    FIRST.write(folder)
    (folder / "generations").write_text("{")

    report = inspect_folder(folder).report

    assert report.live == 0
    assert "generations is damaged" in report.damages[0]


def test_rows_of_an_earlier_life_are_free_slots(folder: Path) -> None:
    path = FIRST.write(folder)
    begun_again = replace(FIRST, life=77, age=2)
    change(path, 0, disk_format.seal_head(begun_again.head()))

    found = segment_of(folder)

    assert (found.live, found.dead, found.torn, found.free) == (0, 0, 0, 4)


def test_a_torn_row_is_damage(folder: Path) -> None:
    path = FIRST.write(folder)
    change(path, disk_format.Geometry.row_offset(1) + 20, b"torn")

    report = inspect_folder(folder).report

    assert (report.live, report.segments[0].torn) == (1, 1)
    assert report.damages == ["00000000.segment: 1 rows do not hold"]


def test_a_damaged_head_another_version_and_an_unused_file_are_told_apart(folder: Path) -> None:
    change(FIRST.write(folder, 0), 30, b"\xff")
    other = FIRST.head()
    other["version"] = 9
    (folder / "00000001.segment").write_bytes(disk_format.seal_head(other))
    (folder / "00000002.segment").write_bytes(bytes(8192))

    found = {each.file[7]: each for each in inspect_folder(folder).report.segments}

    assert (found["0"].problem, found["0"].damaged) == ("the head does not hold", True)
    assert found["1"].problem == "format version is 9, must be 1"
    assert found["2"].problem == "is not in use yet"
    assert not found["1"].damaged
    assert not found["2"].damaged


def test_a_file_that_was_cut_is_damage_and_its_first_blocks_are_read(folder: Path) -> None:
    path = FIRST.write(folder)
    end = FIRST.geometry.offset(1) + 100
    with path.open("r+b") as file:
        file.truncate(end)

    inspection = inspect_folder(folder)
    found = inspection.verify()

    needed = FIRST.geometry.segment_bytes
    assert inspection.report.damages == [
        f"00000000.segment: ends at byte {end}, must have {needed}"
    ]
    assert (found.whole, found.damaged) == (1, 1)
    assert found.damages[0].what == "the file ends within the slot"


def test_verify_reads_every_live_block(folder: Path) -> None:
    FIRST.write(folder, 0)
    Segment(numbers=[2, 3], age=2, life=2, salt=99).write(folder, 1)
    sizes: list[int] = []

    found = inspect_folder(folder).verify(None, sizes.append)

    assert (found.whole, found.trailer_only, found.changed, found.damaged) == (3, 0, 0, 0)
    assert sizes == [BLOCK_BYTES] * 3


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (0, "1 of 4 cells fail their sums"),
        (BLOCK_BYTES - 1, "1 of 4 cells fail their sums"),
        (FIRST.geometry.trailer_offset + 3, "the trailer does not hold"),
        (FIRST.geometry.trailer_offset + 260, "the trailer does not hold"),
    ],
)
def test_verify_finds_changed_bytes(folder: Path, offset: int, what: str) -> None:
    path = FIRST.write(folder)
    at = FIRST.geometry.offset(1) + offset
    change(path, at, bytes([path.read_bytes()[at] ^ 4]))

    found = inspect_folder(folder).verify()

    assert (found.whole, found.damaged) == (1, 1)
    assert found.damages == (("00000000.segment", 1, key_of(2).hex(), what),)


def test_verify_finds_exchanged_slots(folder: Path) -> None:
    path = FIRST.write(folder)
    image, size = path.read_bytes(), FIRST.geometry.slot_bytes
    first, second = FIRST.geometry.offset(0), FIRST.geometry.offset(1)
    change(path, first, image[second : second + size])
    change(path, second, image[first : first + size])

    found = inspect_folder(folder).verify()

    assert [each.what for each in found.damages] == ["the trailer is of another block"] * 2


def test_blocks_of_an_unknown_form_are_checked_by_their_trailer(folder: Path) -> None:
    path = FIRST.write(folder)
    (folder / f"{FORM.fingerprint.hex()}.form").unlink()
    change(path, FIRST.geometry.offset(0), b"other bytes")

    inspection = inspect_folder(folder)
    found = inspection.verify()

    assert not inspection.report.segments[0].form_known
    assert (found.whole, found.trailer_only, found.damaged) == (0, 2, 0)


def test_what_the_store_replaced_meanwhile_is_no_damage(folder: Path) -> None:
    path = FIRST.write(folder)
    gone = Segment(numbers=[5], age=3, life=3).write(folder, 1)
    inspection = inspect_folder(folder)
    gone.unlink()
    replace(FIRST, numbers=[8, 9, 10], life=88, age=4).write(folder, 0)

    found = inspection.verify()

    assert path.exists()
    assert (found.whole, found.changed, found.damaged) == (0, 3, 0)


def test_a_block_that_the_store_forgot_meanwhile_is_no_damage(folder: Path) -> None:
    path = FIRST.write(folder)
    change(path, FIRST.geometry.offset(0), b"rotten")
    inspection = inspect_folder(folder)
    forgotten = replace(FIRST, blanked=[0])
    change(path, forgotten.geometry.row_offset(0), forgotten.rows()[:1].tobytes())

    found = inspection.verify()

    assert (found.whole, found.changed, found.damaged) == (1, 1, 0)


def test_reading_changes_nothing(folder: Path) -> None:
    FIRST.write(folder)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}

    inspect_folder(folder).verify()

    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()
    }


def test_encrypted_blocks_are_verified_with_their_key_alone(folder: Path) -> None:
    pytest.importorskip("cryptography", reason="of the disk-encryption extra")
    ours, other = DiskCipher(bytes(32)), DiskCipher(bytes(range(32)))
    path = Segment(numbers=[1, 2], cipher=ours).write(folder)

    inspection = inspect_folder(folder)
    found = [inspection.verify(cipher) for cipher in (None, other, ours)]

    assert inspection.report.segments[0].encrypted
    assert [(each.whole, each.trailer_only, each.damaged) for each in found] == [
        (0, 2, 0),
        (0, 2, 0),
        (2, 0, 0),
    ]

    change(path, FIRST.geometry.offset(0), b"changed")
    (damage,) = inspect_folder(folder).verify(ours).damages
    assert damage.what == "the block does not open: its bytes or its tag were changed"


def test_folders_that_are_none_of_a_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="absent: there is no such folder"):
        inspect_folder(tmp_path / "absent")
    with pytest.raises(ConfigError, match="file: is a file, must be the folder of a store"):
        inspect_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="is not the folder of a store: it has no segments"):
        inspect_folder(tmp_path)


def test_a_folder_without_blocks_is_one_of_a_store(folder: Path) -> None:
    report = inspect_folder(folder).report

    assert (report.segments, report.live, report.damages) == ((), 0, [])


def refuse(path: object, *_: object) -> int:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


# The tests may run as root, whom no mode of a file keeps out.
def test_a_folder_that_may_not_be_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", refuse)

    with pytest.raises(ConfigError, match=f"^{folder}: may not be read: no permission$"):
        inspect_folder(folder)


def test_a_segment_that_may_not_be_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FIRST.write(folder)
    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(ConfigError, match=f"^{path}: may not be read: no permission$"):
        inspect_folder(folder)


def test_blocks_beside_lost_generations_are_not_live(folder: Path) -> None:
    FIRST.write(folder)
    (folder / "generations").unlink()

    report = inspect_folder(folder).report

    assert report.live == 0
    assert report.damages == ["generations is missing: no block counts"]


def test_the_folder_of_a_running_tier_can_be_verified(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 8 << 20)
    try:
        for layout in LAYOUTS.values():
            rig = StoreRig(tier, layout)
            rig.save_and_wait(rig.fill())
        before, after = tier.generation(SUITE_SPACE.name), tier.void(SUITE_SPACE.name)
        rig.save_and_wait(rig.fill(seed=2))

        inspection = inspect_folder(tmp_path)
        found = inspection.verify()
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)

    report = inspection.report
    assert report.damages == []
    assert {each.form_known for each in report.segments} == {True}
    assert (found.whole, found.trailer_only, found.changed, found.damaged) == (24, 0, 0, 0)
    (space,) = report.spaces
    assert (space.generation, space.live) == (after, 24)
    assert space.dead_by_generation == {before: 24 * len(LAYOUTS)}


def test_a_tier_that_saves_and_reclaims_meanwhile_looks_whole(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    rig = StoreRig(tier, LAYOUTS["whole pages"])
    live = 0
    try:
        for seed in range(30):
            ticket = rig.save(rig.fill(seed=seed))

            inspection = inspect_folder(tmp_path)
            found = inspection.verify()

            assert inspection.report.damages == []
            assert found.damages == ()
            live += found.whole
            rig.wait(ticket)
    finally:
        tier.close(deadline=time.monotonic() + WAIT_S)

    assert live > 24 * 30
    assert tier.state().blocks_reclaimed > 24 * 10


def test_generations_that_were_put_back_are_damage_and_nothing_is_live(folder: Path) -> None:
    later = SPACE._replace(generation=SPACE.generation + 1)
    Segment(numbers=[1, 2]).write(folder, 0)
    Segment(numbers=[3], space=later, age=2).write(folder, 1)

    report = inspect_folder(folder).report

    assert report.live == 0
    assert report.damages == [
        "generations is older than a segment, which has a later generation: no block counts"
    ]


def test_a_second_record_that_is_later_is_damage_as_well(folder: Path) -> None:
    Segment(numbers=[1, 2]).write(folder)
    disk_format.write_generations(folder, {SPACE.name: 1 << 40}, "generations.copy")

    report = inspect_folder(folder).report

    assert report.live == 0
    assert "generations is older than generations.copy" in report.damages[0]


def test_what_is_named_like_a_segment_and_is_none_is_told(folder: Path) -> None:
    Segment(numbers=[1, 2]).write(folder)
    os.mkfifo(folder / "00000001.segment")
    (folder / "00000002.segment").mkdir()
    (folder / "00000003.segment").symlink_to(folder / "00000000.segment")

    report = inspect_folder(folder).report

    assert report.live == 2
    problems = {each.file: each.problem for each in report.segments if each.problem}
    assert problems == dict.fromkeys(
        [f"0000000{number}.segment" for number in (1, 2, 3)],
        "is no regular file: a store ignores it",
    )
    assert report.damages == []
